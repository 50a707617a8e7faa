"""Which runs there are, and where their directories are.

A run is found in the directories of the command line, in folders of such directories, and through Redis: the heartbeat of a trainer
names its journal. Requests name runs by id, never by path, so nothing outside these directories can be read.
"""

import threading
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from infra.web.journal_files import JsonRow, RunJournal, last_row
from infra.web.rollout_index import RolloutIndex
from infra.web.rollout_query import SortedRollouts
from pipeline.census import RunStatus

RUN_FILE, RECIPE, JOURNAL = "run.json", "recipe.toml", "journal"
SLICE_BYTES = 2 * 1024**2  # that are read while others wait for the run's lock


class _RunIdentity(msgspec.Struct):
    """What is read of `run.json`."""

    run_id: str
    started_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """How much of a run's journal and rollouts was read or passed over so far, of how much."""

    read_bytes: int
    total_bytes: int


@dataclass(slots=True)
class OpenRun:
    """A run's journal and rollouts, as read so far. Hold `lock` while reading them: requests are carried out by threads."""

    id: str
    directory: Path
    started_at: float
    num_steps: int | None = field(init=False)  # of its recipe
    journal: RunJournal = field(init=False)
    rollouts: RolloutIndex = field(init=False)
    table: SortedRollouts = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)
    # Set while there is more to read: then replies tell what was read so far.
    reading: Reading | None = None

    def __post_init__(self) -> None:
        self.num_steps = _num_steps(self.directory)
        self.forget()

    def read_slice(self) -> bool:
        """Read what is new, SLICE_BYTES at most, which takes some 50 ms. Returns whether that was all."""
        with self.lock:
            is_all = self.rollouts.read(SLICE_BYTES) < SLICE_BYTES
            self.reading = None if is_all else Reading(*self.rollouts.progress)
        return is_all

    def forget(self) -> None:
        """Give the memory of what was read back; it is read again when it is wanted."""
        with self.lock:
            self.journal = RunJournal(self.directory / JOURNAL)
            self.rollouts = RolloutIndex(self.directory, self.journal)
            self.table = SortedRollouts()
            self.reading = Reading(*self.rollouts.progress)


class RunCatalogue:
    """The runs that have a directory on this machine, by id."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._lock = threading.Lock()
        self._open: dict[Path, OpenRun] = {}

    def runs(self, statuses: Iterable[RunStatus]) -> dict[str, OpenRun]:
        """All of them; `statuses` are the last heartbeats of trainers. Of two directories with one id the second gets
        `id~2`: a copy of a run is a run of its own.
        """
        with self._lock:
            for directory in self._directories(statuses):
                if directory not in self._open:
                    found = _identity(directory)
                    run_id, number = found.run_id, 2
                    while any(run.id == run_id for run in self._open.values()):
                        run_id, number = f"{found.run_id}~{number}", number + 1
                    self._open[directory] = OpenRun(run_id, directory, found.started_at)
            return {run.id: run for run in self._open.values() if run.directory.is_dir()}

    def _directories(self, statuses: Iterable[RunStatus]) -> list[Path]:
        found = [path for root in self._roots for path in _runs_in(root)]
        for status in statuses:
            directory = Path(status.journal).parent if status.journal else None
            # The heartbeat comes over the network: only a directory that says itself to be this run's is opened.
            if directory is not None and (directory / RUN_FILE).is_file():
                found += [directory.resolve()] if _identity(directory).run_id == status.run_id else []
        return list(dict.fromkeys(found))


def summary(run_id: str, run: OpenRun | None, status: RunStatus | None, *, is_live: bool) -> JsonRow:
    """A run's line in the list of runs."""
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
    """What the directory tells. Only the ends of files are read: there may be many long runs."""
    journal = run.directory / JOURNAL
    step = last_row(journal / "steps.jsonl")
    evaluation = last_row(journal / "evaluations.jsonl", lambda row: not row.get("greedy"))
    ending = last_row(journal / "endings.jsonl")
    return {
        "name": run.directory.name,
        "directory": str(run.directory),
        "started_at": run.started_at,
        "step": step.get("step", 0),
        "num_steps": run.num_steps or 0,
        "version": last_row(journal / "publications.jsonl").get("version", 0),
        "updated_at": step.get("at", run.started_at),
        "ended": ending.get("detail") or ending.get("reason", ""),
        "reward_mean": step.get("reward_mean"),
        "success": evaluation.get("success"),
    }


def _runs_in(root: Path) -> list[Path]:
    """`root` itself if it is the directory of a run, otherwise those that lie in it."""
    if _is_run(root):
        return [root.resolve()]
    try:
        return sorted(path.resolve() for path in root.iterdir() if _is_run(path))
    except OSError:
        return []


def _is_run(directory: Path) -> bool:
    return (directory / RUN_FILE).is_file() or (directory / JOURNAL).is_dir()


def _identity(directory: Path) -> _RunIdentity:
    try:
        return msgspec.json.decode((directory / RUN_FILE).read_bytes(), type=_RunIdentity)
    except (OSError, msgspec.DecodeError):
        return _RunIdentity(run_id=directory.resolve().name)


def _num_steps(directory: Path) -> int | None:
    """Of the recipe; None if there is no recipe that says so."""
    try:
        found = tomllib.loads((directory / RECIPE).read_text()).get("num_steps")
    except (OSError, ValueError):
        return None
    return found if isinstance(found, int) else None
