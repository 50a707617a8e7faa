"""Exports and announces the present weights as a version, and records when the engines serve it.

A version's number is never used twice, not even after a crash. Engines load a version while training continues: only the first
publication of a process waits for them, because nothing may be sampled before. While no engine serves, the run reports it.
"""

import asyncio
import time

from pipeline.journal.rows import DeliveryRow, PublicationRow
from pipeline.weights import ServedWeights, WeightVersion
from trainer.loop.run import Run

RETRY_S = 1.0
"""Pause between two checks whether an engine serves the weights."""


class NoEngineServes(Exception):
    """The run was stopped before any engine served its weights."""


class Publications:
    """Publishes the weights of one run."""

    def __init__(self, run: Run) -> None:
        self._publisher = run.publisher
        self._engines = run.deliveries
        self._learner = run.learner
        self._state = run.state
        self._times = run.times
        self._record = run.record
        self._say = run.say

    async def publish_first(self) -> None:
        """Makes the first publication of this process, and waits until an engine serves it. A resumed run delivers its newest version
        again, under its number, if that version contains the weights of the checkpoint.

        It does if it has the checkpoint's step. A run publishes as soon as it has resumed, so a version of lost steps is never the newest
        long enough to be mistaken for a version of the steps taken since. Raises NoEngineServes if a stop comes while it waits for an
        engine.
        """
        newest = await self._publisher.newest()
        if newest is None or newest.step != self._state.step or not await self._publisher.can_deliver(newest):
            await self.publish()
        else:
            self._note_published(newest, time.time())
            await self._learner.call("snapshot", newest.version)
        await self._wait_for_engine()

    async def publish(self) -> None:
        """Export and announce the present weights as a new version, which the engines load during the next steps. Nothing is
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
            await self._learner.call("snapshot", version.version)

    async def deliver(self) -> None:
        """Delivers versions to the engines until another run takes them over, or until it is cancelled."""
        await self._engines.run(self._note_served, while_ours=lambda: not self._state.superseded_by)

    def _note_served(self, served: ServedWeights, update_s: float) -> None:
        """Records that all engines in routing serve this version from now on."""
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
        """Waits until the engines serve the last version, unless no engine accepts it or a stop comes."""
        await self._until_settled()

    def _note_published(self, version: WeightVersion, began_at: float) -> None:
        if version.version > self._state.version:  # otherwise the journal has its row
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
        state, said = self._state, ""
        if state.is_stopping:
            raise NoEngineServes
        while not await self._until_settled():
            if state.is_stopping:
                raise NoEngineServes(self._engines.trouble)
            if self._engines.trouble != said:
                said = self._engines.trouble
                self._say(f"{said}; waiting for one")
            state.phase = f"waiting for an engine to take weights v{state.version}"
            await asyncio.sleep(RETRY_S)

    async def _until_settled(self) -> bool:
        """Waits until the newest version is served, no engine accepts it, or a stop comes. Returns whether it is served."""
        settled = asyncio.create_task(self._engines.settled(self._state.version), name="wait for engines")
        stopped = asyncio.create_task(self._state.stop.wait(), name="wait for a stop")
        await asyncio.wait((settled, stopped), return_when=asyncio.FIRST_COMPLETED)
        is_served = settled.done() and settled.result()
        settled.cancel()
        stopped.cancel()
        return is_served
