"""The trainer's side of the queue and the stream, put together as a run does, without a learner."""

from collections.abc import Sequence

from arq.connections import ArqRedis

from benchmarks.scripted_fleet import VOCAB_SIZE, task
from pipeline.request import Limits, Sampling
from pipeline.stream import Delivery
from trainer.loop.open_requests import OpenRequests
from trainer.loop.recovery import RunRecovery
from trainer.recipe import RolloutsRecipe, Stragglers
from trainer.records.journal import EpisodeRow, Journal, read
from trainer.rollouts.admission import Admission
from trainer.rollouts.closing import GroupCloser
from trainer.rollouts.dispatch import Dispatcher, RequestForm, TaskOrder, new_ids
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.intake import Intake
from trainer.rollouts.ledger import Ledger, LedgerState
from trainer.rollouts.quarantine import Quarantine
from trainer.rollouts.recording import Keep, RolloutRecorder
from trainer.rollouts.stream_reader import StreamReader

RUN = "run"
GROUP_SIZE = 3


class NoEvaluation:
    """Nothing is held out."""

    outstanding = ()

    async def send(self) -> None: ...

    def awaits(self, request_id: str) -> bool:
        return False

    def accept(self, delivery: Delivery) -> None:
        raise AssertionError("it waits for nothing")


class TrainerSide:
    """Of the run `run`, whose groups have three members, from where `restored` left it."""

    def __init__(
        self,
        pool: ArqRedis,
        journal: Journal,
        *,
        restored: LedgerState | None = None,
        tasks: Sequence[str] = ("t",),
        max_lag_versions: int = 4,
        stragglers: Stragglers = "wait",
        max_refills: int = 0,
        keep: Keep = "none",
    ) -> None:
        self.pool = pool
        self.recorder = RolloutRecorder(pool, journal.directory.parent, RolloutsRecipe(keep=keep))
        self.journal = journal
        self.restored = restored or LedgerState()
        self.admission = Admission(max_lag_versions=max_lag_versions, groups_per_step=1, num_steps=1000)
        self.book = GroupBook(self.admission, min_valid_members=2, stragglers=stragglers)
        self.ledger = Ledger(journal, self.restored)
        self.quarantine = Quarantine(journal)
        self.dispatcher = Dispatcher(
            pool,
            RequestForm(run_id=RUN, limits=Limits(), agent_config="", tokenizer="", ids=new_ids()),
            TaskOrder([task(name) for name in tasks], seed=0),
            self.book,
            ledger=self.ledger,
            quarantine=self.quarantine,
            group_size=GROUP_SIZE,
            sampling=Sampling(),
        )
        self.closer = GroupCloser(self.book, self.ledger, self.quarantine)
        self.intake = Intake(
            pool,
            book=self.book,
            ledger=self.ledger,
            quarantine=self.quarantine,
            closer=self.closer,
            heldout=NoEvaluation(),
            refill=self.dispatcher.refill,
            vocab_size=VOCAB_SIZE,
            max_tokens=128,
            max_refills=max_refills,
        )
        self.reader = StreamReader(pool, RUN, self.intake.accept, record=self.recorder.record)
        self._build_loop_side()

    def _build_loop_side(self) -> None:
        self.requests = OpenRequests(
            self.pool,
            RUN,
            book=self.book,
            ledger=self.ledger,
            dispatcher=self.dispatcher,
            heldout=NoEvaluation(),
        )
        self.recovery = RunRecovery(
            self.pool,
            RUN,
            book=self.book,
            ledger=self.ledger,
            dispatcher=self.dispatcher,
            reader=self.reader,
            closer=self.closer,
            requests=self.requests,
        )

    async def restarted(self) -> "TrainerSide":
        """What a trainer that died would see."""
        other = TrainerSide(self.pool, self.journal)
        await other.reader.recover()
        return other

    def fates(self) -> list[str]:
        return [row.fate for row in read(self.journal.directory, EpisodeRow)]

    def pending(self) -> list[tuple[str, str]]:
        return list(self.ledger.state(step=0, version=0, cursor=0).pending)
