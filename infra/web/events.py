"""What is new, for the pages that are open: one task looks at sizes of files and at heartbeats, once a second, while somebody listens."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass

EVERY_S = 1.0
KEEP_OPEN_S = 15.0  # without a change, a comment is sent so often
MAX_WAITING = 1000  # changes that a page has not been sent yet; the oldest are dropped

Marks = Mapping[tuple[str, str], object]
"""By run and kind, something that differs after a change of that kind."""


@dataclass(frozen=True, slots=True)
class RunChange:
    """There is something new of a run."""

    run: str
    kind: str


class ChangeFeed:
    """Tells every listener what changed. `look` says how everything is at the moment."""

    def __init__(self, look: Callable[[], Awaitable[Marks]]) -> None:
        self._look = look
        self._listeners: set[asyncio.Queue[RunChange]] = set()
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def listener(self) -> AsyncGenerator[asyncio.Queue[RunChange], None]:
        """A queue of what changes from now on."""
        queue: asyncio.Queue[RunChange] = asyncio.Queue(MAX_WAITING)
        before = await self._look()
        self._listeners.add(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._watch(before))
        try:
            yield queue
        finally:
            self._listeners.discard(queue)
            if not self._listeners:
                await self.close()

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _watch(self, before: Marks) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            now = await self._look()
            # What is gone has changed as well: the heartbeats, when Redis stops answering.
            for run, kind in [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]:
                self._tell(RunChange(run, kind))
            before = now

    def _tell(self, change: RunChange) -> None:
        for queue in self._listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(change)
