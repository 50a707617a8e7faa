"""The directory of a run: what identifies it, and the lock that keeps two trainers from working in it at once."""

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainer.records.journal import PublicationRow, read

LOCK = "lock"
RECIPE = "recipe.toml"
RUN_FILE = "run.json"

_LOCK_TRIES = 5
_LOCK_PAUSE_S = 0.05


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: its presence makes a directory a run's."""

    run_id: str
    started_at: float  # Unix seconds


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run, as an absolute path."""

    root: Path
    run_id: str


def create(root: Path, run_id: str, recipe: str) -> RunDirectory:
    """Make `root` the directory of a new run. Raises ValueError where it cannot be written."""
    with writable(root):
        root.mkdir(parents=True, exist_ok=True)
        (root / RECIPE).write_text(recipe)
        (root / RUN_FILE).write_bytes(msgspec.json.encode(RunFile(run_id=run_id, started_at=time.time())))
    return RunDirectory(root.resolve(), run_id)


def find(root: Path) -> RunDirectory:
    """The directory of a run that was started before. Raises ValueError if it is not one."""
    try:
        run = msgspec.json.decode((root / RUN_FILE).read_bytes(), type=RunFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{root} holds no run to resume ({error}); start it without --resume") from error
    return RunDirectory(root.resolve(), run.run_id)


@contextlib.contextmanager
def writable(root: Path) -> Iterator[None]:
    """Turns an OSError of the block, which writes into `root`, into a ValueError with the fix."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--run-dir {root} cannot be written ({error.strerror}: {error.filename}); make room or correct its "
            "permissions, or choose another directory"
        ) from error


@contextlib.contextmanager
def removed_if_refused(root: Path) -> Iterator[None]:
    """If the block ends with ValueError before the run published weights, remove what it wrote into `root`."""
    before = set(root.iterdir()) if root.is_dir() else None
    try:
        yield
    except ValueError:
        has_begun = any(read(root / "journal", PublicationRow))
        if root.is_dir() and not has_begun and not is_locked(root):  # not what another trainer works in
            _remove_all_but(before, root)
        raise


@contextlib.contextmanager
def sole_trainer(root: Path) -> Iterator[None]:
    """Hold the lock of the directory. Raises ValueError if another trainer or evaluation holds it."""
    with writable(root):
        lock = (root / LOCK).open("w")
    with lock:
        for tries_left in reversed(range(_LOCK_TRIES)):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not tries_left:
                    raise ValueError(f"another trainer works in {root}; stop it first") from error
                time.sleep(_LOCK_PAUSE_S)  # `is_locked` holds the lock for an instant
        yield


def is_locked(root: Path) -> bool:
    """Whether a trainer or an evaluation works in the directory at the moment."""
    with contextlib.suppress(FileNotFoundError), (root / LOCK).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _remove_all_but(kept: set[Path] | None, root: Path) -> None:
    """Remove `root`, or, if there was something in it before, the rest."""
    if kept is None:
        shutil.rmtree(root)
        return
    for path in set(root.iterdir()) - kept:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
