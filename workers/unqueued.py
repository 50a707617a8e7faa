"""The parts that commands without a queue share: claims without leases, tasks by id, retries, files for results, exit statuses.
workers.verify, workers.grade, workers.leaks, workers.play and workers.episodes use it.
"""

import argparse
import asyncio
import errno
import os
import secrets
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from pipeline.commandline import MISUSE
from pipeline.errors import ImageMissing, RolloutError, SandboxError, describe_error
from pipeline.request import Claim, Limits, RolloutRequest, Sampling
from pipeline.task import Task
from pipeline.taskfile import as_verified, read_tasks, read_verified, standing, verified_path
from workers.sandbox.protocol import Misconfigured, Sandboxes

DEFAULT_AGENT = Path(__file__).parent / "agent" / "prompts" / "default.yaml"
"""The agent file of a command that is given none."""


def unqueued_claim(
    task: Task, *, command: str, limits: Limits | None = None, agent_config: str = ""
) -> Claim:
    """A claim of `task` for `command`, whose name is in the labels of its containers."""
    now = time.time()
    request = RolloutRequest(
        id=f"{command}-{secrets.token_hex(8)}",
        run_id=command,
        purpose="eval",
        task=task,
        group_id=command,
        member=0,
        group_size=1,
        version_at_enqueue=0,
        sampling=Sampling(),
        limits=limits or Limits(),
        agent_config=agent_config,
        tokenizer="",
        enqueued_at=now,
    )
    return Claim(request=request, attempt=1, worker=command, claimed_at=now)


NAMED_AT_MOST = 3  # number of ids in a sentence


def verified_tasks(path: Path) -> list[Task]:
    """The tasks of the file, each with the results of its verification. Raises ValueError or OSError."""
    verified = verified_path(path)
    known = read_verified(verified) if verified.exists() else {}
    return [as_verified(task, standing(known, task)) for task in read_tasks(path)]


class TaskIndex:
    """Tasks by id. The source's prefix of an id may be omitted if the rest names only one task."""

    def __init__(self, path: Path, tasks: Iterable[Task]) -> None:
        """The tasks of the task file `path`."""
        self._path = path
        self._by_id = {task.id: task for task in tasks}
        self._by_instance: dict[str, list[Task]] = defaultdict(list)
        for task in self._by_id.values():
            self._by_instance[task.id.partition(":")[2]].append(task)

    def find(self, given: str) -> Task | None:
        """The task; None if there is no such task. Raises ValueError if there are several."""
        if given in self._by_id:
            return self._by_id[given]
        found = self._by_instance.get(given, []) if given else []
        if len(found) > 1:
            names = ", ".join(task.id for task in found[:NAMED_AT_MOST])
            raise ValueError(f"{given!r} names several tasks in {self._path}: give one of {names}")
        return found[0] if found else None

    def require(self, given: Collection[str], *, where: str) -> list[Task]:
        """The task of each id. Raises ValueError naming the unknown ones."""
        found = {one: self.find(one) for one in given}
        unknown = [one for one, task in found.items() if task is None]
        if unknown:
            raise ValueError(f"{where}: {_few(unknown)}: no such task in {self._path}; {self._hint()}")
        return [task for task in found.values() if task is not None]

    def _hint(self) -> str:
        first = next(iter(self._by_id), None)
        return f"its ids look like {first!r}" if first else "it holds no task"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"{', '.join(map(repr, names[:NAMED_AT_MOST]))}{more}"


RETRY_PAUSES_S = (1.0, 4.0)  # pauses before the second and the third try

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Broken:
    """The reason why something could not be done; never a verdict."""

    why: str


async def tried(work: Callable[[], Awaitable[T]], task: Task, *, image_fix: str) -> T | Broken:
    """The result of `work` on `task`, or the failure that remained after all retries. `image_fix` says what to do about an image that is
    not on this host.
    """
    for pause_s in (*RETRY_PAUSES_S, None):
        try:
            return await work()
        except ImageMissing:
            return Broken(f"no image {task.image} on this host: {image_fix}")
        except RolloutError as error:
            if pause_s is None or not error.transient:
                return Broken(str(error))
            await asyncio.sleep(pause_s)
    raise AssertionError("the last try returns")


class Unwritable(ValueError):
    """Results cannot be written to an option's path; the message names both."""


@contextmanager
def writing(option: str, path: Path) -> Generator[None]:
    """Raises Unwritable if the file operations in the block fail."""
    try:
        yield
    except OSError as error:
        raise Unwritable(f"{option}: {path} cannot be written: {error.strerror}") from error


