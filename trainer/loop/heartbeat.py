"""What a run says of itself every second: to Redis, for `python -m pipeline status`, and to the screen."""

import asyncio
import time

from pipeline import census, retry
from trainer.loop.budget import Room
from trainer.loop.parts import Parts
from trainer.loop.state import Standing
from trainer.recipe import Recipe

BEAT_S = 1.0
WAITING = "waiting for trajectories"
"""The phase about which there is more to say."""


class Bulletin:
    """Of one run."""

    def __init__(self, recipe: Recipe, run_id: str, parts: Parts, standing: Standing, room: Room) -> None:
        self._recipe = recipe
        self._run_id = run_id
        self._parts = parts
        self._standing = standing
        self._room = room

    async def run(self) -> None:
        """For ever."""
        while True:
            status = self._status()
            with retry.tolerating_outage():
                await census.beat_run(self._parts.redis, status)
            parts = (
                f"step {status.step}/{status.num_steps}",
                f"weights v{status.version}",
                status.phase,
                status.detail,
            )
            self._parts.progress.beat("  ·  ".join(part for part in parts if part))
            await asyncio.sleep(BEAT_S)

    def _status(self) -> census.RunStatus:
        return census.RunStatus(
            run_id=self._run_id,
            phase=self._standing.phase,
            detail=self._detail(),
            step=self._standing.step,
            num_steps=self._recipe.num_steps,
            version=max(0, self._standing.version),
            admission=self._room.sentence(),
            journal=str(self._parts.journal.directory.resolve()),
            quarantined=tuple(self._parts.quarantine),
            updated_at=time.time(),
        )

    def _detail(self) -> str:
        book, heldout = self._parts.book, self._parts.heldout.progress
        if self._standing.phase != WAITING:
            return heldout
        per_step, step = self._recipe.batch.groups_per_step, self._standing.step + 1
        if book.num_ready >= per_step:
            waits = f"step {step} waits for an older group, lest it be trained too late"
        else:
            waits = (
                f"step {step} waits for {book.needed} more trajectories; "
                f"{book.num_ready} of {per_step} groups ready"
            )
            since = self._parts.ledger.since_step
            if since.zero_variance + since.invalid:
                waits += f", {since.zero_variance} dropped without signal, {since.invalid} for failures"
        return f"{waits}; {heldout}" if heldout else waits
