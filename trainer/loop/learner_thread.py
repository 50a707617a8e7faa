"""The learner of a run for the event loop: every call runs on a separate thread, so the loop never waits for arithmetic."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from trainer.batching.audit import Gap, measure_gap
from trainer.batching.batch import Batch

if TYPE_CHECKING:
    from trainer.feed import Feed
    from trainer.learner.megatron import Learner

T = TypeVar("T")


class LearnerThread:
    """Calls are carried out one at a time, in the order they were made."""

    def __init__(self, feed: "Feed", pool: ThreadPoolExecutor) -> None:
        self._feed = feed
        self._pool = pool
        self.num_threads = feed.num_threads

    @classmethod
    async def start(cls, make_feed: "Callable[[], Feed]") -> Self:
        """Build the learner, on its thread."""
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        return cls(await asyncio.get_running_loop().run_in_executor(pool, make_feed), pool)

    @property
    def here(self) -> "Learner":
        """The learner of this process, for data that is read between two calls and needs no other rank."""
        return self._feed.learner

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call this method of the learner on every rank."""
        return await self._on_thread(self._feed.call, name, *arguments)

    def call_blocking(self, name: str, *arguments: Any) -> Any:
        """Do what `call` does, for a caller on another thread, who waits for it."""
        return self._pool.submit(self._feed.call, name, *arguments).result()

    async def measure_gap(self, batch: Batch) -> Gap:
        """The log-prob gap of the batch's samples, under those of their weight versions that are still held."""
        recompute = partial(self._feed.call, "logprobs_under")
        return await self._on_thread(measure_gap, batch, self.here.versions_held, recompute)

    async def stop(self) -> None:
        """Let the other ranks end. The last call."""
        await self._on_thread(self._feed.stop)

    async def _on_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
