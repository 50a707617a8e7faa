"""`python -m workers.verify TASKS.jsonl`: are these tasks what they say, in the eyes of the grader that will judge training?

Each task is graded in four states by the production grader, in real containers: an empty patch, a useless one and the hidden
tests alone must be worth 0, the known solution (from TASKS.gold.jsonl) 1, in every repeat. Needs a Docker engine and the
tasks' images; no Redis, no engine of a policy, no GPU. Writes TASKS.verified.jsonl, which the trainer asks for.

Exit status: 0 every task is ok; 1 some are not, with the reason; 2 misuse, or results that cannot be written; 130 after Ctrl-C.
What was verified until then is kept.
"""

import argparse
import asyncio
import errno
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeline.errors import SandboxError
from pipeline.request import Limits
from pipeline.task import Task
from pipeline.taskfile import (
    Found,
    Gold,
    State,
    Verification,
    fingerprint,
    gold_path,
    read_gold,
    read_tasks,
    read_verified,
    verified_path,
    write_gold,
    write_tasks,
    write_verified,
)
from workers.docker.host import DockerHost
from workers.settings import docker_host

if TYPE_CHECKING:
    from workers.sandbox.docker import DockerSandboxes
    from workers.verify.display import Display
    from workers.verify.states import Prober


class Unwritable(ValueError):
    """Results cannot be put where an option wants them; names both."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One element of --json's list."""

    task: str
    states: dict[State, Found]
    ok: bool
    reason: str
    verdict_kind: str
    seconds: float


@dataclass(slots=True)
class Book:
    """The verifications of a task file, on disk after every change."""

    path: Path
    entries: dict[str, Verification] = field(default_factory=dict[str, Verification])

    def stands(self, task: Task) -> bool:
        """Whether `task`, as it is now, was found to be ok."""
        entry = self.entries.get(task.id)
        return entry is not None and entry.ok and entry.fingerprint == fingerprint(task)

    def enter(self, new: Verification) -> None:
        """What broke says nothing of a task: it does not displace an earlier verdict on the same version of it.

        Raises Unwritable; what was written before stays.
        """
        old = self.entries.get(new.task)
        if old is not None and old.fingerprint == new.fingerprint and _is_broken(new) and not _is_broken(old):
            return
        self.entries[new.task] = new
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with _writing("TASKS.jsonl", self.path):
                write_verified(partial, self.entries.values())
                partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)