def must_be_writable(path: Path, option: str) -> None:
    """Raises Unwritable if the file could not be written later. Writes nothing."""
    with writing(option, path):
        if not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
        elif path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@dataclass(frozen=True, slots=True)
class LogDirectory:
    """The directory of `--logs` for whole logs; None: logs are not stored."""

    path: Path | None

    def check(self) -> None:
        """Makes the directory. Raises Unwritable if it cannot store logs."""
        if self.path:
            with writing("--logs", self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.path).close()

    def write(self, task_id: str, name: str, log: str) -> None:
        """Writes LOGS/TASK/`name`; nothing if the log is empty. Raises Unwritable."""
        if self.path is None or not log:
            return
        file = self.path / _directory_of(task_id) / name
        with writing("--logs", file):
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(log.encode("utf-8", "surrogateescape"))


def _directory_of(task_id: str) -> str:
    """The task's directory within LOGS: its id in plain characters, which cannot lead out of LOGS."""
    name = quote(task_id, safe=":+@,= ")
    return name.replace(".", "%2E") if name in (".", "..") else name


async def side_by_side(items: Sequence[T], work: Callable[[T], Awaitable[None]], *, num_jobs: int) -> None:
    """Runs `work` on each of `items`, `num_jobs` at a time, in order. Raises Unwritable, which ends all of it."""
    waiting = iter(items)

    async def work_off(waiting: Iterator[T]) -> None:
        for item in waiting:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(min(num_jobs, len(items))):
                group.create_task(work_off(waiting), name=f"job {number}")
    except* Unwritable as unwritable:
        raise unwritable.exceptions[0] from None


@asynccontextmanager
async def session(sandboxes: Sandboxes) -> AsyncGenerator[str]:
    """Yields the reason why no sandbox can be opened on this machine, "" if one can. Closes `sandboxes` at its end.

    SIGTERM and SIGHUP cancel the task in the block. Raises Misconfigured.
    """
    running = asyncio.current_task()
    assert running is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        yield await _outage(sandboxes)
    finally:
        await sandboxes.close()


async def _outage(sandboxes: Sandboxes) -> str:
    try:
        await sandboxes.check()
    except Misconfigured:
        raise
    except SandboxError as error:
        return f"no Docker host answers ({error}): start Docker, or set DOCKER_HOST"
    return ""


def add_grading_options(parser: argparse.ArgumentParser, *, items: str) -> None:
    """Adds --jobs, the number of `items` at once, --cpu-s and --wall-s."""
    cores, limits = len(os.sched_getaffinity(0)), Limits()
    parser.add_argument(
        "--jobs", type=int, default=cores, metavar="N", help=f"{items} at once; default: cores"
    )
    parser.add_argument(
        "--cpu-s",
        type=float,
        default=limits.grade_cpu_s,
        help="CPU time of one test run; default: %(default)s",
    )
    parser.add_argument(
        "--wall-s",
        type=float,
        default=limits.grade_wall_s,
        help="wall time of one test run; default: %(default)s",
    )


def limits_of(options: argparse.Namespace) -> Limits:
    """The limits of a test run from the options. Raises ValueError for options that allow no work."""
    if options.jobs < 1 or min(options.cpu_s, options.wall_s) <= 0:
        raise ValueError("--jobs must be 1 or more, --cpu-s and --wall-s above 0")
    return Limits(grade_cpu_s=options.cpu_s, grade_wall_s=options.wall_s)


def exit_status(
    work: Callable[[], int], *, kept_if_stopped: Callable[[], str], kept_if_unwritable: Callable[[], str]
) -> int:
    """The exit status of `work`, or of the event that ends it: a signal, Misconfigured or Unwritable. The last two arguments name the files
    with the results so far, "" if there are none.
    """
    try:
        return work()
    except KeyboardInterrupt:
        return _stopped(signal.SIGINT, kept_if_stopped())
    except asyncio.CancelledError:
        return _stopped(signal.SIGTERM, kept_if_stopped())
    except Misconfigured as error:
        return misuse(error)
    except Unwritable as error:
        return misuse(error, kept_if_unwritable())


def misuse(error: Exception, kept: str = "") -> int:
    """Prints in one line what is wrong, and returns the exit status of misuse."""
    print(f"error: {_with(describe_error(error), kept)}", file=sys.stderr)
    return MISUSE


def _stopped(number: signal.Signals, kept: str) -> int:
    print(_with(f"{number.name}: stopped", kept), file=sys.stderr)
    return 128 + number


def _with(line: str, kept: str) -> str:
    return f"{line}; {kept}" if kept else line
