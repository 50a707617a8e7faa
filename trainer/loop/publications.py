"""The present weights exported and announced as a version, and what is noted when the engines serve it.

A version's number is never used twice, not even after a crash. Engines load a version beside training: only the first
publication of a process waits for them, because nothing may be sampled before. While no engine serves, the run says so.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from pipeline.weights import ServedWeights, WeightVersion
from trainer.loop.state import RunState
from trainer.loop.step_times import StepTimes
from trainer.records.journal import DeliveryRow, PublicationRow
from trainer.records.time_rows import EnginePause
from trainer.weights.publish import Publisher

RETRY_S = 1.0
"""Between two looks at whether an engine serves now."""


class NoEngineServes(Exception):
    """The run was told to stop before any engine served its weights."""


class WeightDeliveries(Protocol):
    """Who brings versions to the engines."""

    @property
    def oldest_needed(self) -> int: ...

    @property
    def trouble(self) -> str: ...

    def offer(self, version: WeightVersion) -> None: ...

    async def settled(self, version: int) -> bool: ...

    def take_pauses(self) -> tuple[EnginePause, ...]: ...

    async def run(
        self, report: Callable[[ServedWeights, float], None], *, while_ours: Callable[[], bool]
    ) -> None: ...


class SnapshottingLearner(Protocol):
    async def snapshot(self, version: int) -> None:
        """Keep the present weights as this version."""
        ...


class Publications:
    """Of one run."""

    def __init__(
        self,
        publisher: Publisher,
        engines: WeightDeliveries,
        learner: SnapshottingLearner,
        state: RunState,
        times: StepTimes,
        *,
        record: Callable[[PublicationRow | DeliveryRow], None],
        say: Callable[[str], None],
    ) -> None:
        self._publisher = publisher
        self._engines = engines
        self._learner = learner
        self._state = state
        self._times = times
        self._record = record
        self._say = say

    async def publish_first(self) -> None:
        """The first publication of this process, until an engine serves it. A resumed run delivers its newest version again, under
        its number, if that version holds the weights of the checkpoint.

        It does if it is of the checkpoint's step: a run publishes as soon as it has resumed, so a version of steps that were
        lost is not the newest for long enough to be mistaken for one of steps taken since.
        Raises NoEngineServes if told to stop while waiting for an engine.
        """
        newest = await self._publisher.newest()
        if newest is None or newest.step != self._state.step or not await self._publisher.can_deliver(newest):
            await self.publish()
        else:
            self._note_published(newest, time.time())
            await self._learner.snapshot(newest.version)
        await self._wait_for_engine()

    async def publish(self) -> None:
        """Export and announce the present weights as a new version, which the engines load beside what comes next. Nothing is
        published after another run has taken the engines over.
        """
        state = self._state
        if state.superseded_by:
            return
        state.phase = "publishing weights"
        began_at = time.time()
        with self._times.spent("engines"):
            number = max(await self._publisher.next_version(), state.version + 1)
            with self._times.spent("export"):
                version = await self._publisher.prepare(number, state.step)
            await self._publisher.announce(version)
            self._note_published(version, began_at)
            await self._publisher.discard_old(self._engines.oldest_needed)
        with self._times.spent("audit"):
            await self._learner.snapshot(version.version)

    async def deliver(self) -> None:
        """Bring versions to the engines for ever, or until another run takes them over."""
        await self._engines.run(self._note_served, while_ours=lambda: not self._state.superseded_by)

    def _note_served(self, served: ServedWeights, update_s: float) -> None:
        """All engines in routing serve this version from now on."""
        self._state.serve(served.version)
        self._record(
            DeliveryRow(
                version=served.version,
                step=self._state.served_steps,
                engines=served.engines,
                quarantined=served.quarantined,
                update_s=update_s,
                pauses=self._engines.take_pauses(),
            )
        )

    async def finish(self) -> None:
        """Wait until the engines serve the last version, unless none takes it or the run is told to stop."""
        await self._until_settled()

    def _note_published(self, version: WeightVersion, began_at: float) -> None:
        if version.version > self._state.version:  # else the journal has its row
            self._record(
                PublicationRow(
                    version=version.version,
                    step=self._state.step,
                    num_bytes=version.num_bytes,
                    began_at=began_at,
                )
            )
        self._state.publish(version.version)
        self._engines.offer(version)

    async def _wait_for_engine(self) -> None:
        state, told = self._state, ""
        if state.is_stopping:
            raise NoEngineServes
        while not await self._until_settled():
            if state.is_stopping:
                raise NoEngineServes(self._engines.trouble)
            if self._engines.trouble != told:
                told = self._engines.trouble
                self._say(f"{told}; waiting for one")
            state.phase = f"waiting for an engine to take weights v{state.version}"
            await asyncio.sleep(RETRY_S)

    async def _until_settled(self) -> bool:
        """Until the newest version is served, or no engine takes it, or the run is told to stop. Returns whether it is served."""
        settled = asyncio.create_task(self._engines.settled(self._state.version))
        stopped = asyncio.create_task(self._state.stop.wait())
        await asyncio.wait((settled, stopped), return_when=asyncio.FIRST_COMPLETED)
        is_served = settled.done() and settled.result()
        settled.cancel()
        stopped.cancel()
        return is_served
