"""The bookkeeping of a run put together: what is enqueued, what came back, and what becomes of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from arq.connections import ArqRedis
from msgspec.structs import asdict

from pipeline.request import Sampling
from trainer.inputs import Inputs
from trainer.recipe import Recipe
from trainer.records.console import Console
from trainer.records.sinks import Records
from trainer.rollouts.admission import Admission
from trainer.rollouts.closing import GroupCloser
from trainer.rollouts.dispatch import Dispatcher, RequestForm, TaskOrder
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.heldout import HeldOut
from trainer.rollouts.intake import Intake
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.quarantine import Quarantine
from trainer.rollouts.recording import RolloutRecorder
from trainer.rollouts.stream_reader import StreamReader


@dataclass(frozen=True, slots=True)
class RunContext:
    """Which run is assembled, and where it writes."""

    redis: ArqRedis
    recipe: Recipe
    run_id: str
    root: Path  # the run's directory
    records: Records
    console: Console

    @property
    def journal(self) -> Path:
        return self.root / "journal"


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The bookkeeping of what is enqueued and what came back."""

    admission: Admission
    book: GroupBook
    ledger: Ledger
    quarantine: Quarantine
    closer: GroupCloser
    dispatcher: Dispatcher
    heldout: HeldOut
    last_failed: Callable[[], str]  # id of the request that failed last
    recorder: RolloutRecorder
    reader: StreamReader


def rollouts_of(
    run: RunContext,
    inputs: Inputs,
    form: RequestForm,
    ledger: Ledger,
    quarantine: Quarantine,
    recorder: RolloutRecorder,
) -> Rollouts:
    """The bookkeeping of a run, empty yet."""
    recipe = run.recipe
    admission = Admission(
        max_lag_versions=recipe.admission.max_lag_versions,
        groups_per_step=recipe.batch.groups_per_step,
        num_steps=recipe.num_steps,
    )
    book = _book(recipe, admission)
    heldout = _heldout(run, inputs, form, ledger)
    dispatcher = Dispatcher(
        run.redis,
        form,
        TaskOrder(inputs.train, seed=recipe.seed),
        book,
        ledger=ledger,
        quarantine=quarantine,
        group_size=recipe.rollout.group_size,
        sampling=sampling_of(recipe),
    )
    closer = GroupCloser(book, ledger, quarantine)
    intake = Intake(
        run.redis,
        book=book,
        ledger=ledger,
        quarantine=quarantine,
        closer=closer,
        heldout=heldout,
        refill=dispatcher.refill,
        vocab_size=inputs.tokenizer.vocab_size,
        max_tokens=recipe.learner.micro_batch_tokens,
        max_refills=recipe.group_refills,
    )
    return Rollouts(
        admission=admission,
        book=book,
        ledger=ledger,
        quarantine=quarantine,
        closer=closer,
        dispatcher=dispatcher,
        heldout=heldout,
        last_failed=lambda: intake.last_failed,
        recorder=recorder,
        reader=StreamReader(run.redis, run.run_id, intake.accept, record=recorder.record),
    )


def _book(recipe: Recipe, admission: Admission) -> GroupBook:
    return GroupBook(
        admission,
        min_valid_members=recipe.min_valid_members,
        stragglers=recipe.admission.stragglers,
        train_without_signal=recipe.batch.train_without_signal,
    )


def _heldout(run: RunContext, inputs: Inputs, form: RequestForm, ledger: Ledger) -> HeldOut:
    return HeldOut(
        run.redis,
        form,
        inputs.heldout,
        inputs.heldout_sets,
        run.recipe.evaluation,
        sampling=sampling_of(run.recipe),
        seed=run.recipe.seed,
        ledger=ledger,
        report=run.records.append,
    )


def sampling_of(recipe: Recipe) -> Sampling:
    return Sampling(**asdict(recipe.rollout.sampling))
