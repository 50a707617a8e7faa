"""The directory of a run: its identity, the lock that keeps two trainers from working in it at once, and the state of the run."""

import contextlib
import fcntl
import os
import shlex
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from pipeline.journal.reading import JOURNAL, LAUNCHES, RECIPE, RUN_FILE, Launch, RunFile, read
from pipeline.journal.rows import EndReason, EndRow, ImitationStepRow, PublicationRow, StartRow, StepRow

LOCK = "lock"
RESERVE = f"{JOURNAL}/reserve"  # a file on the same disk as the journal

RESERVE_BYTES = 1024**2
"""Much more than the size of the records of a run's end."""

_LOCK_TRIES = 5
_LOCK_PAUSE_S = 0.05


State = Literal[EndReason, "running", "crashed"]


class RecordedState(msgspec.Struct, frozen=True, kw_only=True):
    state: State
    sentence: str  # the text to show


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run, as an absolute path."""

    root: Path
    run_id: str
    # Digests of the training tasks with which the run began, by the recipe's key of their file
    tasks: Mapping[str, str]


def create(
    root: Path, run_id: str, recipe: str, *, kind: str = "rl", tasks: Mapping[str, str] | None = None
) -> RunDirectory:
    """Make `root` the directory of a new run with a recipe of this kind. Raises ValueError where it cannot be written.

    `tasks` are digests of the training tasks, by the recipe's key of their file.
    """
    with writable(root):
        root.mkdir(parents=True, exist_ok=True)
        (root / RECIPE).write_text(recipe)
        run = RunFile(run_id=run_id, started_at=time.time(), kind=kind, tasks=dict(tasks or {}))
        (root / RUN_FILE).write_bytes(msgspec.json.encode(run))
    return RunDirectory(root.resolve(), run_id, run.tasks)


def find(root: Path) -> RunDirectory:
    """The directory of a run that was started before. Raises ValueError if it is not such a directory."""
    if not root.exists():
        raise ValueError(
            f"{root}: there is no such directory; give that of the run to resume, or start it without --resume"
        )
    try:
        run = msgspec.json.decode((root / RUN_FILE).read_bytes(), type=RunFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{root} holds no run to resume ({error}); start it without --resume") from error
    return RunDirectory(root.resolve(), run.run_id, run.tasks)


def record_launch(
    root: Path, command: Sequence[str], *, set_keys: Sequence[str], changed: Sequence[str]
) -> None:
    """Adds this process to those that worked on the run. Raises ValueError where it cannot be written."""
    launch = Launch(
        at=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        command=shlex.join(command),
        directory=str(Path.cwd()),
        set=tuple(set_keys),
        changed=tuple(changed),
    )
    with writable(root), (root / LAUNCHES).open("ab") as file:
        file.write(msgspec.json.encode(launch) + b"\n")


@contextlib.contextmanager
def writable(root: Path) -> Iterator[None]:
    """Turns an OSError of the block, which writes into `root`, into a ValueError with the fix."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--run-dir {root} cannot be written ({error.strerror}: {error.filename or root}); make room or correct its "
            "permissions, or choose another directory"
        ) from error


@contextlib.contextmanager
def removed_if_refused(root: Path) -> Iterator[None]:
    """Removes what the block wrote into `root` if the block ends with ValueError before the run has published weights or begun to train."""
    before = set(root.iterdir()) if root.is_dir() else None
    try:
        yield
    except ValueError:
        has_begun = any(read(root / JOURNAL, PublicationRow)) or any(read(root / JOURNAL, StartRow))
        # A directory in which another trainer works is left alone.
        if root.is_dir() and not has_begun and not is_locked(root):
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


@contextlib.contextmanager
def space_set_aside(root: Path) -> Iterator[None]:
    """Reserve disk space with a file during the block, so that a run that fills its disk can free it and record how it ended.

    Raises ValueError where there is no space.
    """
    try:
        with writable(root):
            (root / RESERVE).parent.mkdir(exist_ok=True)
            # Zeros would take no space where files are compressed.
            (root / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))
        yield
    finally:
        free_space(root)


def free_space(root: Path) -> None:
    """Delete the file of `space_set_aside`, if it still exists."""
    (root / RESERVE).unlink(missing_ok=True)


def is_locked(root: Path) -> bool:
    """Whether a trainer or an evaluation works in the directory at the moment."""
    with contextlib.suppress(FileNotFoundError), (root / LOCK).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_state(
    run_dir: Path, steps: Iterable[StepRow | ImitationStepRow], endings: Sequence[EndRow]
) -> RecordedState:
    """The state of the run in `run_dir`, whose journal holds `steps` and `endings`.

    A trainer that was killed leaves no EndRow, and the operating system releases its lock.
    """
    last_step = max((row.step for row in steps), default=0)
    newest = endings[-1] if endings and endings[-1].step >= last_step else None
    if newest is not None and newest.is_complete:
        return RecordedState(state=_reason(newest), sentence=newest.detail or newest.reason)
    if is_locked(run_dir):
        return RecordedState(state="running", sentence="still running")
    if newest is not None:
        how = newest.detail or f"{newest.reason} at step {newest.step}"
        return RecordedState(state=_reason(newest), sentence=f"{how}; {_resume_hint(run_dir)}")
    how = f"crashed after step {last_step}: its trainer is gone and recorded no ending"
    return RecordedState(state="crashed", sentence=f"{how}; {_resume_hint(run_dir)}")


def _remove_all_but(kept: set[Path] | None, root: Path) -> None:
    """Removes `root`, or only the new entries in it if it existed before."""
    if kept is None:
        shutil.rmtree(root)
        return
    for path in set(root.iterdir()) - kept:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _reason(row: EndRow) -> EndReason:
    return msgspec.convert(row.reason, EndReason)


def _resume_hint(run_dir: Path) -> str:
    recipe = run_dir / RECIPE
    named = str(recipe) if recipe.exists() else "RECIPE.toml"
    return f"resume with `python -m trainer.run {named} --run-dir {run_dir} --resume`"
