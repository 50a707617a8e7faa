"""The trainer's side of the queue and the stream, put together as a run does, without a learner and without engines."""

from collections.abc import Sequence
from typing import Any, Literal, cast

from arq.connections import ArqRedis
from msgspec.structs import replace

from benchmarks import chat_tokenizer
from benchmarks.scripted_fleet import VOCAB_SIZE, task
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow, JudgementRow
from pipeline.judge import Judge
from pipeline.request import Limits
from trainer.inputs import Inputs, TaskSource
from trainer.learner.config import LearnerConfig
from trainer.loop.checkpoints import Checkpoints
from trainer.loop.run import Run
from trainer.loop.state import RunState, StepTimes
from trainer.recipe import (
    AdmissionRecipe,
    AlarmsRecipe,
    BatchRecipe,
    CreditRecipe,
    CurriculumRecipe,
    JudgeRecipe,
    Recipe,
    Rollout,
    RolloutsRecipe,
    Stragglers,
    TaskFiles,
)
from trainer.records.alarms import Alarms
from trainer.records.journal_writer import Journal
from trainer.rollouts.books import Books
from trainer.rollouts.dispatch import RequestForm, new_ids
from trainer.rollouts.ledger import LedgerState
from trainer.rollouts.open_requests import RunRecovery
from trainer.rollouts.recording import Keep, RolloutRecorder

RUN = "run"
GROUP_SIZE = 3


class Said(list[str]):
    """A console that remembers its lines."""

    def say(self, line: str) -> None:
        self.append(line)


class TrainerSide:
    """Of the run `run`, whose groups have three members by default, from where `restored` left it."""

    def __init__(
        self,
        pool: ArqRedis,
        journal: Journal,
        *,
        restored: LedgerState | None = None,
        tasks: Sequence[str] = ("t",),
        group_size: int = GROUP_SIZE,
        max_lag_versions: int = 4,
        stragglers: Stragglers = "wait",
        staleness: Literal["fixed", "controlled"] = "fixed",
        max_refills: int = 0,
        keep: Keep = "none",
        judge: JudgeRecipe | None = None,
        credit: CreditRecipe | None = None,
        curriculum: CurriculumRecipe | None = None,
    ) -> None:
        """`judge`: a rule, a function or a teacher; by default there is no judge. `credit` reads its scores by default."""
        self.pool, self.journal, self.credit = pool, journal, credit
        self.judge = judge or JudgeRecipe()
        self.said = Said()
        self.restored = restored or LedgerState()
        recipe = Recipe(
            name="run",
            model="",
            num_steps=1000,
            tasks=TaskFiles(train=""),
            rollout=Rollout(group_size=group_size, agent="", group_refills=max_refills),
            batch=BatchRecipe(groups_per_step=1, min_valid_members=2),
            learner=LearnerConfig(lr=1e-6, micro_batch_tokens=128),
            curriculum=curriculum or CurriculumRecipe(),
            admission=AdmissionRecipe(
                max_lag_versions=max_lag_versions, stragglers=stragglers, staleness=staleness
            ),
            judge=self.judge,
            credit=credit or CreditRecipe(method="outcome_then_steps"),
            rollouts=RolloutsRecipe(keep=keep),
        )
        self.run = self._run(recipe, tasks)
        self.admission, self.book, self.ledger = self.books.admission, self.books.groups, self.books.ledger
        self.quarantine, self.dispatcher = self.books.quarantine, self.books.dispatcher
        self.judging, self.closer = self.books.judging, self.books.closer
        self.intake, self.streams, self.requests = self.run.intake, self.run.streams, self.run.requests
        self.recovery = RunRecovery(self.books, self.streams, self.requests)

    def _run(self, recipe: Recipe, tasks: Sequence[str]) -> Run:
        nothing = cast(Any, None)
        root = self.journal.directory.parent
        form = RequestForm(run_id=RUN, limits=Limits(), agent_config="", tokenizer="", ids=new_ids())
        self.books = Books(
            self.pool,
            recipe,
            _inputs(tasks),
            form,
            None if self.judge.method == "none" else _judge_of(self.judge),
            restored=self.restored,
            rows=self.journal,
            journal=self.journal,
            say=self.said.append,
        )
        self.recorder = RolloutRecorder(self.pool, RUN, root, recipe.rollouts)
        return Run(
            books=self.books,
            root=root,
            console=cast(Any, self.said),
            records=cast(Any, self.journal),
            alarms=Alarms(AlarmsRecipe(), max_lag_versions=4),
            state=RunState.resumed(self.restored, []),
            times=StepTimes(),
            learner=nothing,
            checkpoints=Checkpoints(root / "checkpoints", keep=2),
            recorder=self.recorder,
            transport=nothing,
            engines=None,
        )

    async def restarted(self) -> "TrainerSide":
        """What a trainer that died would see."""
        other = TrainerSide(self.pool, self.journal, judge=self.judge, credit=self.credit)
        await other.streams.recover()
        return other

    def fates(self) -> list[str]:
        return [row.fate for row in read(self.journal.directory, EpisodeRow)]

    def judgements_made(self) -> list[JudgementRow]:
        return list(read(self.journal.directory, JudgementRow))

    def pending(self) -> list[tuple[str, str]]:
        return list(self.ledger.state(step=0, version=0, cursor=0).pending)


def _inputs(tasks: Sequence[str]) -> Inputs:
    return Inputs(
        sources=(TaskSource("", [task(name) for name in tasks], ""),),
        heldout=[],
        heldout_sets={},
        agent_config="",
        tokenizer=replace(chat_tokenizer.bundle(), vocab_size=VOCAB_SIZE),
        num_unverified=0,
        num_uncontrolled=0,
        num_too_weak=0,
    )


def _judge_of(recipe: JudgeRecipe) -> Judge:
    assert recipe.method in ("rule", "function", "teacher")
    return Judge(
        method=recipe.method,
        name=recipe.name,
        score_format_errors=recipe.score_format_errors,
        score_submission=recipe.score_submission,
    )
