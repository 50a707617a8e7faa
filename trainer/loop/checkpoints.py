"""Checkpoints: their directories, the order of writing one, and when one is due.

First the whole checkpoint is written, then the pointer, and then the trajectories in it are acknowledged.

A checkpoint contains the state of the run when it was begun; it is written while the run continues. A pointer file names the newest
complete checkpoint. A second checkpoint of one step replaces the first under the same name: the learner renames a whole
directory into place (`trainer.learner.directories`).
"""

import asyncio
import os
import shutil
from pathlib import Path

from pipeline import redis_calls
from trainer.learner import directories
from trainer.loop.budget import AdmissionBudget
from trainer.loop.learner_thread import LearnerThread
from trainer.loop.state import RunState, StepTimes
from trainer.recipe import Recipe
from trainer.rollouts.books import Books
from trainer.rollouts.intake import RunStreams
from trainer.rollouts.ledger import LedgerState, encode_state
from trainer.rollouts.recording import RolloutRecorder

_POINTER = "latest"


class Checkpoints:
    """The checkpoint directories of one run."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def place(self, step: int) -> Path:
        """The directory of a step's checkpoint. Its content must appear complete or not at all."""
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
        """The newest checkpoint of a step before this one, with its own step; 0 and None if there is none. The call changes nothing.

        A checkpoint newer than the one that the pointer names is ignored: a resume takes its steps again.
        """
        pointer = self._directory / _POINTER
        if not pointer.exists():
            return 0, None
        newest = min(pointer.read_text().strip(), self.place(step - 1).name)
        held = sorted(path for path in self._directory.glob("step-*") if path.name <= newest)
        return (int(held[-1].name.removeprefix("step-")), held[-1]) if held else (0, None)

    def complete(self, written: Path) -> None:
        """Makes `written` the checkpoint from which to resume. Removes older ones beyond `keep`, and remains of killed processes."""
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
        for path in older[: max(0, len(older) + 1 - self._keep)]:
            shutil.rmtree(path)
        for leftover in self._directory.glob(".step-*.partial"):
            shutil.rmtree(leftover)


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time, and acknowledges the trajectories in them once they are complete.

    Between `begin` and `finish` the next steps are taken while it is written. Both are called from the task that drives the
    learner.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        learner: LearnerThread,
        state: RunState,
        books: Books,
        streams: RunStreams,
        recorder: RolloutRecorder,
    ) -> None:
        self._checkpoints = checkpoints
        self._learner = learner
        self._state = state
        self._books = books
        self._streams = streams
        self._recorder = recorder
        self._begun: tuple[Path, LedgerState] | None = None

    @property
    def is_written(self) -> bool:
        """Whether a checkpoint is written and only `finish` is missing."""
        return self._begun is not None and self._learner.here.is_save_written

    @property
    def has_something_to_acknowledge(self) -> bool:
        """Whether a checkpoint would allow Redis to delete trajectories."""
        return bool(self._books.ledger.pending_ids)

    async def begin(self) -> None:
        """Begins a checkpoint of the run's present state. If another one is being written, it is finished first."""
        await self.finish()
        state = self._state
        state.phase = "beginning a checkpoint"
        kept = self._books.ledger.state(
            step=state.step,
            version=state.version,
            cursor=self._books.dispatcher.cursor,
            open_groups=self._books.groups.open_groups,
        )
        place = self._checkpoints.place(state.step)
        await self._learner.call("begin_save", place, encode_state(kept))
        self._begun = place, kept

    async def finish(self) -> None:
        """Waits until the current checkpoint is on disk; only then acknowledges the trajectories settled in it."""
        if self._begun is None:
            return
        (place, kept), self._begun = self._begun, None
        self._state.phase = "finishing a checkpoint"
        await self._learner.call("finish_save")
        # Rollouts are flushed before the checkpoint counts: a resume acknowledges what it holds without reading it again.
        await self._recorder.flush()
        await asyncio.to_thread(self._checkpoints.complete, place)
        await redis_calls.until_answered(lambda: self._streams.acknowledge(kept))
        self._books.ledger.acknowledged(kept)

    async def write(self) -> None:
        """Writes a complete checkpoint of the run's present state."""
        await self.begin()
        await self.finish()


class DueCheckpoints:
    """Decides when a run writes its checkpoints: every `checkpoint.every_steps`, at its end, and when only that makes room in Redis.

    A due checkpoint begins after its step and is written during the next ones; it is finished, and its trajectories are
    acknowledged, at the first quiet moment after that. The run waits for a checkpoint that must make room. Only the loop's coroutine calls
    this, and never between a step and its settlement.
    """

    def __init__(
        self, writer: CheckpointWriter, budget: AdmissionBudget, times: StepTimes, recipe: Recipe
    ) -> None:
        self._writer = writer
        self._budget = budget
        self._times = times
        self._every_steps = recipe.checkpoint.every_steps
        self._num_steps = recipe.num_steps
        self._is_due = False

    async def after_step(self, step: int, *, may_begin: bool) -> None:
        """Begin the checkpoint of this step, or a postponed one, if it is due. `may_begin` is False during an evaluation that a resume
        would not repeat: then the checkpoint is postponed.
        """
        self._is_due |= step % self._every_steps == 0 or step == self._num_steps
        await self.tend()
        if self._is_due and may_begin:
            self._is_due = False
            with self._times.spent("checkpoint"):
                await self._writer.begin()

    async def tend(self) -> bool:
        """Finishes a written checkpoint, and makes room in Redis.

        It is called at a quiet moment, and returns whether there was anything to do.
        """
        if not self._writer.is_written and not self._is_room_needed:
            return False
        with self._times.spent("checkpoint"):
            await self._writer.finish()
            if self._is_room_needed:
                await self._writer.write()
        return True

    async def last(self, *, may_begin: bool) -> None:
        """Finishes the current checkpoint, then writes the run's last one, if that is allowed."""
        with self._times.spent("checkpoint"):
            await (self._writer.write() if may_begin else self._writer.finish())

    @property
    def _is_room_needed(self) -> bool:
        return self._budget.needs_checkpoint and self._writer.has_something_to_acknowledge