def _is_broken(verification: Verification) -> bool:
    return "infrastructure" in verification.states.values()


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be verified."""

    tasks: list[Task]
    golds: dict[str, Gold]
    book: Book


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        work, host = _read(options), docker_host()
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return _account(work, asyncio.run(_verify(work, options, host)), options)
    except KeyboardInterrupt:
        return _stopped(work, signal.SIGINT)
    except asyncio.CancelledError:
        return _stopped(work, signal.SIGTERM)
    except Unwritable as error:
        print(f"error: {error}; {work.book.path} has what was verified", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workers.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tasks", type=Path, metavar="TASKS.jsonl")
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="grade each state N times, for flakiness"
    )
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="also write the results there, as one JSON list"
    )
    parser.add_argument("--only", default="", metavar="ID[,ID...]", help="these tasks alone")
    parser.add_argument(
        "--new", action="store_true", help="leave out tasks that were verified as they are now"
    )
    parser.add_argument(
        "--passing",
        type=Path,
        metavar="OUT.jsonl",
        help="copy the tasks that are ok there, with their solutions",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="tasks at once; default: cores",
    )
    limits = Limits()
    parser.add_argument("--cpu-s", type=float, default=limits.grade_cpu_s, help="CPU time of one test run")
    parser.add_argument("--wall-s", type=float, default=limits.grade_wall_s, help="wall time of one test run")
    return parser


def _read(options: argparse.Namespace) -> Work:
    """Raises ValueError or OSError for what cannot be verified at all."""
    if min(options.repeat, options.jobs) < 1 or min(options.cpu_s, options.wall_s) <= 0:
        raise ValueError("--repeat and --jobs must be 1 or more, --cpu-s and --wall-s above 0")
    path: Path = options.tasks
    tasks = read_tasks(path)
    wanted = {one for one in options.only.split(",") if one}
    strangers = wanted - {task.id for task in tasks}
    if strangers:
        raise ValueError(f"--only: {path} holds no task {min(strangers)!r}")
    chosen = [task for task in tasks if not wanted or task.id in wanted]
    if not chosen:
        raise ValueError(f"{path} holds no task")
    golds, verified = gold_path(path), verified_path(path)
    _refuse_unwritable(options, verified)
    return Work(
        tasks=chosen,
        golds=read_gold(golds) if golds.exists() else {},
        book=Book(verified, read_verified(verified) if verified.exists() else {}),
    )


def _refuse_unwritable(options: argparse.Namespace, verified: Path) -> None:
    """Raises Unwritable for what could not be written once everything was graded. Writes nothing itself."""
    with _writing("TASKS.jsonl", verified):
        tempfile.TemporaryFile(dir=verified.parent).close()
    if options.json:
        _must_be_writable(options.json, "--json")
    if options.passing:
        for beside in (Path, gold_path, verified_path):
            _must_be_writable(beside(options.passing), "--passing")


def _must_be_writable(path: Path, option: str) -> None:
    with _writing(option, path):
        if not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
        elif path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _writing(option: str, path: Path) -> Generator[None]:
    """Raises Unwritable if what is done within cannot be done."""
    try:
        yield
    except OSError as error:
        raise Unwritable(f"{option}: {path} cannot be written: {error.strerror}") from error


async def _verify(work: Work, options: argparse.Namespace, host: DockerHost) -> list[Verification]:
    """The verifications in the order of the tasks, those that stand already included."""
    from workers.grading.grade import Grader
    from workers.sandbox.docker import DockerSandboxes
    from workers.verify.states import Prober

    running = asyncio.current_task()
    assert running is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    standing = [task for task in work.tasks if options.new and work.book.stands(task)]
    found = {task.id: work.book.entries[task.id] for task in standing}
    todo = [task for task in work.tasks if task.id not in found]
    if standing and todo:
        print(f"{len(standing)} tasks were verified before, as they are now")
    sandboxes = DockerSandboxes(fleet=f"verify-{os.getpid()}", host=host)
    try:
        prober = Prober(
            grader=Grader(sandboxes),
            limits=Limits(grade_cpu_s=options.cpu_s, grade_wall_s=options.wall_s),
            num_repeats=options.repeat,
            image_fix=f"`python -m workers.images pull {options.tasks}`, or `python -m workers.images build DIR`",
            outage=await _outage(sandboxes) if todo else "",
        )
        await _verify_all(todo, work, prober, found, num_jobs=options.jobs)
    finally:
        await sandboxes.close()
    return [found[task.id] for task in work.tasks]


async def _outage(sandboxes: "DockerSandboxes") -> str:
    """Why nothing can be graded on this machine; "" if something can."""
    try:
        await sandboxes.check()
    except SandboxError as error:
        return f"no Docker engine answers ({error}): start it, or set DOCKER_HOST"
    return ""


async def _verify_all(
    todo: list[Task], work: Work, prober: "Prober", found: dict[str, Verification], *, num_jobs: int
) -> None:
    from workers.verify.display import open_display

    if not todo:
        return
    waiting = iter(todo)
    with open_display(sys.stdout, [task.id for task in todo]) as display:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(num_jobs, len(todo))):
                    group.create_task(_work_off(waiting, work, prober, display, found))
        except* Unwritable as unwritable:
            raise unwritable.exceptions[0] from None


async def _work_off(
    waiting: Iterator[Task], work: Work, prober: "Prober", display: "Display", found: dict[str, Verification]
) -> None:
    from workers.verify.judging import evidence, verification

    for task in waiting:
        began_at = time.monotonic()
        tries = await prober.probe(
            task, work.golds.get(task.id), on_state=lambda state, task=task: display.begin(task.id, state)
        )
        done = verification(task, tries, seconds=time.monotonic() - began_at, verified_at=time.time())
        found[task.id] = done
        work.book.enter(done)
        display.finish(done, evidence(tries))


def _account(work: Work, found: list[Verification], options: argparse.Namespace) -> int:
    if options.json:
        lines = [msgspec.convert(one, Line, from_attributes=True) for one in found]
        with _writing("--json", options.json):
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(lines)))
    if options.passing:
        with _writing("--passing", options.passing):
            _write_passing(options.passing, work, found)
    num_wrong = sum(not one.ok for one in found)
    print(f"{len(found) - num_wrong} of {len(found)} tasks are ok; {work.book.path} says so of each")
    return 1 if num_wrong else 0


def _write_passing(path: Path, work: Work, found: list[Verification]) -> None:
    """The tasks that are ok, with what belongs to them, as a task file of its own."""
    passing = [(task, one) for task, one in zip(work.tasks, found, strict=True) if one.ok]
    write_tasks(path, [task for task, _ in passing])
    write_gold(gold_path(path), [work.golds[task.id] for task, _ in passing])
    write_verified(verified_path(path), [one for _, one in passing])


def _stopped(work: Work, number: signal.Signals) -> int:
    print(f"{number.name}: stopped; what was verified until now is in {work.book.path}", file=sys.stderr)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main())
