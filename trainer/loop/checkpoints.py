"""Checkpoints on disk, and the order in which one is written: first all of it, then the pointer, then the acknowledgements.

A checkpoint holds the run of the moment when it was begun; it is written while the run goes on. A pointer file names the newest
complete checkpoint. A second checkpoint of one step replaces the first under the same name: the learner renames a whole
directory into place (`trainer.learner.directories`).
"""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from pipeline import retry
from trainer.learner import directories
from trainer.loop.state import RunState
from trainer.rollouts.ledger import Ledger, LedgerState, encode_state

_POINTER = "latest"


class Checkpoints:
    """The checkpoint directories of one run."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def place(self, step: int) -> Path:
        """Where the checkpoint of a step belongs. What is written there must appear in whole or not at all."""
        return self._directory / f"step-{step:08d}"

    def latest(self) -> Path | None:
        """The newest complete checkpoint. Raises ValueError if the pointer names one that is gone."""
        pointer = self._directory / _POINTER
        if not pointer.exists():
            return None
        found = self._directory / pointer.read_text().strip()
        directories.finish_replacement(found)
        if not found.is_dir():
            raise ValueError(
                f"{pointer} names {found.name}, which is not there; restore it, or write another's name"
            )
        return found

    def before(self, step: int) -> tuple[int, Path | None]:
        """The newest checkpoint of a step before this one, with its own step; 0 and None if there is none. Changes nothing.

        A checkpoint newer than the one that the pointer names is passed over: a resume takes its steps again.
        """
        pointer = self._directory / _POINTER
        if not pointer.exists():
            return 0, None
        newest = min(pointer.read_text().strip(), self.place(step - 1).name)
        held = sorted(path for path in self._directory.glob("step-*") if path.name <= newest)
        return (int(held[-1].name.removeprefix("step-")), held[-1]) if held else (0, None)

    def complete(self, written: Path) -> None:
        """Make `written` the checkpoint to resume from. Removes older ones beyond `keep`, and what killed processes left."""
        partial = self._directory / f".{_POINTER}"
        with partial.open("w") as file:
            file.write(written.name)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._directory / _POINTER)
        directories.sync(self._directory)
        older = sorted(
            path for path in self._directory.glob("step-*") if path.name <= written.name and path != written
        )
        for path in older[: len(older) - self._keep + 1]:
            shutil.rmtree(path)
        for leftover in self._directory.glob(".step-*.partial"):
            shutil.rmtree(leftover)


class SavingLearner(Protocol):
    async def begin_save(self, directory: Path, extra: bytes) -> None:
        """Fix weights, optimizer and `extra` as they are, and begin to write them to `directory`."""
        ...

    async def finish_save(self) -> None:
        """Wait until they are written: the directory is there in whole, or not at all."""
        ...

    @property
    def is_save_written(self) -> bool:
        """Whether `finish_save` would not wait long."""
        ...


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time, and acknowledges what they hold once they are whole.

    `begin` and `finish` lie apart, so that a checkpoint is written while the next steps are taken. Both are called from the
    task that drives the learner.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        learner: SavingLearner,
        *,
        state: RunState,
        ledger: Ledger,
        cursor: Callable[[], int],
        flush_rollouts: Callable[[], Awaitable[None]],
        acknowledge: Callable[[LedgerState], Awaitable[None]],
    ) -> None:
        """`cursor` is the place in the task order of the next group. `flush_rollouts` puts the rollouts that arrived on the
        disk. `acknowledge` acknowledges the stream entries that a checkpoint holds.
        """
        self._checkpoints = checkpoints
        self._learner = learner
        self._state = state
        self._ledger = ledger
        self._cursor = cursor
        self._flush_rollouts = flush_rollouts
        self._acknowledge = acknowledge
        self._begun: tuple[Path, LedgerState] | None = None

    @property
    def is_written(self) -> bool:
        """Whether a checkpoint waits for nothing but `finish`."""
        return self._begun is not None and self._learner.is_save_written

    async def begin(self) -> None:
        """Begin a checkpoint of the run as it is now. One that is under way is finished first."""
        await self.finish()
        state = self._state
        state.phase = "beginning a checkpoint"
        kept = self._ledger.state(step=state.step, version=state.version, cursor=self._cursor())
        place = self._checkpoints.place(state.step)
        await self._learner.begin_save(place, encode_state(kept))
        self._begun = place, kept

    async def finish(self) -> None:
        """Wait until the checkpoint under way is on disk; then, and only then, acknowledge the trajectories settled in it."""
        if self._begun is None:
            return
        (place, kept), self._begun = self._begun, None
        self._state.phase = "finishing a checkpoint"
        await self._learner.finish_save()
        # Before the checkpoint counts: a resume acknowledges what it holds without reading it again.
        await self._flush_rollouts()
        await asyncio.to_thread(self._checkpoints.complete, place)
        await retry.until_answered(lambda: self._acknowledge(kept))
        self._ledger.acknowledged(kept)

    async def write(self) -> None:
        """A whole checkpoint of the run as it is now."""
        await self.begin()
        await self.finish()
