"""Tells open pages what has changed: one task compares file sizes and heartbeats once a second, as long as a page listens."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass

from infra.web import run_journal
from infra.web.fleet import Statuses
from infra.web.runs import OpenRun
from pipeline.journal.reading import JOURNAL
from pipeline.rollout_store import segment
from pipeline.rollout_store.reading import DIRECTORY

EVERY_S = 1.0
KEEP_OPEN_S = 15.0  # a comment is sent after this long without a change
MAX_WAITING = 1000  # changes not yet sent to a page; the oldest are dropped

Marks = Mapping[tuple[str, str], object]
"""Values that differ after a change, by run and kind of the change."""


@dataclass(frozen=True, slots=True)
class RunChange:
    """A run has changed."""

    run: str
    kind: str


class ChangeFeed:
    """Tells every listener what changed. `look` returns the current marks."""

    def __init__(self, look: Callable[[], Awaitable[Marks]]) -> None:
        self._look = look
        self._listeners: set[asyncio.Queue[RunChange]] = set()
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def listener(self) -> AsyncGenerator[asyncio.Queue[RunChange], None]:
        """A queue of all changes from now on."""
        queue: asyncio.Queue[RunChange] = asyncio.Queue(MAX_WAITING)
        before = await self._look()
        self._listeners.add(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._watch(before), name="watch runs")
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
            # Something that is gone has changed as well, such as the heartbeats when Redis stops answering.
            for run, kind in [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]:
                self._tell(RunChange(run, kind))
            before = now

    def _tell(self, change: RunChange) -> None:
        for queue in self._listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(change)


def marks_of(runs: Mapping[str, OpenRun], statuses: Statuses) -> Marks:
    """The current marks: the sizes of the files of each run, and the time of its trainer's last heartbeat."""
    return dict(_marks_of(runs, statuses))


def _marks_of(runs: Mapping[str, OpenRun], statuses: Statuses) -> Iterator[tuple[tuple[str, str], object]]:
    for run in runs.values():
        for name, found in run_journal.sizes(run.directory / JOURNAL).items():
            yield (run.id, name), found
        yield (run.id, "rollouts"), _newest_segment(run)
        yield (run.id, "reading"), run.reading
    for run_id, (status, is_live) in statuses.items():
        yield (run_id, "status"), (None if status is None else status.updated_at, is_live)


def _newest_segment(run: OpenRun) -> object:
    """Name and size of the newest segment of a store, the only one that grows; None if there is none."""
    paths = segment.segments_in(run.directory / DIRECTORY)
    try:
        return (paths[-1].name, paths[-1].stat().st_size) if paths else None
    except OSError:
        return None
