"""The bookkeeping of a run put together: what is enqueued, what came back, and what becomes of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from arq.connections import ArqRedis
from msgspec.structs import asdict

from pipeline.judge import Judge
from pipeline.kinds import JUDGE
from pipeline.request import Sampling
from pipeline.trajectory import Trajectory
from trainer.batching.batch import Sample
from trainer.batching.samples import samples_of
from trainer.inputs import Inputs
from trainer.learner.architecture import read_architecture
from trainer.recipe import Recipe
from trainer.records.alarms import Alarms
from trainer.records.console import Console
from trainer.records.sinks import Records
from trainer.rollouts.admission import Admission
from trainer.rollouts.closing import GroupCloser
from trainer.rollouts.dispatch import Dispatcher, RequestForm, TaskOrder
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.heldout import HeldOut
from trainer.rollouts.intake import Intake
from trainer.rollouts.judgements import JudgementIntake
from trainer.rollouts.judging import Judging
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.quarantine import Quarantine
from trainer.rollouts.recording import RolloutRecorder
from trainer.rollouts.run_streams import RunStreams
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
    alarms: Alarms

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
    streams: RunStreams
    judging: Judging


def rollouts_of(
    run: RunContext,
    inputs: Inputs,
    form: RequestForm,
    ledger: Ledger,
    quarantine: Quarantine,
    recorder: RolloutRecorder,
    judge: Judge | None,
) -> Rollouts:
    """The bookkeeping of a run, empty yet. `judge` is what requests to judge carry; None if nothing is judged."""
    recipe = run.recipe
    admission = _admission(recipe)
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
    judging = Judging.of_run(
        run.redis, run.run_id, recipe.judge, judge, book=book, ledger=ledger, say=run.console.say
    )
    closer = GroupCloser(book, ledger, quarantine, judging.waits)
    of_rollouts = Intake(
        run.redis,
        book=book,
        ledger=ledger,
        quarantine=quarantine,
        closer=closer,
        heldout=heldout,
        refill=dispatcher.refill,
        judge=judging.requests.want,
        samples_of=_samples_of(recipe, inputs),
        max_refills=recipe.group_refills,
    )
    of_judgements = JudgementIntake(run.redis, book=book, ledger=ledger, requests=judging.requests)
    return Rollouts(
        admission=admission,
        book=book,
        ledger=ledger,
        quarantine=quarantine,
        closer=closer,
        dispatcher=dispatcher,
        heldout=heldout,
        last_failed=lambda: of_rollouts.last_failed,
        recorder=recorder,
        streams=streams_of(run.redis, run.run_id, of_rollouts, of_judgements, recorder),
        judging=judging,
    )


def streams_of(
    redis: ArqRedis, run_id: str, intake: Intake, judgements: JudgementIntake, recorder: RolloutRecorder
) -> RunStreams:
    """What arrives is recorded, then taken in."""
    return RunStreams(
        redis,
        run_id,
        StreamReader(redis, run_id, intake.accept, record=recorder.record),
        StreamReader(redis, run_id, judgements.accept, record=recorder.record_judgement, kind=JUDGE),
    )


def _samples_of(recipe: Recipe, inputs: Inputs) -> Callable[[Trajectory], tuple[Sample, ...]]:
    """How the run makes samples of a trajectory."""
    return partial(
        samples_of,
        vocab_size=inputs.tokenizer.vocab_size,
        max_tokens=recipe.learner.micro_batch_tokens,
        routing_width=_routing_width(recipe),
    )


def _routing_width(recipe: Recipe) -> int:
    """Experts that engines report of each token; the model is read only where the recipe asks for them."""
    if not recipe.learner.routing_replay:
        return 0
    return read_architecture(Path(recipe.model)).reported_experts(recipe.learner)


def _admission(recipe: Recipe) -> Admission:
    return Admission(
        max_lag_versions=recipe.admission.max_lag_versions,
        groups_per_step=recipe.batch.groups_per_step,
        num_steps=recipe.num_steps,
    )


def _book(recipe: Recipe, admission: Admission) -> GroupBook:
    return GroupBook(
        admission,
        min_valid_members=recipe.min_valid_members,
        stragglers=recipe.admission.stragglers,
        train_without_signal=recipe.batch.train_without_signal,
        requires_judgements=recipe.judge.required,
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
