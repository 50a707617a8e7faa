"""The directory of a run: what identifies it, and the lock that keeps two trainers from working in it at once."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

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


@contextlib.contextmanager
def sole_trainer(root: Path) -> Iterator[None]:
    """Hold the lock of the directory. Raises ValueError if another trainer or evaluation holds it."""
    with (root / LOCK).open("w") as lock:
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
