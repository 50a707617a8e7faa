"""Builds a run on rank 0 from its recipe, its directory and, if there is one, its newest checkpoint."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from arq.connections import ArqRedis
from msgspec.structs import asdict

from pipeline import connection, retry
from pipeline.judge import Judge
from pipeline.metrics import meter
from pipeline.request import Context, Limits
from pipeline.settings import redis_settings
from pipeline.tokenizer import put_tokenizer
from trainer.inputs import Inputs
from trainer.loop.alarms import AlarmStop, StorageWatch, recalled_alarms
from trainer.loop.audit import Auditor, decoder
from trainer.loop.bookkeeping import Rollouts, RunContext, rollouts_of
from trainer.loop.budget import AdmissionBudget
from trainer.loop.checkpoints import Checkpoints, CheckpointWriter
from trainer.loop.due_checkpoints import DueCheckpoints
from trainer.loop.ending import EndRecorder
from trainer.loop.evaluations import Evaluations
from trainer.loop.fleet import FleetWatch
from trainer.loop.gauges import RunGauges
from trainer.loop.heartbeat import Heartbeat
from trainer.loop.learner_thread import LearnerThread
from trainer.loop.loop import Loop
from trainer.loop.next_groups import NextGroups
from trainer.loop.notices import Notices
from trainer.loop.open_requests import OpenRequests
from trainer.loop.policy import sole_policy
from trainer.loop.publications import Publications
from trainer.loop.pump import Pump
from trainer.loop.recovery import RunRecovery
from trainer.loop.run_status import StatusWriter
from trainer.loop.state import RunState
from trainer.loop.step import Stepper
from trainer.loop.step_times import StepTimes
from trainer.recipe import Recipe, WeightsRecipe
from trainer.records.console import Console
from trainer.records.journal import EndRow, Journal, PublicationRow, StalenessRow, StepRow, read
from trainer.records.sinks import Records, RunFacts, open_sinks
from trainer.rollouts.deadlines import Deadlines
from trainer.rollouts.dispatch import RequestForm, new_ids
from trainer.rollouts.judge_form import JudgeForm
from trainer.rollouts.ledger import Ledger, LedgerState, decode_state
from trainer.rollouts.quarantine import Quarantine
from trainer.rollouts.recording import RolloutRecorder
from trainer.rollouts.staleness import StalenessController, bounds_of
from trainer.weights.deliveries import Deliveries
from trainer.weights.engines import Engines
from trainer.weights.publish import Publisher
from trainer.weights.selection import open_transport
from trainer.weights.transport import WeightTransport

if TYPE_CHECKING:
    from trainer.feed import Feed


@contextlib.asynccontextmanager
async def assembled(
    recipe: Recipe,
    inputs: Inputs,
    *,
    root: Path,
    run_id: str,
    router_url: str,
    console: Console,
    make_feed: "Callable[[], Feed]",
) -> AsyncIterator[Loop]:
    """The loop, ready to run; connections and files are closed afterwards. Raises ValueError if Redis cannot be reached."""
    times = StepTimes()
    async with contextlib.AsyncExitStack() as stack:
        redis = await connect()
        stack.push_async_callback(redis.aclose)
        lease = None
        if recipe.weights.engines == "router":
            lease = await stack.enter_async_context(sole_policy(redis, run_id))
        console.say(f"run {run_id} in {root}")
        console.beat("building the learner")
        learner = await LearnerThread.start(make_feed)
        checkpoints = Checkpoints(root / "checkpoints", keep=recipe.checkpoint.keep)
        restored = await _restore(checkpoints, learner, console)
        journal = stack.enter_context(_journal(root / "journal", restored, console))
        resumed_at = restored.step + 1 if restored.step else None
        sinks = stack.enter_context(open_sinks(RunFacts(run_id, root, recipe, resumed_at), console))
        engines = None
        if recipe.weights.engines == "router":
            engines = await stack.enter_async_context(Engines(router_url))
        state = RunState.resumed(restored, read(root / "journal", PublicationRow))
        if lease is not None:
            lease.when_taken(state.supersede)
        alarms = recalled_alarms(recipe, root / "journal")
        records = Records(journal, [*sinks, AlarmStop(recipe.alarms.stop_on, state.stop_by_alarm)], alarms)
        run = RunContext(redis, recipe, run_id, root, records, console, alarms)
        transport = await open_transport(
            recipe.weights,
            run_id,
            directory=root / "weights",
            export=learner.export,
            keep=recipe.weights.keep,
            stack=stack,
        )
        deliveries = deliveries_of(redis, run_id, transport, engines, recipe.weights)
        weights = (Publisher(redis, run_id, transport=transport), deliveries)
        form = await request_form(redis, run_id, recipe, inputs)
        quarantine = Quarantine(journal, {task.id for task in inputs.train if task.calibration})
        recorder = stack.enter_context(RolloutRecorder(redis, run_id, root, recipe.rollouts))
        judge = await announced_judge(redis, inputs.judge)
        rollouts = rollouts_of(run, inputs, form, Ledger(records, restored), quarantine, recorder, judge)
        auditor = _auditor(run, inputs, learner)
        yield _loop(run, restored, state, rollouts, learner, auditor, checkpoints, weights, times)
        await learner.stop()


def deliveries_of(
    redis: ArqRedis, run_id: str, transport: WeightTransport, engines: Engines | None, recipe: WeightsRecipe
) -> Deliveries:
    """Who brings the versions of a run to its engines."""
    return Deliveries(
        redis,
        run_id,
        transport=transport,
        engines=engines,
        mode=recipe.pause,
        deadline_s=recipe.engine_deadline_s,
        at_once=recipe.engines_at_once,
    )


async def request_form(redis: ArqRedis, run_id: str, recipe: Recipe, inputs: Inputs) -> RequestForm:
    """What all requests of a run have in common. Announces the tokenizer."""
    return RequestForm(
        run_id=run_id,
        limits=Limits(**asdict(recipe.rollout.limits)),
        agent_config=inputs.agent_config,
        tokenizer=await retry.until_answered(lambda: put_tokenizer(redis, inputs.tokenizer)),
        ids=new_ids(),
        control_share=recipe.grading.control_share,
        report_routing=recipe.learner.routing_replay,
        context=Context(**asdict(recipe.rollout.context)),
    )


async def announced_judge(redis: ArqRedis, form: JudgeForm | None) -> Judge | None:
    """What requests to judge carry; None if nothing is judged. Announces the judge's tokenizer."""
    return None if form is None else await retry.until_answered(lambda: form.announced(redis))


