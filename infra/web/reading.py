"""What keeps memory and waiting bounded, however long runs are.

A run's journal and the heads of its rollouts are read in slices. A request reads one slice itself, which is all that a run needs that
was read before; if there is more, a task goes on and the reply says how far reading is. Of runs that nobody looked at for long, the
rows are given back once there are too many.
"""

import asyncio
from collections import OrderedDict

from infra.web.runs import OpenRun

MAX_ROWS = 200_000  # in memory, of all runs but the one that is looked at; a row takes some 1.2 kB


class RunReader:
    """Reads what is new of runs before they are shown."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._used: OrderedDict[str, OpenRun] = OrderedDict()  # the latest last

    async def catch_up(self, run: OpenRun) -> None:
        """Read a slice; what is left is read by a task of its own."""
        self._used[run.id] = run
        self._used.move_to_end(run.id)
        if run.id not in self._tasks and not await asyncio.to_thread(run.read_slice):
            self._tasks[run.id] = asyncio.create_task(self._read_rest(run))
        self._make_room()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_rest(self, run: OpenRun) -> None:
        try:
            while not await asyncio.to_thread(run.read_slice):
                self._make_room()
        finally:
            del self._tasks[run.id]

    def _make_room(self) -> None:
        rows = {run_id: len(run.rollouts.rows) for run_id, run in self._used.items()}
        for run_id in list(self._used)[:-1]:
            if sum(rows.values()) <= MAX_ROWS:
                return
            if run_id not in self._tasks:
                self._used.pop(run_id).forget()
                del rows[run_id]
