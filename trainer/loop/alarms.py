"""Alarms beside a run's loop: what they know from earlier processes, measurements of disk and Redis, and the stop."""

import asyncio
import heapq
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from arq.connections import ArqRedis

from pipeline import retry, stream
from trainer.recipe import Recipe
from trainer.recipe.alarms import AlarmKind
from trainer.records.alarm_row import AlarmRow
from trainer.records.alarms import Alarms, Storage
from trainer.records.journal import EpisodeRow, EvaluationRow, StepRow, read
from trainer.records.row import Row

MEASURE_S = 30.0


def recalled_alarms(recipe: Recipe, journal: Path) -> Alarms:
    """The alarms of a run as `journal` leaves them, which must have been cut back to its checkpoint."""
    alarms = Alarms(recipe.alarms, max_lag_versions=recipe.admission.max_lag_versions)
    files = [read(journal, kind) for kind in (EpisodeRow, StepRow, EvaluationRow, AlarmRow)]
    alarms.recall(heapq.merge(*files, key=lambda row: row.at))
    return alarms


class AlarmStop:
    """A sink that calls `stop` with a sentence when one of `kinds` begins."""

    def __init__(self, kinds: Collection[AlarmKind], stop: Callable[[str], None]) -> None:
        self._kinds = kinds
        self._stop = stop

    def show(self, row: Row) -> None:
        if isinstance(row, AlarmRow) and row.kind in self._kinds and not row.is_over:
            self._stop(f"{row.kind}: {row.text}")


class StorageWatch:
    """Measures how full the run's disk and its Redis are, and records the alarms that come of it."""

    def __init__(
        self, redis: ArqRedis, root: Path, alarms: Alarms, *, record: Callable[[AlarmRow], None]
    ) -> None:
        """`root` is the run's directory."""
        self._redis = redis
        self._root = root
        self._alarms = alarms
        self._record = record

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.measure()
            await asyncio.sleep(MEASURE_S)

    async def measure(self) -> None:
        """Once. A Redis that does not answer is left out."""
        disk = await asyncio.to_thread(shutil.disk_usage, self._root)
        storage = Storage(disk.free)
        with retry.tolerating_outage():
            used_bytes, limit_bytes = await stream.memory_use(self._redis)
            storage = Storage(disk.free, used_bytes, limit_bytes)
        for row in self._alarms.observe_storage(storage):
            self._record(row)
