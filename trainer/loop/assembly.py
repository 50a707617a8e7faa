"""Builds a run on rank 0 from its recipe, its directory and, if there is one, its newest checkpoint."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from arq.connections import ArqRedis
from msgspec.structs import asdict

from pipeline import connection, retry
from pipeline.request import Context, Limits
from pipeline.settings import redis_settings
from pipeline.tokenizer import put_tokenizer
from trainer.inputs import Inputs
from trainer.loop.bookkeeping import Rollouts, RunContext, rollouts_of
from trainer.loop.budget import AdmissionBudget
from trainer.loop.checkpoints import Checkpoints, CheckpointWriter
from trainer.loop.ending import EndRecorder
from trainer.loop.evaluations import Evaluations
from trainer.loop.heartbeat import Heartbeat
from trainer.loop.learner_thread import LearnerThread
from trainer.loop.loop import Loop
from trainer.loop.next_groups import NextGroups
from trainer.loop.notices import Notices
from trainer.loop.open_requests import OpenRequests
from trainer.loop.policy import PolicyHold, sole_policy
from trainer.loop.publications import Publications
from trainer.loop.pump import Pump
from trainer.loop.recovery import RunRecovery
from trainer.loop.run_status import StatusWriter
from trainer.loop.state import RunState
from trainer.loop.step import Stepper
from trainer.recipe import Recipe
from trainer.records.console import Console
from trainer.records.journal import EndRow, Journal, PublicationRow, StepRow, read
from trainer.records.sinks import Records, RunFacts, open_sinks
from trainer.rollouts.deadlines import Deadlines
from trainer.rollouts.dispatch import RequestForm, new_ids
from trainer.rollouts.ledger import Ledger, LedgerState, decode_state
from trainer.rollouts.quarantine import Quarantine
from trainer.rollouts.recording import RolloutRecorder
from trainer.weights.disk import DiskTransport
from trainer.weights.engines import Engines
from trainer.weights.publish import Publisher

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
    """The loop, ready to run; connections and files are closed afterwards. Raises ValueError if Redis cannot be
    reached.
    """
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
        run = RunContext(redis, recipe, run_id, root, Records(journal, sinks), console)
        transport = DiskTransport(
            run_id, directory=root / "weights", export=learner.export, keep=recipe.weights.keep
        )
        publisher = Publisher(redis, run_id, transport=transport, engines=engines, mode=recipe.weights.pause)
        form = await request_form(redis, run_id, recipe, inputs)
        calibrated = {task.id for task in inputs.train if task.calibration}
        quarantine = Quarantine(journal, calibrated)
        recorder = stack.enter_context(RolloutRecorder(redis, root, recipe.rollouts))
        rollouts = rollouts_of(run, inputs, form, Ledger(journal, restored), quarantine, recorder)
        yield _loop(run, restored, rollouts, learner, checkpoints, publisher, lease)
        await learner.stop()


async def request_form(redis: ArqRedis, run_id: str, recipe: Recipe, inputs: Inputs) -> RequestForm:
    """What all requests of a run have in common. Announces the tokenizer."""
    return RequestForm(
        run_id=run_id,
        limits=Limits(**asdict(recipe.rollout.limits)),
        agent_config=inputs.agent_config,
        tokenizer=await retry.until_answered(lambda: put_tokenizer(redis, inputs.tokenizer)),
        ids=new_ids(),
        control_share=recipe.grading.control_share,
        context=Context(**asdict(recipe.rollout.context)),
    )


def _loop(
    run: RunContext,
    restored: LedgerState,
    rollouts: Rollouts,
    learner: LearnerThread,
    checkpoints: Checkpoints,
    publisher: Publisher,
    lease: PolicyHold | None,
) -> Loop:
    recipe, record, say = run.recipe, run.records.append, run.console.say
    state = RunState.resumed(restored, read(run.journal, PublicationRow))
    if lease is not None:
        lease.when_taken(state.supersede)
    budget = _budget(run, rollouts, state)
    requests = OpenRequests(
        run.redis,
        run.run_id,
        book=rollouts.book,
        ledger=rollouts.ledger,
        dispatcher=rollouts.dispatcher,
        heldout=rollouts.heldout,
    )
    recovery = RunRecovery(
        run.redis,
        run.run_id,
        book=rollouts.book,
        ledger=rollouts.ledger,
        dispatcher=rollouts.dispatcher,
        reader=rollouts.reader,
        closer=rollouts.closer,
        requests=requests,
    )
    writer = _checkpoint_writer(run, rollouts, state, learner, checkpoints)
    status = _status_writer(run, rollouts, state, budget).status
    return Loop(
        recipe,
        restored,
        state,
        is_complete=any(
            row.is_complete and row.step >= recipe.num_steps for row in read(run.journal, EndRow)
        ),
        recovery=recovery,
        publications=Publications(run.redis, run.run_id, publisher, learner, state, record=record, say=say),
        pump=_pump(run, rollouts, state, budget, requests, recovery),
        next_groups=_next_groups(run, rollouts, state, budget, writer),
        stepper=Stepper(recipe, state, rollouts.ledger, learner, record=record, say=say),
        evaluations=_evaluations(run, rollouts, state, budget, requests, writer),
        checkpoint=writer.write,
        needs_checkpoint=lambda: budget.needs_checkpoint,
        heartbeat=Heartbeat(run.redis, status, show=run.console.beat),
        ending=EndRecorder(run.redis, state, recipe.num_steps, run.root, status=status, record=record),
        say=say,
    )


def _budget(run: RunContext, rollouts: Rollouts, state: RunState) -> AdmissionBudget:
    return AdmissionBudget(
        run.redis,
        run.run_id,
        rollouts.admission,
        rollouts.book,
        rollouts.ledger,
        state,
        bounds=run.recipe.admission,
        group_size=run.recipe.rollout.group_size,
    )


def _checkpoint_writer(
    run: RunContext, rollouts: Rollouts, state: RunState, learner: LearnerThread, checkpoints: Checkpoints
) -> CheckpointWriter:
    return CheckpointWriter(
        run.redis,
        run.run_id,
        checkpoints,
        learner,
        state=state,
        ledger=rollouts.ledger,
        cursor=lambda: rollouts.dispatcher.cursor,
        flush_rollouts=rollouts.recorder.flush,
        forget=rollouts.reader.forget,
    )


def _status_writer(
    run: RunContext, rollouts: Rollouts, state: RunState, budget: AdmissionBudget
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
        journal=run.journal,
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
        reader=rollouts.reader,
        deadlines=Deadlines(
            run.redis,
            rollouts.book,
            rollouts.closer,
            deadline_s=recipe.group_deadline_s,
            queue_s=recipe.rollout.queue_s,
        ),
        requests=requests,
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
    budget: AdmissionBudget,
    writer: CheckpointWriter,
) -> NextGroups:
    return NextGroups(
        state,
        budget,
        book=rollouts.book,
        ledger=rollouts.ledger,
        dispatcher=rollouts.dispatcher,
        limits=run.recipe.batch,
        checkpoint=writer.write,
        say=run.console.say,
    )


def _evaluations(
    run: RunContext,
    rollouts: Rollouts,
    state: RunState,
    budget: AdmissionBudget,
    requests: OpenRequests,
    writer: CheckpointWriter,
) -> Evaluations:
    return Evaluations(
        run.recipe.evaluation,
        state,
        budget,
        heldout=rollouts.heldout,
        ledger=rollouts.ledger,
        requests=requests,
        checkpoint=writer.write,
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
