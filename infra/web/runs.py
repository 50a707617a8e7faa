"""The known runs and their directories, and what has changed in them.

A run is found in the directories of the command line, in folders of such directories, and through Redis: the heartbeat of a trainer
names its journal. Requests name runs by id, never by path, so nothing outside these directories can be read.

A run's journal and the heads of its rollouts are read in slices. A request reads one slice itself, which is enough for a run that was read
before; if there is more, a task continues and the reply contains the progress. The rows of runs that nobody has looked at for long are
released once there are too many.

Open pages learn what has changed: one task compares file sizes and heartbeats once a second, as long as a page listens.
"""

import asyncio
import contextlib
import os
import threading
import tomllib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.web import run_journal
from infra.web.fleet import Statuses
from infra.web.rollout_table import RolloutIndex, SortedRollouts
from infra.web.run_journal import JsonRow, RunJournal
from pipeline.census import RunStatus
from pipeline.journal.reading import JOURNAL, RECIPE, RUN_FILE, identity, last_row
from pipeline.journal.rows import EndRow, EvaluationRow, ImitationStepRow, PublicationRow, StepRow
from pipeline.rollout_store import segment
from pipeline.rollout_store.reading import DIRECTORY

SLICE_BYTES = 2 * 1024**2  # number of bytes read while others wait for the run's lock

EVERY_S = 1.0
KEEP_OPEN_S = 15.0  # a comment is sent after this long without a change
MAX_WAITING = 1000  # changes not yet sent to a page; the oldest are dropped

Marks = Mapping[tuple[str, str], object]
"""Values that differ after a change, by run and kind of the change."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The parts of a run's journal and rollouts that have been read or skipped so far, and their total size."""

    read_bytes: int
    total_bytes: int


@dataclass(slots=True)
class OpenRun:
    """A run's journal and rollouts, as read so far. Hold `lock` while reading them, because threads carry out the requests."""

    id: str
    directory: Path
    started_at: float
    num_steps: int | None = field(init=False)  # number of steps in its recipe
    journal: RunJournal = field(init=False)
    rollouts: RolloutIndex = field(init=False)
    table: SortedRollouts = field(init=False)
    kept: "Kept" = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)
    # The state of a read that is not finished; replies then tell what was read so far.
    reading: Reading | None = None

    def __post_init__(self) -> None:
        self.num_steps = _num_steps(self.directory)
        self.forget()

    def read_slice(self) -> bool:
        """Reads the new data, SLICE_BYTES at most, which takes about 50 ms. Returns whether nothing is left."""
        with self.lock:
            is_all = self.rollouts.read(SLICE_BYTES) < SLICE_BYTES
            self.reading = None if is_all else Reading(*self.rollouts.progress)
        return is_all

    def forget(self) -> None:
        """Releases the memory of what was read; it is read again when it is needed."""
        with self.lock:
            self.journal = RunJournal(self.directory / JOURNAL)
            self.rollouts = RolloutIndex(self.directory, self.journal)
            self.table = SortedRollouts()
            self.kept = Kept()
            self.reading = Reading(*self.rollouts.progress)


class Kept:
    """Replies about a run by name, each given again until what it was made of has changed. One thread at a time may use it."""

    def __init__(self) -> None:
        self._replies: dict[str, tuple[object, JsonRow]] = {}

    def reply(self, name: str, state: object, make: Callable[[], JsonRow]) -> JsonRow:
        """The reply of this name. `state` differs after each change of what `make` reads."""
        known_state, known = self._replies.get(name, (None, None))
        if known is None or known_state != state:
            known = make()
            self._replies[name] = state, known
        return known


