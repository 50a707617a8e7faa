"""Puts a run together on rank 0 from its recipe, its directory and, where there is one, its newest
checkpoint.
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arq.connections import ArqRedis
from msgspec.structs import asdict

from pipeline import connection, retry
from pipeline.request import Limits, Sampling
from pipeline.settings import redis_settings
from pipeline.tokenizer import put_tokenizer
from trainer.inputs import Inputs
from trainer.loop.checkpoints import Checkpoints
from trainer.loop.loop import Loop
from trainer.loop.parts import LearnerThread, Parts
from trainer.recipe import Recipe, WeightsRecipe
from trainer.records.console import Console
from trainer.records.journal import Journal, StepRow, read
from trainer.records.sinks import Records, RunFacts, open_sinks
from trainer.rollouts.admission import Admission
from trainer.rollouts.dispatch import Dispatcher, RequestForm, TaskOrder, new_ids
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.heldout import HeldOut
from trainer.rollouts.intake import Intake
from trainer.rollouts.ledger import Ledger, LedgerState, decode_state
from trainer.rollouts.quarantine import Quarantine
from trainer.weights.engines import Engines
from trainer.weights.publish import Publisher

if TYPE_CHECKING:
    from trainer.feed import Feed


@dataclass(frozen=True, slots=True)
class Services:
    """What has to be opened, and closed again."""

    redis: ArqRedis
    learner: LearnerThread
    feed: "Feed"
    journal: Journal
    records: Records
    engines: Engines | None
    checkpoints: Checkpoints
    progress: Console


@contextlib.asynccontextmanager
async def assembled(
    recipe: Recipe,
    inputs: Inputs,
    *,
    root: Path,
    run_id: str,
    router_url: str,
    progress: Console,
    make_feed: "Callable[[], Feed]",
) -> AsyncIterator[Loop]:
    """The loop, ready to run; connections and files are closed afterwards. Raises ValueError where Redis
    cannot be reached.
    """
    async with contextlib.AsyncExitStack() as stack:
        redis = await connect()
        stack.push_async_callback(redis.aclose)
        progress.say(f"run {run_id} in {root}")
        progress.beat("building the learner")
        learner = LearnerThread()
        feed = await learner(make_feed)
        checkpoints = Checkpoints(root / "checkpoints", keep=recipe.checkpoint.keep)
        state = await _restored(checkpoints, learner, feed, progress)
        journal = stack.enter_context(_journal(root / "journal", state, progress))
        resumed_at = state.step + 1 if state.step else None
        sinks = stack.enter_context(open_sinks(RunFacts(run_id, root, recipe, resumed_at), progress))
        services = Services(
            redis=redis,
            learner=learner,
            feed=feed,
            journal=journal,
            records=Records(journal, sinks),
            engines=await stack.enter_async_context(Engines(router_url))
            if recipe.weights.engines == "router"
            else None,
            checkpoints=checkpoints,
            progress=progress,
        )
        form = RequestForm(
            run_id=run_id,
            limits=Limits(**asdict(recipe.rollout.limits)),
            agent_config=inputs.agent_config,
            tokenizer=await retry.until_answered(lambda: put_tokenizer(redis, inputs.tokenizer)),
            ids=new_ids(),
        )
        yield Loop(recipe, run_id, _parts(recipe, inputs, form, services, state, root / "weights"), state)
        await learner(feed.stop)


def _parts(
    recipe: Recipe, inputs: Inputs, form: RequestForm, services: Services, state: LedgerState, weights: Path
) -> Parts:
    admission = _admission(recipe)
    ledger = Ledger(services.journal, state)
    quarantine = Quarantine(services.journal)
    book = GroupBook(
        admission,
        min_valid_members=recipe.min_valid_members,
        stragglers=recipe.admission.stragglers,
        train_without_signal=recipe.batch.train_without_signal,
    )
    heldout = _heldout(recipe, inputs, form, services, ledger)
    dispatcher = Dispatcher(
        services.redis,
        form,
        TaskOrder(inputs.train, seed=recipe.seed),
        book,
        ledger=ledger,
        quarantine=quarantine,
        group_size=recipe.rollout.group_size,
        sampling=_sampling(recipe),
    )
    intake = Intake(
        services.redis,
        form.run_id,
        book=book,
        ledger=ledger,
        quarantine=quarantine,
        vocab_size=inputs.tokenizer.vocab_size,
        max_tokens=recipe.learner.micro_batch_tokens,
        max_refills=recipe.group_refills,
        refill=dispatcher.refill,
        evaluate=heldout.accept,
    )
    return Parts(
        redis=services.redis,
        feed=services.feed,
        learner=services.learner,
        admission=admission,
        book=book,
        ledger=ledger,
        quarantine=quarantine,
        journal=services.journal,
        intake=intake,
        dispatcher=dispatcher,
        heldout=heldout,
        publisher=_publisher(recipe.weights, form.run_id, services, weights),
        checkpoints=services.checkpoints,
        records=services.records,
        progress=services.progress,
    )


def _heldout(
    recipe: Recipe, inputs: Inputs, form: RequestForm, services: Services, ledger: Ledger
) -> HeldOut:
    return HeldOut(
        services.redis,
        form,
        inputs.heldout,
        recipe.evaluation,
        sampling=_sampling(recipe),
        seed=recipe.seed,
        ledger=ledger,
        report=services.records.append,
    )


def _admission(recipe: Recipe) -> Admission:
    return Admission(
        max_lag_versions=recipe.admission.max_lag_versions,
        groups_per_step=recipe.batch.groups_per_step,
        num_steps=recipe.num_steps,
    )


def _sampling(recipe: Recipe) -> Sampling:
    return Sampling(**asdict(recipe.rollout.sampling))


def _publisher(recipe: WeightsRecipe, run_id: str, services: Services, directory: Path) -> Publisher:
    return Publisher(
        services.redis,
        run_id,
        directory=directory,
        export=lambda place: services.learner.blocking(services.feed.export, place),
        engines=services.engines,
        mode=recipe.pause,
        keep=recipe.keep,
    )


def _journal(directory: Path, state: LedgerState, progress: Console) -> Journal:
    """The journal as the checkpoint knew it, its steps shown again."""
    journal = Journal(directory)
    journal.truncate_to(state.journal)
    for row in read(directory, StepRow):
        progress.recall(row)
    return journal


async def connect() -> ArqRedis:
    """The Redis of this machine's settings. Raises ValueError if there is no connection to it."""
    return await connection.connect(redis_settings().url)


async def _restored(
    checkpoints: Checkpoints, learner: LearnerThread, feed: "Feed", progress: Console
) -> LedgerState:
    """The state of the newest checkpoint, with the learner gone back to it; a blank one if there is none."""
    latest = checkpoints.latest()
    if latest is None:
        return LedgerState()
    state = decode_state(await learner(feed.restore, latest))
    progress.say(f"resumed from {latest.name}")
    return state
