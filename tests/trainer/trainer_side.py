"""The trainer's side of the queue and the stream, put together as a run does, without a learner."""

from collections.abc import Sequence
from functools import partial

from arq.connections import ArqRedis

from benchmarks.scripted_fleet import VOCAB_SIZE, task
from pipeline.judge import Judge
from pipeline.request import Limits, Sampling
from pipeline.stream import Delivery
from trainer.batching.samples import samples_of
from trainer.loop.bookkeeping import streams_of
from trainer.loop.open_requests import OpenRequests
from trainer.loop.recovery import RunRecovery
from trainer.recipe import JudgeRecipe, RolloutsRecipe, Stragglers
from trainer.records.journal import EpisodeRow, Journal, read
from trainer.records.judgement_row import JudgementRow
from trainer.rollouts.admission import Admission
from trainer.rollouts.closing import GroupCloser
from trainer.rollouts.dispatch import Dispatcher, RequestForm, TaskOrder, new_ids
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.intake import Intake
from trainer.rollouts.judgements import JudgementIntake
from trainer.rollouts.judging import Judging
from trainer.rollouts.ledger import Ledger, LedgerState
from trainer.rollouts.quarantine import Quarantine
from trainer.rollouts.recording import Keep, RolloutRecorder

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
        judge: JudgeRecipe | None = None,
    ) -> None:
        """`judge`: a rule or a function; by default there is no judge."""
        self.pool = pool
        self.recorder = RolloutRecorder(pool, RUN, journal.directory.parent, RolloutsRecipe(keep=keep))
        self.journal = journal
        self.restored = restored or LedgerState()
        self.admission = Admission(max_lag_versions=max_lag_versions, groups_per_step=1, num_steps=1000)
        self.judge = judge or JudgeRecipe()
        self.said: list[str] = []
        self.book = GroupBook(
            self.admission,
            min_valid_members=2,
            stragglers=stragglers,
            requires_judgements=self.judge.required,
        )
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
        self._build_intake(max_refills)
        self._build_loop_side()

    def _build_intake(self, max_refills: int) -> None:
        pool = self.pool
        self.judging = Judging.of_run(
            pool,
            RUN,
            self.judge,
            None if self.judge.method == "none" else _judge_of(self.judge),
            book=self.book,
            ledger=self.ledger,
            say=self.said.append,
        )
        self.closer = GroupCloser(self.book, self.ledger, self.quarantine, self.judging.waits)
        self.intake = Intake(
            pool,
            book=self.book,
            ledger=self.ledger,
            quarantine=self.quarantine,
            closer=self.closer,
            heldout=NoEvaluation(),
            refill=self.dispatcher.refill,
            judge=self.judging.requests.want,
            samples_of=partial(samples_of, vocab_size=VOCAB_SIZE, max_tokens=128),
            max_refills=max_refills,
        )
        self.judgements = JudgementIntake(
            pool, book=self.book, ledger=self.ledger, requests=self.judging.requests
        )
        self.streams = streams_of(pool, RUN, self.intake, self.judgements, self.recorder)

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
            streams=self.streams,
            closer=self.closer,
            requests=self.requests,
            judging=self.judging.requests,
        )

    async def restarted(self) -> "TrainerSide":
        """What a trainer that died would see."""
        other = TrainerSide(self.pool, self.journal, judge=self.judge)
        await other.streams.recover()
        return other

    def fates(self) -> list[str]:
        return [row.fate for row in read(self.journal.directory, EpisodeRow)]

    def judgements_made(self) -> list[JudgementRow]:
        return list(read(self.journal.directory, JudgementRow))

    def pending(self) -> list[tuple[str, str]]:
        return list(self.ledger.state(step=0, version=0, cursor=0).pending)


def _judge_of(recipe: JudgeRecipe) -> Judge:
    assert recipe.method in ("rule", "function")
    return Judge(
        method=recipe.method,
        name=recipe.name,
        score_format_errors=recipe.score_format_errors,
        score_submission=recipe.score_submission,
    )
