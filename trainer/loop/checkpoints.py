"""Checkpoints on disk, and the order in which one is written: first all of it, then the pointer, then the acknowledgements.

A pointer file names the newest complete checkpoint. A second checkpoint of one step replaces the first under the same name:
the learner renames a whole directory into place (`trainer.learner.directories`).
"""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Protocol

from arq.connections import ArqRedis

from pipeline import retry, stream
from trainer.learner import directories
from trainer.loop.state import RunState
from trainer.rollouts.ledger import Ledger, encode_state

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

    def complete(self, written: Path) -> None:
        """Make `written` the checkpoint to resume from, and remove older ones beyond `keep`."""
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


class SavingLearner(Protocol):
    async def save(self, directory: Path, extra: bytes) -> None:
        """Write weights, optimizer and `extra` to `directory`, in whole or not at all."""
        ...


class CheckpointWriter:
    """Writes the checkpoints of one run, and acknowledges what they hold once their rollouts are stored."""

    def __init__(
        self,
        redis: ArqRedis,
        run_id: str,
        checkpoints: Checkpoints,
        learner: SavingLearner,
        *,
        state: RunState,
        ledger: Ledger,
        cursor: Callable[[], int],
        flush_rollouts: Callable[[], Awaitable[None]],
        forget: Callable[[Iterable[tuple[str, str]]], None],
    ) -> None:
        """`cursor` is the place in the task order of the next group. `flush_rollouts` puts the rollouts that arrived on the
        disk. `forget` is told the acknowledged (stream entry, request id) pairs, which will not be delivered again.
        """
        self._redis = redis
        self._run_id = run_id
        self._checkpoints = checkpoints
        self._learner = learner
        self._state = state
        self._ledger = ledger
        self._cursor = cursor
        self._flush_rollouts = flush_rollouts
        self._forget = forget

    async def write(self) -> None:
        """Rollouts, weights, optimizer and ledger to disk; then, and only then, acknowledge the trajectories settled in it."""
        state = self._state
        state.phase = "writing a checkpoint"
        kept = self._ledger.state(step=state.step, version=state.version, cursor=self._cursor())
        # Before the checkpoint is complete: a resume acknowledges what it holds without reading it again.
        await self._flush_rollouts()
        place = self._checkpoints.place(state.step)
        await self._learner.save(place, encode_state(kept))
        await asyncio.to_thread(self._checkpoints.complete, place)
        await retry.until_answered(lambda: stream.acknowledge(self._redis, self._run_id, list(kept.pending)))
        self._ledger.acknowledged(kept)
        self._forget(kept.pending)