class RunCatalogue:
    """The runs that have a directory on this machine, by id."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._lock = threading.Lock()
        self._open: dict[Path, OpenRun] = {}

    def runs(self, statuses: Iterable[RunStatus]) -> dict[str, OpenRun]:
        """All runs; `statuses` are the last heartbeats of trainers. The second of two directories with the same id gets `id~2`: a copy of a
        run is a separate run.
        """
        with self._lock:
            for directory in self._directories(statuses):
                if directory not in self._open:
                    found = identity(directory)
                    run_id, number = found.run_id, 2
                    while any(run.id == run_id for run in self._open.values()):
                        run_id, number = f"{found.run_id}~{number}", number + 1
                    self._open[directory] = OpenRun(run_id, directory, found.started_at)
            return {run.id: run for run in self._open.values() if run.directory.is_dir()}

    def _directories(self, statuses: Iterable[RunStatus]) -> list[Path]:
        found = [path for root in self._roots for path in _runs_in(root)]
        for status in statuses:
            directory = Path(status.journal).parent if status.journal else None
            # The heartbeat comes over the network: a directory is opened only if its own run file names this run.
            if directory is not None and (directory / RUN_FILE).is_file():
                found += [directory.resolve()] if identity(directory).run_id == status.run_id else []
        return list(dict.fromkeys(found))


def summary(run_id: str, run: OpenRun | None, status: RunStatus | None, *, is_live: bool | None) -> JsonRow:
    """The line of a run in the list of runs. `is_live` is None if that is unknown, because Redis does not answer."""
    shown: dict[str, Any] = {"id": run_id, "name": run_id, "directory": "", "live": is_live}
    shown |= {"phase": "", "detail": "", "step": 0, "num_steps": 0, "version": 0, "updated_at": 0.0}
    shown |= {"started_at": 0.0, "ended": "", "reward_mean": None, "success": None}
    if run is not None:
        shown |= _stored_summary(run)
    if status is not None:
        names = ("phase", "detail", "version", "updated_at", "ended")
        shown |= {name: getattr(status, name) for name in names}
        shown["step"] = max(shown["step"], status.step)
        shown["num_steps"] = status.num_steps or shown["num_steps"]
    return shown


def _stored_summary(run: OpenRun) -> JsonRow:
    """The summary from the directory alone. Only the ends of files are read, because there may be many long runs."""
    journal = run.directory / JOURNAL
    step, ending = last_row(journal, StepRow), last_row(journal, EndRow)
    newest = step or last_row(journal, ImitationStepRow)
    evaluation = last_row(journal, EvaluationRow, lambda row: not row.greedy and not row.tasks)
    publication = last_row(journal, PublicationRow)
    return {
        "name": run.directory.name,
        "directory": str(run.directory),
        "started_at": run.started_at,
        "step": newest.step if newest else 0,
        "num_steps": run.num_steps or 0,
        "version": publication.version if publication else 0,
        "updated_at": newest.at if newest else run.started_at,
        "ended": (ending.detail or ending.reason) if ending else "",
        "reward_mean": step.reward_mean if step else None,
        "success": evaluation.success if evaluation else None,
    }


def _runs_in(root: Path) -> list[Path]:
    """Yields `root` itself if it is the directory of a run, otherwise the run directories in it."""
    if _is_run(root):
        return [root.resolve()]
    whole = root.resolve()
    try:
        with os.scandir(whole) as entries:
            found = sorted((entry.name, entry.is_symlink()) for entry in entries)
    except OSError:
        return []
    paths = [(whole / name).resolve() if is_link else whole / name for name, is_link in found]
    return [path for path in paths if _is_run(path)]


def _is_run(directory: Path) -> bool:
    # What this user may not read is not a run, and does not hide the others.
    with contextlib.suppress(PermissionError):
        return (directory / RUN_FILE).is_file() or (directory / JOURNAL).is_dir()
    return False


def _num_steps(directory: Path) -> int | None:
    """The number of steps in the recipe; None if there is no recipe with that number."""
    try:
        found = tomllib.loads((directory / RECIPE).read_text()).get("num_steps")
    except (OSError, ValueError):
        return None
    return found if isinstance(found, int) else None


MAX_ROWS = 200_000  # rows in memory above which runs are forgotten, but not the newest one looked at; a row takes about 1.2 kB


class RunReader:
    """Reads the new data of runs before they are shown."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._used: OrderedDict[str, OpenRun] = OrderedDict()  # the most recently used last

    async def catch_up(self, run: OpenRun) -> None:
        """Reads one slice; a task of its own reads what is left."""
        self._used[run.id] = run
        self._used.move_to_end(run.id)
        if run.id not in self._tasks and not await asyncio.to_thread(run.read_slice):
            self._tasks[run.id] = asyncio.create_task(self._read_rest(run), name=f"read run {run.id}")
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
    try:
        with os.scandir(run.directory / DIRECTORY) as files:
            newest = max(
                (file for file in files if file.name.endswith(segment.SUFFIX)),
                key=lambda file: file.name,
                default=None,
            )
        return newest and (newest.name, newest.stat().st_size)
    except OSError:
        return None
