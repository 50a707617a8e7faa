"""The learner of a run as the event loop sees it: every call runs on one thread of its own, so the loop never waits for
arithmetic.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from trainer.batching.batch import Batch
from trainer.batching.logprob_gap import Gap, measure_gap
from trainer.batching.trained_tokens import SampleTokens
from trainer.learner.config import NotFinite, StepMetrics

if TYPE_CHECKING:
    from trainer.feed import Feed

T = TypeVar("T")


class LearnerThread:
    """Calls are carried out one at a time, in the order they were made."""

    def __init__(self, feed: "Feed", pool: ThreadPoolExecutor) -> None:
        self._feed = feed
        self._pool = pool

    @classmethod
    async def start(cls, make_feed: "Callable[[], Feed]") -> Self:
        """Build the learner, on its thread."""
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        return cls(await asyncio.get_running_loop().run_in_executor(pool, make_feed), pool)

    async def step(self, batch: Batch) -> StepMetrics | NotFinite:
        return await self._call(self._feed.step, batch)

    async def accumulate(self, batch: Batch) -> None:
        """Add the gradient of a part of the next step."""
        await self._call(self._feed.accumulate, batch)

    async def apply(self, step: int) -> StepMetrics | NotFinite:
        """Take the step whose parts were accumulated."""
        return await self._call(self._feed.apply, step)

    def take_tokens(self) -> tuple[SampleTokens, ...]:
        """What the last step did with each token, if the run keeps that. Between two calls."""
        return self._feed.learner.take_tokens()

    async def measure_gap(self, batch: Batch) -> Gap:
        """The log-prob gap of the batch's samples, under those of their weight versions that are still held."""
        return await self._call(
            measure_gap, batch, self._feed.learner.versions_held, self._feed.logprobs_under
        )

    async def snapshot(self, version: int) -> None:
        """Keep the present weights as this version."""
        await self._call(self._feed.snapshot, version)

    async def begin_save(self, directory: Path, extra: bytes) -> None:
        """Begin a checkpoint. On return its content is fixed; it is written while other calls are carried out."""
        await self._call(self._feed.begin_save, directory, extra)

    async def finish_save(self) -> None:
        """Wait until the checkpoint is written: the directory is there in whole, or not at all."""
        await self._call(self._feed.finish_save)

    @property
    def is_save_written(self) -> bool:
        """Whether `finish_save` need not wait for the files of this process."""
        return self._feed.learner.is_save_written

    async def restore(self, directory: Path) -> bytes:
        """Go on from a checkpoint; returns the `extra` it was saved with."""
        return await self._call(self._feed.restore, directory)

    async def stop(self) -> None:
        """Let the other ranks end. The last call."""
        await self._call(self._feed.stop)

    def export(self, directory: Path) -> None:
        """Write the weights as a Hugging Face directory. Blocks: for callers on another thread."""
        self._pool.submit(self._feed.export, directory).result()

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
