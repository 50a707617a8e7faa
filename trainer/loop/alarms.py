"""The warnings of a run: alarms, which also cover earlier processes of the run and may stop it, and notices, each printed once.

There are notices about groups that keep failing, about tasks put in quarantine, and about replies without a command.
"""

import asyncio
import heapq
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from arq.connections import ArqRedis

from pipeline import deadletters, redis_calls, stream
from pipeline.journal.reading import read
from pipeline.journal.rows import AlarmRow, EpisodeRow, EvaluationRow, Row, StepRow
from pipeline.screen import visible_line
from trainer.recipe import Recipe
from trainer.recipe.schema import AlarmKind
from trainer.records.alarms import Alarms, Storage
from trainer.rollouts.books import Books
from trainer.rollouts.intake import Intake


def recalled_alarms(recipe: Recipe, journal: Path) -> Alarms:
    """The alarms of a run in the state of `journal`, which must have been cut back to its checkpoint."""
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


async def measured_storage(redis: ArqRedis, root: Path) -> Storage:
    """The free space on the disk of the run's directory, and the memory use of its Redis. A Redis that does not answer is left out."""
    disk = await asyncio.to_thread(shutil.disk_usage, root)
    with redis_calls.tolerating_outage():
        used_bytes, limit_bytes = await stream.memory_use(redis)
        return Storage(disk.free, used_bytes, limit_bytes)
    return Storage(disk.free)


SHOWN_CHARACTERS = 300


class Notices:
    """Prints each warning of one run once: groups that keep failing, tasks in quarantine, replies without a command."""

    def __init__(self, books: Books, intake: Intake, alarms: Alarms, *, say: Callable[[str], None]) -> None:
        self._redis = books.redis
        self._run_id = books.run_id
        self._ledger = books.ledger
        self._quarantine = books.quarantine
        self._intake = intake
        self._alarms = alarms
        self._say = say
        self._unusable_said = False
        self._failures_said = 0
        self._quarantine_said: set[str] = set()
        self._unsteady_said: set[str] = set()

    async def give(self) -> None:
        """Prints the notices that are new since the last call."""
        await self._say_failures()
        self._say_quarantine()
        self._say_unsteady_patches()
        self._say_unusable_replies()

    async def _say_failures(self) -> None:
        brake = self._ledger.brake
        if brake.pause_s and brake.failed_groups != self._failures_said:
            letter = await deadletters.find(self._redis, self._run_id, self._intake.last_failed)
            evidence = letter.failures[-1:] if letter else ()
            last = "".join(f", the last at {one.boundary}: {one.message}" for one in evidence)
            self._say(
                f"{brake.failed_groups} groups in a row failed{last}; "
                f"the next is enqueued in {brake.pause_s:.0f} s"
            )
        self._failures_said = brake.failed_groups

    def _say_quarantine(self) -> None:
        for task_id in [one for one in self._quarantine if one not in self._quarantine_said]:
            self._quarantine_said.add(task_id)
            self._say(
                f"{task_id} is in quarantine and not played any more: {self._quarantine.reason(task_id)}"
            )

    def _say_unusable_replies(self) -> None:
        """Show the first reply without a command once `format_errors_prevail` has begun; a single one needs no line."""
        found = self._intake.first_unusable
        is_on = any(row.kind == "format_errors_prevail" for row in self._alarms.firing)
        if found is None or not is_on or self._unusable_said:
            return
        self._unusable_said = True
        request_id, reply = found
        shown = visible_line(reply[:SHOWN_CHARACTERS]) + ("..." if len(reply) > SHOWN_CHARACTERS else "")
        self._say(
            f'the first reply without a command, of {request_id}: "{shown}"; docs/tasks.md says which models to begin with'
        )

    def _say_unsteady_patches(self) -> None:
        for task_id, found in self._quarantine.unsteady.items():
            if task_id not in self._unsteady_said:
                self._unsteady_said.add(task_id)
                self._say(f"{task_id} is still played, because its tests were steady when it was verified: {found}")
