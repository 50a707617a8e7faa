"""Evaluations on held-out tasks: those of a run while it trains, and one without a run around it.

A run evaluates before its first step, every `evaluation.every_steps`, and at its end. An evaluation runs in parallel to training. It begins
when the engines serve its version, and they get no newer version until it is finished. Training continues in the meantime, as far as the
lag of versions allows.

A standalone evaluation publishes the weights, enqueues the episodes, reads the trajectories, and settles them. It has a run id of its own,
so its requests never mix with those of a training run. If it ends early, its open requests are withdrawn.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import census, queue, redis_calls, stream
from pipeline.journal.rows import PublicationRow
from pipeline.stream import Delivery
from pipeline.tokenizer import put_tokenizer
from pipeline.weights import ServedWeights, base_name, version_name
from trainer.inputs import Inputs
from trainer.loop.checkpoints import DueCheckpoints
from trainer.loop.run import Run, connect, deliveries_of, request_form
from trainer.loop.status import beat
from trainer.recipe import Recipe
from trainer.records.console import Console
from trainer.records.journal_writer import Journal
from trainer.rollouts.dispatch import RequestForm, sampling_of
from trainer.rollouts.heldout import HeldOut, Round
from trainer.rollouts.intake import StreamReader
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.open_requests import sweep
from trainer.rollouts.recording import RolloutRecorder
from trainer.weights.deliveries import Deliveries
from trainer.weights.engines import EngineFailure, Engines
from trainer.weights.publish import Exports, Publisher, open_transport, sole_policy

Ending = Literal["finished", "interrupted", "no engine took the weights", "the engines' weights were changed"]

READ_BLOCK_MS = 200


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """An evaluation that has begun and is not finished."""

    name: str
    version: int
    step: int


class Evaluations:
    """The evaluations of one run. Each is held once, and only one runs at a time."""

    def __init__(self, run: Run, checkpoints: DueCheckpoints) -> None:
        self._recipe = run.recipe.evaluation
        self._state = run.state
        self._heldout = run.books.heldout
        self._ledger = run.books.ledger
        self._requests = run.requests
        self._weights = run.deliveries
        self._checkpoints = checkpoints
        self._under_way: _Evaluation | None = None
        self._begun = asyncio.Event()  # set while an evaluation is in progress

    async def play_next(self) -> None:
        """Plays the next evaluation that begins."""
        await self._begun.wait()
        assert self._under_way is not None
        await self._play(self._under_way)
        self._weights.unpin()
        self._under_way = None
        self._begun.clear()
        self._state.changed.set()

    @property
    def may_checkpoint(self) -> bool:
        """Whether a resume from a checkpoint of the present step loses no evaluation: one that belongs to this step starts over."""
        return self._under_way is None or self._under_way.step == self._state.step

    def begin_before(self) -> None:
        """Evaluates the starting weights.

        Call this when the first step has its groups, because training need not wait for it until then.
        """
        if self._recipe.before and self._state.step == 0 and self._under_way is None:
            self._begin("heldout_before")

    @property
    def is_due(self) -> bool:
        """Whether the weights of the step just published are to be evaluated."""
        every, step = self._recipe.every_steps, self._state.step
        return bool(every and step and step % every == 0 and self._is_wanted(self._name_between))

    def begin_between(self) -> None:
        """Evaluates the weights of the step just published, if that is due. No evaluation may be running."""
        if self.is_due:
            self._begin(self._name_between)

    def begin_after(self) -> None:
        """Evaluate the last weights."""
        if self._recipe.after:
            self._begin("heldout_after")

    async def finished(self) -> bool:
        """Waits for the current evaluation; returns False if a stop comes before it is finished. A full Redis gets room in the meantime."""
        state = self._state
        while self._under_way is not None and not state.is_stopping:
            state.phase = "evaluating"
            state.changed.clear()
            if not await self._checkpoints.tend():
                await state.changed.wait()
        return self._under_way is None

    async def _play(self, one: _Evaluation) -> None:
        await self._weights.served(one.version)
        self._heldout.start(one.name, version=one.version, step=one.step)
        await redis_calls.until_answered(self._requests.enqueue_evaluation)
        await self._heldout.finished()

    def _begin(self, name: str) -> None:
        if self._is_wanted(name):
            assert self._under_way is None, "one evaluation at a time"
            self._weights.pin()
            self._under_way = _Evaluation(name, self._state.version, self._state.step)
            self._begun.set()

    def _is_wanted(self, name: str) -> bool:
        return self._heldout.is_wanted and name not in self._ledger.evaluations

    @property
    def _name_between(self) -> str:
        return f"heldout_step_{self._state.step}"


class StandaloneEvaluation:
    """One evaluation. Setting `stop` ends it in good order."""

    def __init__(
        self,
        recipe: Recipe,
        inputs: Inputs,
        root: Path,
        console: Console,
        stop: asyncio.Event,
        *,
        router_url: str,
    ) -> None:
        """`root` is its directory, which must not exist yet; the directory's name is the run id."""
        self._recipe = recipe
        self._inputs = inputs
        self._root = root
        self._run_id = root.name
        self._console = console
        self._stop = stop
        self._router_url = router_url
        self._detail = "publishing weights"  # what it is doing, for display
        self._ended: Ending = "interrupted"
        self._superseded_by = ""  # the run that took the engines over
        # The engines in routing when all of them had loaded the weights.
        self._engine_urls: tuple[str, ...] = ()

    async def run(self, rounds: Sequence[Round], export: Exports) -> Ending:
        """Play all rounds with the weights that `export` writes. Raises ValueError if the engines serve another run."""
        async with contextlib.AsyncExitStack() as stack:
            redis = await connect(self._console.say)
            stack.push_async_callback(redis.aclose)
            engines = None
            if self._recipe.weights.engines == "router":
                hold = await stack.enter_async_context(sole_policy(redis, self._run_id))
                hold.when_taken(self._give_engines_up)
                engines = await stack.enter_async_context(
                    Engines(self._router_url, precision=self._recipe.weights.precision)
                )
            stack.push_async_callback(self._write_end, redis)
            heartbeat = beat(redis, self._status, show=self._console.beat)
            await stack.enter_async_context(_beside(heartbeat, "heartbeat"))
            journal = stack.enter_context(Journal(self._root / "journal"))
            transport = await open_transport(
                self._recipe.weights,
                self._run_id,
                directory=self._root / "weights",
                export=export,
                keep=1,
                stack=stack,
            )
            deliveries = deliveries_of(redis, self._run_id, transport, engines, self._recipe.weights)
            self._console.say(f"{self._run_id}: publishing the weights to the engines")
            await stack.enter_async_context(
                _beside(
                    deliveries.run(self._note_served, while_ours=lambda: not self._superseded_by),
                    "deliveries",
                )
            )
            journal.append(
                await self._publish(Publisher(redis, self._run_id, transport=transport), deliveries)
            )
            if not await deliveries.settled(0):
                self._console.say(deliveries.trouble)
                self._ended = "no engine took the weights"
                return self._ended
            form = await request_form(redis, self._run_id, self._recipe, self._inputs)
            await stream.open_reader(redis, self._run_id)
            stack.push_async_callback(self._withdraw, redis)
            recorder = stack.enter_context(
                RolloutRecorder(redis, self._run_id, self._root, self._recipe.rollouts)
            )
            for one in rounds:
                if not await self._play(redis, form, Ledger(journal), one, recorder):
                    return self._ended
            self._ended = await self._ending(engines, form)
            return self._ended

    async def _publish(self, publisher: Publisher, deliveries: Deliveries) -> PublicationRow:
        version = await publisher.prepare(0, 0)
        await publisher.announce(version)
        deliveries.offer(version)
        return PublicationRow(version=0, step=0, num_bytes=version.num_bytes)

    def _note_served(self, served: ServedWeights, _: float) -> None:
        self._engine_urls = served.engines

    async def _play(
        self,
        redis: ArqRedis,
        form: RequestForm,
        ledger: Ledger,
        one: Round,
        recorder: RolloutRecorder,
    ) -> bool:
        """Returns whether the whole round was played; then it is in the journal, and acknowledged."""
        heldout = self._heldout(redis, form, ledger, one)
        heldout.start(one.name, version=0, step=0)

        async def accept(delivery: Delivery) -> None:
            if heldout.awaits(delivery.head.request_id):
                heldout.accept(delivery)

        reader = StreamReader(redis, self._run_id, accept, record=recorder.record)
        await redis_calls.until_answered(heldout.send)
        async with _beside(self._sweep(redis, heldout), "sweep"):
            while heldout.progress and not self._stop.is_set():
                self._detail = heldout.progress
                await redis_calls.until_answered(lambda: reader.read(block_ms=READ_BLOCK_MS))
        if heldout.progress:
            return False
        settled = ledger.state(step=0, version=0, cursor=0).pending
        await recorder.flush()
        await redis_calls.until_answered(lambda: stream.acknowledge(redis, self._run_id, settled))
        return True

    def _heldout(self, redis: ArqRedis, form: RequestForm, ledger: Ledger, one: Round) -> HeldOut:
        return HeldOut(
            redis,
            form,
            self._inputs.heldout,
            {},
            one.recipe,
            sampling=replace(sampling_of(self._recipe), temperature=one.temperature),
            seed=self._recipe.seed,
            ledger=ledger,
            report=self._console.show,
        )

    async def _sweep(self, redis: ArqRedis, heldout: HeldOut) -> None:
        """Enqueues lost requests again, periodically."""
        while not self._superseded_by:
            await asyncio.sleep(self._recipe.admission.sweep_every_s)
            with redis_calls.tolerating_outage():
                await sweep(redis, self._run_id, heldout.outstanding)
                await self._replace_forgotten(redis, heldout)

    async def _replace_forgotten(self, redis: ArqRedis, heldout: HeldOut) -> None:
        """Enqueues requests again that Redis has lost, which may be all of them."""
        if heldout.replace(await queue.open_ids(redis, self._run_id)):
            await put_tokenizer(redis, self._inputs.tokenizer)
            self._console.say("Redis forgot requests; they are enqueued anew")
        await heldout.send()

    def _status(self) -> census.RunStatus:
        return census.RunStatus(
            run_id=self._run_id,
            phase="evaluating",
            detail=self._detail,
            journal=str(self._root / "journal"),
            updated_at=time.time(),
        )

    def _give_engines_up(self, other: str) -> None:
        self._console.say(f"{other} took the engines over; the evaluation ends")
        self._superseded_by = other
        self._ended = "the engines' weights were changed"
        self._stop.set()

    async def _write_end(self, redis: ArqRedis) -> None:
        """Writes the last status, after the last heartbeat."""
        with redis_calls.tolerating_outage():
            await census.beat_run(redis, replace(self._status(), detail="", ended=self._ended))

    async def _withdraw(self, redis: ArqRedis) -> None:
        with redis_calls.tolerating_outage():
            await queue.withdraw(redis, self._run_id, await queue.open_ids(redis, self._run_id))

    async def _ending(self, engines: Engines | None, form: RequestForm) -> Ending:
        """Whether the engines still serve the weights that were evaluated."""
        name = base_name(self._run_id) if form.names_adapter else version_name(self._run_id, 0)
        for url in self._engine_urls if engines else ():
            with contextlib.suppress(EngineFailure):
                assert engines is not None
                served = await engines.served(url)
                if served.weight_version != name:
                    return "the engines' weights were changed"
        return "finished"


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[None, None, None], name: str) -> AsyncIterator[None]:
    """Runs `work` during the block, and cancels it afterwards. Raises its error."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