def _loop(
    run: RunContext,
    restored: LedgerState,
    state: RunState,
    rollouts: Rollouts,
    learner: LearnerThread,
    auditor: Auditor,
    directories: Checkpoints,
    weights: tuple[Publisher, Deliveries],
    times: StepTimes,
) -> Loop:
    recipe, record, say = run.recipe, run.records.append, run.console.say
    publisher, deliveries = weights
    ledger, recorder = rollouts.ledger, rollouts.recorder
    staleness = _staleness(run)
    budget = _budget(run, rollouts, state, staleness)
    requests = _open_requests(run, rollouts)
    recovery = _recovery(run, rollouts, requests)
    checkpoints = DueCheckpoints(
        _checkpoint_writer(run, rollouts, state, learner, directories),
        state,
        budget,
        ledger,
        times,
        every_steps=recipe.checkpoint.every_steps,
        num_steps=recipe.num_steps,
    )
    status = _status_writer(run, rollouts, state, budget, deliveries).status
    gauges = RunGauges(meter(), state, rollouts.book, budget, run.alarms)
    return Loop(
        recipe,
        restored,
        state,
        is_complete=any(
            row.is_complete and row.step >= recipe.num_steps for row in read(run.journal, EndRow)
        ),
        recovery=recovery,
        publications=Publications(publisher, deliveries, learner, state, times, record=record, say=say),
        pump=_pump(run, rollouts, state, budget, requests, recovery),
        next_groups=_next_groups(run, rollouts, state, checkpoints),
        stepper=Stepper(
            recipe, state, ledger, learner, auditor, times, staleness, recorder, record=record, say=say
        ),
        evaluations=_evaluations(run, rollouts, state, requests, deliveries, checkpoints),
        times=times,
        checkpoints=checkpoints,
        heartbeat=Heartbeat(run.redis, status, show=run.console.beat, measure=gauges.measure),
        storage=StorageWatch(run.redis, run.root, run.alarms, record=record),
        fleet=FleetWatch(
            run.redis, state, closed_by=budget.closed_by, heldout=rollouts.heldout, record=record
        ),
        ending=EndRecorder(run.redis, state, recipe.num_steps, run.root, times, status=status, record=record),
        record=record,
        say=say,
    )


def _auditor(run: RunContext, inputs: Inputs, learner: LearnerThread) -> Auditor:
    return Auditor(
        run.recipe.audit,
        learner,
        seed=run.recipe.seed,
        decode=decoder(inputs.tokenizer),
        record=run.records.append,
    )


def _open_requests(run: RunContext, rollouts: Rollouts) -> OpenRequests:
    return OpenRequests(
        run.redis,
        run.run_id,
        book=rollouts.book,
        ledger=rollouts.ledger,
        dispatcher=rollouts.dispatcher,
        heldout=rollouts.heldout,
    )


