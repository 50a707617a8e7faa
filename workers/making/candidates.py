"""The book of what became of each candidate, a commit or a planted bug, and the funnel that it makes.

One JSON line is appended for each stage that a candidate reaches, and the last one counts. A line that a killed process left incomplete is
dropped, so the same command goes on where it ended. Only one process at a time may have the book.
"""

import fcntl
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import msgspec

from pipeline.screen import visible_line
from pipeline.task import Task
from pipeline.taskfile import Gold

Stage = Literal["seen", "candidate", "problem", "built", "verified", "controlled", "no leaks", "strong"]
STAGES: tuple[Stage, ...] = get_args(Stage)
STAGE_LABELS: Mapping[Stage, str] = {
    "problem": "have a problem",
    "built": "built and run",
    "verified": "verified",
    "controlled": "controls say enough",
    "no leaks": "do not leak",
    "strong": "strong enough",
}
EXAMPLE_CHARS = 12
IMAGE_FIX = "run the command with a new --out, which builds it again"


class TaskCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one commit, of the commits of one pull request, which the newest of them names, or of planted bugs.

    `stage` is the last stage that it passed. "open": the next stage is to come; "fallen": it did not pass the next stage, for `reason`;
    "failed": the infrastructure prevented a verdict, and the next run tries again; "kept": it is a task of train.jsonl.
    """

    sha: str  # hash of the newest commit, or of what planted bugs change
    stage: Stage
    outcome: Literal["open", "fallen", "failed", "kept"]
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0  # time that the last stage took
    num_commits: int = 1
    authored: str = ""  # ISO 8601
    base: str = ""
    problem_source: str = ""  # "issue 12", "pull request 3", "commit message"
    problem_removed: tuple[str, ...] = ()  # what was taken out of the problem, and why
    # What the hidden tests use of the code that only the fix brings, as the problem shows it
    interface: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()  # test modules that the eval script runs
    left_out_requirements: tuple[str, ...] = ()  # lines of the metadata that no package index can serve
    versions_before: str = ""  # the date that limits versions of packages, or why none does
    # Tests that do not pass in each run of the known fix, or not in each of the base.
    deselected: tuple[str, ...] = ()
    licence: str = ""  # path of the licence file at the commit
    task: Task | None = None
    gold: Gold | None = None
    commit: str = ""  # where bugs are planted
    bugs: tuple[str, ...] = ()  # kinds of planted bugs
    functions: tuple[str, ...] = ()  # functions that have them
    failing: tuple[str, ...] = ()  # tests that they make fail; or, for an author, that fail without the fix
    failures: str = ""  # what these print without the fix of a commit, cut
    author_saw: tuple[str, ...] = ()  # prompts of which a reply is used: for bugs, for the problem
    written: tuple[str, ...] = ()  # the function that an author wrote for each bug; "" for other kinds


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of the book: what decides which candidates become which tasks. Another run must have the same."""

    repository: str
    options: dict[str, str]


@dataclass(slots=True)
class CandidateBook:
    """The candidates by their hash, in the order in which the command found them."""

    path: Path
    candidates: dict[str, TaskCandidate] = field(default_factory=dict[str, TaskCandidate])
    _descriptor: int = -1

    @classmethod
    def open(cls, path: Path, settings: Settings) -> "CandidateBook":
        """The book at `path`, made if it is not there. Raises ValueError for another run's, for one in use and for a damaged one."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        book = cls(path, _descriptor=descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            os.ftruncate(descriptor, len(whole))
            if not whole:
                book._append(settings)
            book._read(whole, settings)
        except BlockingIOError as error:
            book.close()
            raise ValueError(
                f"--out: another command works on {path.parent}: wait for it, or choose another directory"
            ) from error
        except ValueError:
            book.close()
            raise
        return book

    @classmethod
    def read(cls, path: Path) -> "CandidateBook":
        """The book for a report, which changes nothing. Raises ValueError, OSError."""
        data, book = path.read_bytes(), cls(path)
        book._read(data[: data.rfind(b"\n") + 1], None)
        return book

    def _read(self, data: bytes, settings: Settings | None) -> None:
        for number, line in enumerate(data.split(b"\n")[:-1], 1):
            try:
                if number == 1:
                    _must_equal(msgspec.json.decode(line, type=Settings), settings, self.path)
                    continue
                one = msgspec.json.decode(line, type=TaskCandidate)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{self.path}:{number}: {error}: choose another --out") from error
            self._set(one)

    def enter(self, candidate: TaskCandidate) -> None:
        self._append(candidate)
        self._set(candidate)

    def _set(self, one: TaskCandidate) -> None:
        """A bug that is written and not yet tried has its place by when it is tried, whenever the author's reply came."""
        known = self.candidates.get(one.sha)
        if known and (known.stage, known.outcome) == ("seen", "open"):
            del self.candidates[one.sha]
        self.candidates[one.sha] = one

    def _append(self, line: TaskCandidate | Settings) -> None:
        left, num_bytes = msgspec.json.encode(line) + b"\n", os.fstat(self._descriptor).st_size
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
            os.fsync(self._descriptor)
        except OSError:
            # Another job's line must not come after a part of this one.
            os.ftruncate(self._descriptor, num_bytes)
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    @property
    def kept(self) -> list[TaskCandidate]:
        """The candidates that are tasks, in order."""
        return [one for one in self.candidates.values() if one.outcome == "kept"]

    @property
    def has_failures(self) -> bool:
        """Whether the infrastructure prevented a verdict on a candidate."""
        return any(one.outcome == "failed" for one in self.candidates.values())

    def at(self, stage: Stage) -> list[TaskCandidate]:
        """The candidates that have passed `stage` or a later one, in order."""
        least = STAGES.index(stage)
        return [one for one in self.candidates.values() if STAGES.index(one.stage) >= least]


def _must_equal(found: Settings, wanted: Settings | None, path: Path) -> None:
    if wanted is None or found == wanted:
        return
    if found.repository != wanted.repository:
        raise ValueError(f"--out: {path} is of {found.repository}: choose another directory")
    names = found.options.keys() | wanted.options.keys()
    name = min(one for one in names if found.options.get(one) != wanted.options.get(one))
    raise ValueError(
        f"{name}: {path} was made with {found.options.get(name) or 'none'}: give the same, or choose another --out"
    )


_REASON_OF = {"fallen": "", "failed": "to be tried again: ", "open": "not tried yet"}


def funnel(book: CandidateBook, labels: Mapping[Stage, str]) -> Iterator[str]:
    """The lines of the report: how many candidates passed each stage, and why the others fell, each reason with an example.

    `labels` are the command's own, of the first stages.
    """
    for number, stage in enumerate(STAGES):
        yield f"{len(book.at(stage)):>7}  {labels.get(stage) or STAGE_LABELS[stage]}"
        if number + 1 == len(STAGES):
            break
        reasons: dict[str, list[TaskCandidate]] = defaultdict(list)
        for one in book.candidates.values():
            if one.stage == stage and one.outcome != "kept":
                reasons[_REASON_OF[one.outcome] + one.reason].append(one)
        for reason, fallen in sorted(reasons.items(), key=lambda pair: (-len(pair[1]), pair[0])):
            detail = f": {fallen[0].detail[:100]}" if fallen[0].detail else ""
            yield visible_line(
                f"{-len(fallen):>11}  {reason} (such as {fallen[0].sha[:EXAMPLE_CHARS]}{detail})"
            )
    yield f"{len(book.kept):>7}  kept"
