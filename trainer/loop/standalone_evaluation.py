"""A held-out evaluation without a run around it: publish the weights, enqueue the episodes, read the trajectories, settle.

It has a run id of its own, so its requests never mix with those of a training run. If it ends early, its open requests are
withdrawn.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from arq.connections import ArqRedis
from msgspec.structs import asdict, replace
from redis.exceptions import RedisError

from pipeline import census, queue, retry, stream
from pipeline.request import Limits, Sampling
from pipeline.tokenizer import put_tokenizer
from trainer.inputs import Inputs
from trainer.loop.assembly import connect
from trainer.loop.heartbeat import HEARTBEAT_S
from trainer.loop.pump import READ_BLOCK_MS
from trainer.recipe import Recipe
from trainer.records.console import Console
from trainer.records.journal import Journal, PublicationRow
from trainer.rollouts.dispatch import RequestForm, new_ids
from trainer.rollouts.heldout import HeldOut, Round
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.sweep import sweep
from trainer.weights.engines import EngineFailure, Engines
from trainer.weights.publish import Publisher

Ending = Literal["finished", "interrupted", "no engine took the weights", "the engines' weights were changed"]


class StandaloneEvaluation:
    """One evaluation. `stop` ends it in good order."""

    def __init__(
        self,
        recipe: Recipe,
        inputs: Inputs,
        root: Path,
        progress: Console,
        stop: asyncio.Event,
        *,
        router_url: str,
    ) -> None:
        """`root` is its directory, which is not there yet; its name is the run id."""
        self._recipe = recipe
        self._inputs = inputs
        self._root = root
        self._run_id = root.name
        self._progress = progress
        self._stop = stop
        self._router_url = router_url
        self._unsure = False  # whether answers were delivered into a connection that broke

    async def run(self, rounds: Sequence[Round], export: Callable[[Path], object]) -> Ending:
        """Play all rounds with the weights that `export` writes. Raises ValueError where a run is under way."""
        async with contextlib.AsyncExitStack() as stack:
            redis = await connect()
            stack.push_async_callback(redis.aclose)
            engines = None
            if self._recipe.weights.engines == "router":
                await _refuse_live_runs(redis)
                engines = await stack.enter_async_context(Engines(self._router_url))
            journal = stack.enter_context(Journal(self._root / "journal"))
            publisher = Publisher(
                redis,
                self._run_id,
                directory=self._root / "weights",
                export=export,
                engines=engines,
                mode=self._recipe.weights.pause,
                keep=1,
            )
            self._progress.say(f"{self._run_id}: bringing the weights to the engines")
            try:
                published = await publisher.publish(0, 0)
            except EngineFailure as error:
                self._progress.say(str(error))
                return "no engine took the weights"
            journal.append(published)
            form = await self._form(redis)
            await stream.open_reader(redis, self._run_id)
            stack.push_async_callback(self._withdraw, redis)
            for one in rounds:
                ledger = Ledger(journal)
                heldout = self._heldout(redis, form, ledger, one)
                heldout.start(one.name, version=0, step=0)
                if not await self._play(redis, heldout, ledger, publisher):
                    return "interrupted"
            return await _ending(engines, published)

    async def _form(self, redis: ArqRedis) -> RequestForm:
        return RequestForm(
            run_id=self._run_id,
            limits=Limits(**asdict(self._recipe.rollout.limits)),
            agent_config=self._inputs.agent_config,
            tokenizer=await put_tokenizer(redis, self._inputs.tokenizer),
            ids=new_ids(),
        )

    def _heldout(self, redis: ArqRedis, form: RequestForm, ledger: Ledger, one: Round) -> HeldOut:
        sampling = Sampling(**asdict(self._recipe.rollout.sampling))
        return HeldOut(
            redis,
            form,
            self._inputs.heldout,
            one.recipe,
            sampling=replace(sampling, temperature=one.temperature),
            seed=self._recipe.seed,
            ledger=ledger,
            report=self._progress.show,
        )

    async def _play(self, redis: ArqRedis, heldout: HeldOut, ledger: Ledger, publisher: Publisher) -> bool:
        """Whether all of it was played; then it is in the journal, and acknowledged."""
        beside = asyncio.create_task(self._beat(redis, heldout, publisher))
        try:
            await retry.until_answered(heldout.send)
            while heldout.progress and not self._stop.is_set():
                await retry.until_answered(lambda: self._read(redis, heldout))
        finally:
            beside.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beside
        if heldout.progress:
            return False
        settled = ledger.state(step=0, version=0, cursor=0).pending
        await retry.until_answered(lambda: stream.acknowledge(redis, self._run_id, settled))
        return True

    async def _read(self, redis: ArqRedis, heldout: HeldOut) -> None:
        """Take in what is new; after a broken connection, what was delivered into it."""
        try:
            if self._unsure:
                deliveries = await stream.read_unacknowledged(redis, self._run_id)
            else:
                deliveries = await stream.read_new(redis, self._run_id, block_ms=READ_BLOCK_MS)
        except RedisError:
            self._unsure = True
            raise
        self._unsure = False
        for delivery in deliveries:
            heldout.accept(delivery)

    async def _beat(self, redis: ArqRedis, heldout: HeldOut, publisher: Publisher) -> None:
        """Say how far it is; now and then, see to what Redis lost and to engines that came late."""
        swept_at = time.monotonic()
        while True:
            with retry.tolerating_outage():
                await census.beat_run(redis, self._status(heldout.progress))
                if time.monotonic() >= swept_at + self._recipe.admission.sweep_every_s:
                    swept_at = time.monotonic()
                    await sweep(redis, self._run_id, heldout.outstanding)
                    with contextlib.suppress(EngineFailure):
                        await publisher.catch_up()
            self._progress.beat(heldout.progress)
            await asyncio.sleep(HEARTBEAT_S)

    def _status(self, detail: str) -> census.RunStatus:
        return census.RunStatus(
            run_id=self._run_id,
            phase="evaluating",
            detail=detail,
            journal=str(self._root / "journal"),
            updated_at=time.time(),
        )

    async def _withdraw(self, redis: ArqRedis) -> None:
        with retry.tolerating_outage():
            await queue.withdraw(redis, self._run_id, await queue.open_ids(redis, self._run_id))


async def _refuse_live_runs(redis: ArqRedis) -> None:
    """Raises ValueError: the engines serve one policy at a time. What a trainer said last outlives it for a while,
    so it counts as alive if it says something new.
    """
    before = await _last_said(redis)
    if not before:
        return
    await asyncio.sleep(3 * HEARTBEAT_S)
    for run_id, said_at in (await _last_said(redis)).items():
        if said_at != before.get(run_id):
            raise ValueError(
                f"the run {run_id} is under way, and the engines serve its weights: evaluate when it has ended, "
                "or on engines and a Redis of their own"
            )


async def _last_said(redis: ArqRedis) -> dict[str, float]:
    statuses = [await census.run_status(redis, run_id) for run_id in await census.run_ids(redis)]
    return {status.run_id: status.updated_at for status in statuses if status is not None}


async def _ending(engines: Engines | None, published: PublicationRow) -> Ending:
    """Whether the engines still serve what was to be judged."""
    for url in published.engines if engines else ():
        with contextlib.suppress(EngineFailure):
            assert engines is not None
            served = await engines.served(url)
            if served.weight_version != str(published.version):
                return "the engines' weights were changed"
    return "finished"