def _recovery(run: RunContext, rollouts: Rollouts, requests: OpenRequests) -> RunRecovery:
    return RunRecovery(
        run.redis,
        run.run_id,
        book=rollouts.book,
        ledger=rollouts.ledger,
        dispatcher=rollouts.dispatcher,
        streams=rollouts.streams,
        closer=rollouts.closer,
        requests=requests,
        judging=rollouts.judging.requests,
    )


def _staleness(run: RunContext) -> StalenessController:
    """As the journal left it."""
    return StalenessController(
        bounds_of(run.recipe.admission),
        changes=read(run.journal, StalenessRow),
        steps=read(run.journal, StepRow),
    )


def _budget(
    run: RunContext, rollouts: Rollouts, state: RunState, staleness: StalenessController
) -> AdmissionBudget:
    return AdmissionBudget(
        run.redis,
        run.run_id,
        rollouts.admission,
        staleness,
        rollouts.book,
        rollouts.ledger,
        state,
        bounds=run.recipe.admission,
        group_size=run.recipe.rollout.group_size,
        closed_because=lambda: rollouts.judging.presence.closed_because,
    )


def _checkpoint_writer(
    run: RunContext, rollouts: Rollouts, state: RunState, learner: LearnerThread, checkpoints: Checkpoints
) -> CheckpointWriter:
    return CheckpointWriter(
        checkpoints,
        learner,
        state=state,
        ledger=rollouts.ledger,
        cursor=lambda: rollouts.dispatcher.cursor,
        flush_rollouts=rollouts.recorder.flush,
        acknowledge=rollouts.streams.acknowledge,
    )


def _status_writer(
    run: RunContext, rollouts: Rollouts, state: RunState, budget: AdmissionBudget, deliveries: Deliveries
) -> StatusWriter:
    return StatusWriter(
        run.recipe,
        run.run_id,
        state,
        budget,
        book=rollouts.book,
        ledger=rollouts.ledger,
        heldout=rollouts.heldout,
        quarantined=rollouts.quarantine,
        alarms=run.alarms,
        journal=run.journal,
        trouble=lambda: "; ".join(filter(None, (deliveries.trouble, rollouts.judging.presence.trouble))),
    )


def _pump(
    run: RunContext,
    rollouts: Rollouts,
    state: RunState,
    budget: AdmissionBudget,
    requests: OpenRequests,
    recovery: RunRecovery,
) -> Pump:
    recipe = run.recipe
    return Pump(
        state,
        budget,
        streams=rollouts.streams,
        deadlines=Deadlines(
            run.redis,
            rollouts.book,
            rollouts.closer,
            deadline_s=recipe.group_deadline_s,
            queue_s=recipe.rollout.queue_s,
        ),
        requests=requests,
        judging=rollouts.judging,
        recovery=recovery,
        notices=Notices(
            run.redis,
            run.run_id,
            rollouts.ledger,
            rollouts.quarantine,
            last_failed=rollouts.last_failed,
            say=run.console.say,
        ),
        sweep_every_s=recipe.admission.sweep_every_s,
        say=run.console.say,
    )


def _next_groups(
    run: RunContext,
    rollouts: Rollouts,
    state: RunState,
    checkpoints: DueCheckpoints,
) -> NextGroups:
    return NextGroups(
        state,
        book=rollouts.book,
        ledger=rollouts.ledger,
        dispatcher=rollouts.dispatcher,
        limits=run.recipe.batch,
        tend_checkpoints=checkpoints.tend,
        say=run.console.say,
    )


def _evaluations(
    run: RunContext,
    rollouts: Rollouts,
    state: RunState,
    requests: OpenRequests,
    deliveries: Deliveries,
    checkpoints: DueCheckpoints,
) -> Evaluations:
    return Evaluations(
        run.recipe.evaluation,
        state,
        heldout=rollouts.heldout,
        ledger=rollouts.ledger,
        requests=requests,
        weights=deliveries,
        tend_checkpoints=checkpoints.tend,
    )


def _journal(directory: Path, state: LedgerState, console: Console) -> Journal:
    """The journal as the checkpoint knew it; its steps are shown again."""
    journal = Journal(directory)
    journal.truncate_to(state.journal)
    for row in read(directory, StepRow):
        console.recall(row)
    return journal


async def connect() -> ArqRedis:
    """The Redis of this machine's settings. Raises ValueError if there is no connection to it."""
    return await connection.connect(redis_settings().url)


async def _restore(checkpoints: Checkpoints, learner: LearnerThread, console: Console) -> LedgerState:
    """Bring the learner back to the newest checkpoint; returns the ledger's state in it, a blank one if there is none."""
    latest = checkpoints.latest()
    if latest is None:
        return LedgerState()
    state = decode_state(await learner.restore(latest))
    console.say(f"resumed from {latest.name}")
    return state
