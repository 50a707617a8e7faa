"""`python -m workers.tasksets from-git REPO --out DIR`: makes verified tasks from the history of a Python repository.

Walks the commits of the line of first parents, newest first, and takes those that change code and tests. The change of the tests becomes
the hidden tests, the rest the known fix, and what people wrote about it the problem. Each gets an image, and is put before `workers.verify`
and `workers.leaks`; DIR/train.jsonl has what passes. DIR/candidates.jsonl says what became of each commit; the same command goes on where
a killed one ended. Exit status: 0 done; 1 some commits could not be tried because of the infrastructure; 2 misuse, with what to change.
"""

import argparse
import asyncio
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pipeline.agent.option import read_agent
from pipeline.request import Limits
from pipeline.screen import visible, visible_line
from pipeline.task import BEST_CONTROLS, ExitCode, Task
from pipeline.taskfile import (
    Gold,
    Verification,
    as_verified,
    gold_path,
    standing,
    verified_path,
    write_gold,
    write_tasks,
)
from workers.making.candidates import (
    IMAGE_FIX,
    CandidateBook,
    CommitCandidate,
    Settings,
    Stage,
    eval_script,
    funnel,
)
from workers.making.history import Commit, Fallen, Fix, GitError, History, Split, iso_date, split_of
from workers.making.problems import (
    Discussions,
    joined,
    names_in_code,
    problem_of,
    read_discussions,
)
from workers.sandbox.backend import command_sandboxes
from workers.sandbox.protocol import Sandboxes
from workers.unqueued import (
    DEFAULT_AGENT,
    LogDirectory,
    add_grading_options,
    exit_status,
    limits_of,
    side_by_side,
)
from workers.verify.book import Book, Outputs, is_broken

BOOK, TASKS, TRAIN, PROVENANCE, SCRATCH = (
    "candidates.jsonl",
    "tasks.jsonl",
    "train.jsonl",
    "provenance.jsonl",
    ".work",
)
DEFAULT_BASE = "swerve/task-base:1"
NUM_CONTROLS, NUM_PARTIAL_FIXES = 3, 20
_LICENCE = re.compile(r"(?:LICEN[CS]E|COPYING)[^/]*", re.IGNORECASE)


class TaskProvenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task is from: a line of provenance.jsonl."""

    task: str
    repository: str
    commit: str
    num_commits: int
    authored: str
    licence: str
    problem_source: str
    versions_before: str


def add_from_git_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "repository",
        type=Path,
        metavar="REPO",
        help="a clone of a Python repository; nothing is written to it",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="where tasks and their book go")
    add(
        "--branch",
        default="HEAD",
        metavar="NAME",
        help="the branch, tag or commit to begin at; default: HEAD",
    )
    add("--since", metavar="DATE", help="leave out commits before this date, such as 2024-05-31")
    add("--until", metavar="DATE", help="leave out commits after this date")
    add("--max-commits", type=int, metavar="N", help="look at the newest N of these commits")
    add("--only", metavar="SHA,...", help="look at these commits alone")
    add("--pulls", type=Path, metavar="FILE.jsonl", help="an export of pull requests and issues")
    add(
        "--max-files",
        type=int,
        default=20,
        metavar="N",
        help="most files that a commit may change; default: %(default)s",
    )
    add(
        "--min-words",
        type=int,
        default=8,
        metavar="N",
        help="fewest words of a problem; default: %(default)s",
    )
    add(
        "--base",
        default=DEFAULT_BASE,
        metavar="IMAGE",
        help="an image with git and python3; default: %(default)s",
    )
    help_ = "install this package too, such as 'numpy<2'; may be repeated"
    add("--requires", action="append", default=[], metavar="REQUIREMENT", help=help_)
    help_ = "packages in versions as of the commit's month, if pip and the package index can tell; the book says if they did"
    add("--pip-before-date", action="store_true", help=help_)
    add("--repeat", type=int, default=3, metavar="N", help="verify each task N times; default: %(default)s")
    help_ = "keep tasks of which a control can say this or more; default: %(default)s"
    add("--min-control", choices=BEST_CONTROLS, default="confirmed", help=help_)
    help_ = "measure how strong the tests are, and keep tasks whose weakness may be W or less"
    add("--max-weakness", type=float, metavar="W", help=help_)
    add("--report", action="store_true", help="print the funnel of DIR and do nothing else")
    add_grading_options(parser, items="commits tried")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Makes the tasks, or reports on them, and returns the exit status. Raises ValueError, OSError."""
    out: Path = options.out
    if options.report:
        if not (out / BOOK).exists():
            raise ValueError(f"--out: {out / BOOK} does not exist: make tasks first, without --report")
        print(visible("\n".join(funnel(CandidateBook.read(out / BOOK)))))
        return 0
    limits, settings = _checked(options)
    out.mkdir(parents=True, exist_ok=True)
    book = CandidateBook.open(out / BOOK, settings)
    shutil.rmtree(out / SCRATCH, ignore_errors=True)
    (out / SCRATCH).mkdir()
    try:
        history = History(options.repository, out / SCRATCH / "history.git")
        maker = Maker(options, out, book, history, limits)
        return exit_status(
            maker.make,
            kept_if_stopped=lambda: f"the same command goes on; {book.path} has what was found until now",
            kept_if_unwritable=lambda: f"{book.path} has what was found",
        )
    finally:
        book.close()
        shutil.rmtree(out / SCRATCH, ignore_errors=True)


def _checked(options: argparse.Namespace) -> tuple[Limits, Settings]:
    """The limits of test runs and what the book is made with. Raises ValueError naming an option."""
    limits = limits_of(options)
    for name in ("max_files", "min_words", "repeat", "max_commits"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, is {value}")
    if options.max_weakness is not None and not 0 <= options.max_weakness <= 1:
        raise ValueError(f"--max-weakness must be between 0 and 1, is {options.max_weakness}")
    for name in ("since", "until"):
        if value := getattr(options, name):
            setattr(options, name, iso_date(value, f"--{name}"))
    names = (
        "base",
        "max_files",
        "min_words",
        "repeat",
        "min_control",
        "max_weakness",
        "pip_before_date",
        "requires",
    )
    kept = {f"--{name.replace('_', '-')}": str(getattr(options, name)) for name in names}
    kept["--pulls"] = hashlib.sha256(options.pulls.read_bytes()).hexdigest() if options.pulls else ""
    return limits, Settings(repository=str(options.repository.resolve()), options=kept)


@dataclass(slots=True)
class Maker:
    """Takes the commits of one repository through all stages."""

    options: argparse.Namespace
    out: Path
    book: CandidateBook
    history: History
    limits: Limits

    def make(self) -> int:
        self._walk()
        if todo := self._to_do("problem", "problem"):
            asyncio.run(self._build_all(todo))
        if self.book.at("built"):
            self._gate()
        self._write_kept()
        print(visible("\n".join(funnel(self.book))))
        return int(any(one.outcome == "failed" for one in self.book.candidates.values()))

    def _to_do(self, least: Stage, most: Stage | None = None) -> list[CommitCandidate]:
        """The candidates that have passed `least` and not yet another stage than `most`, and are still open."""
        found = [one for one in self.book.at(least) if one.outcome in ("open", "failed")]
        return [one for one in found if most is None or one.stage == most]

    def _walk(self) -> None:
        """Enters every commit that is not in the book yet."""
        discussions = read_discussions(self.options.pulls) if self.options.pulls else Discussions()
        for fix in joined(self._commits(), discussions):
            if fix.head.sha in self.book.candidates:
                continue
            began_at = time.monotonic()
            one = self._candidate(fix, discussions)
            self.book.enter(replace(one, seconds=round(time.monotonic() - began_at, 3)))
        found = len(self.book.at("problem"))
        print(
            f"{len(self.book.candidates)} commits seen, {found} may become tasks", file=sys.stderr, flush=True
        )

    def _commits(self) -> tuple[Commit, ...]:
        """The commits that the options choose. Raises GitError naming the option."""
        options = self.options
        if options.only:
            shas = [
                self.history.resolved(name.strip(), "--only")
                for name in options.only.split(",")
                if name.strip()
            ]
            return tuple(next(self.history.commits(sha, "-1")) for sha in shas)
        head = self.history.resolved(options.branch, "--branch")
        words = [f"--{name}={value}" for name in ("since", "until") if (value := getattr(options, name))]
        words += [f"--max-count={options.max_commits}"] if options.max_commits else []
        return tuple(self.history.commits(head, *words))

    def _candidate(self, fix: Fix, discussions: Discussions) -> CommitCandidate:
        """The fix with its problem, or with the reason why it becomes no task."""
        one = CommitCandidate(
            sha=fix.head.sha,
            stage="seen",
            outcome="fallen",
            num_commits=len(fix.commits),
            authored=fix.head.authored,
            base=fix.base,
        )
        try:
            split = split_of(self.history, fix, max_files=self.options.max_files)
            one = replace(one, stage="candidate")
            is_given_away = self._given_away(fix, split)
            problem = problem_of(
                fix, discussions, split.fix, is_given_away, least_words=self.options.min_words
            )
        except Fallen as fallen:
            return replace(one, reason=fallen.reason, detail=fallen.detail)
        except GitError as error:
            return replace(one, reason="cannot be read", detail=str(error))
        name = self.history.repository.resolve().name
        task = Task(
            id=f"git:{name}-{fix.head.sha[:12]}",
            repo=self.history.origin or name,
            base_commit="",
            image="",
            workdir="",
            problem=problem.text,
            verdict=ExitCode(
                eval_script=eval_script(split.modules),
                test_patch=split.tests.encode(),
                protected_paths=split.test_paths,
            ),
        )
        return replace(
            one,
            stage="problem",
            outcome="open",
            problem_source=problem.source,
            problem_removed=problem.removed,
            modules=split.modules,
            licence=next((path for path in self.history.files(fix.head.sha) if _LICENCE.fullmatch(path)), ""),
            task=task,
            gold=Gold(id=task.id, patch=split.fix, test_patch=split.tests),
        )

    def _given_away(self, fix: Fix, split: Split) -> Callable[[str], bool]:
        """A function that says whether a name is new in the fix, and known neither to the base nor to the hidden tests."""
        old: set[str] = set()
        new: set[str] = set()
        for change in self.history.changes(fix.base, fix.head.sha):
            if (
                change.path.endswith(b".py")
                and change.path.decode("utf-8", "replace") not in split.test_paths
            ):
                old |= names_in_code(self.history.blob(change.old))
                new |= names_in_code(self.history.blob(change.new))
        only_new = new - old - set(re.findall(r"\w+", split.tests))
        return lambda name: name in only_new and not self.history.contains(fix.base, name)

    async def _build_all(self, todo: Sequence[CommitCandidate]) -> None:
        """Builds an image for each candidate, and runs its tests with and without the known fix."""
        from workers.making.environments import Environments, probed_base
        from workers.making.probing import CandidateProber

        sandboxes = command_sandboxes(fleet=f"from-git-{os.getpid()}")
        began_at, num_done = time.monotonic(), 0
        name = (
            re.sub(r"[^a-z0-9]+", "-", self.history.repository.resolve().name.lower()).strip("-")
            or "repository"
        )
        try:
            environments = Environments(
                self.history,
                await probed_base(self.options.base, sandboxes),
                name,
                self.out / SCRATCH,
                before_date=self.options.pip_before_date,
                requires=tuple(self.options.requires),
            )
            prober = CandidateProber(environments, sandboxes, self.limits)

            async def build(one: CommitCandidate) -> None:
                nonlocal num_done
                since = time.monotonic()
                done = await prober.built(one)
                self.book.enter(replace(done, seconds=round(time.monotonic() - since, 2)))
                num_done += 1
                left_s = (time.monotonic() - began_at) / num_done * (len(todo) - num_done)
                said = done.reason or "built"
                print(
                    visible_line(
                        f"{num_done} of {len(todo)}  {one.sha[:12]}  {said}; about {left_s / 60:.0f} min left"
                    ),
                    file=sys.stderr,
                    flush=True,
                )

            await side_by_side(todo, build, num_jobs=self.options.jobs)
        finally:
            await sandboxes.close()

    def _gate(self) -> None:
        """Verifies what is built, looks for leaks, and enters what each candidate has passed."""
        from workers.verify.run import verify

        built = [one for one in self.book.at("built") if one.task and one.gold]
        tasks = [one.task for one in built if one.task]
        golds = {one.gold.id: one.gold for one in built if one.gold}
        _replace(self.out / TASKS, lambda path: write_tasks(path, tasks))
        _replace(gold_path(self.out / TASKS), lambda path: write_gold(path, golds.values()))
        verified, measured = Book.beside(self.out / TASKS), self.options.max_weakness is not None
        todo = self._to_do("built")
        unknown = [
            one.task for one in todo if one.task and not _is_known(verified, one.task, measured=measured)
        ]
        if unknown:
            asyncio.run(
                verify(
                    unknown,
                    golds,
                    verified,
                    Outputs(None, None, "none", LogDirectory(None)),
                    sandboxes=command_sandboxes(fleet=f"from-git-{os.getpid()}"),
                    limits=self.limits,
                    num_repeats=self.options.repeat,
                    num_jobs=self.options.jobs,
                    num_controls=NUM_CONTROLS,
                    num_partial_fixes=NUM_PARTIAL_FIXES if measured else 0,
                    image_fix=IMAGE_FIX,
                    agent_config=read_agent([str(DEFAULT_AGENT)]),
                )
            )
        asyncio.run(self._judge_all(todo, verified))

    async def _judge_all(self, todo: Sequence[CommitCandidate], verified: Book) -> None:
        from workers.leaks.__main__ import look

        sandboxes: Sandboxes = command_sandboxes(fleet=f"from-git-{os.getpid()}")

        async def judge(one: CommitCandidate) -> None:
            task = one.task
            assert task is not None
            known = standing(verified.entries, task)
            one = replace(one, stage="built", outcome="open", reason="", detail="")
            one = self._judged(replace(one, seconds=known.seconds if known else 0.0), known)
            if one.outcome == "open":
                finding = await look(sandboxes, as_verified(task, known), one.gold)
                if finding.failure:
                    one = replace(
                        one,
                        outcome="failed",
                        reason="could not be searched for leaks",
                        detail=finding.failure,
                    )
                elif finding.leaks:
                    one = replace(
                        one, outcome="fallen", reason="leaks the answer", detail="; ".join(finding.leaks)
                    )
                else:
                    one = self._weighed(replace(one, stage="no leaks"), known)
            self.book.enter(one)

        try:
            await side_by_side(todo, judge, num_jobs=self.options.jobs)
        finally:
            await sandboxes.close()

    def _judged(self, one: CommitCandidate, known: Verification | None) -> CommitCandidate:
        """The candidate as far as its verification takes it."""
        if known is None or is_broken(known):
            return replace(
                one, outcome="failed", reason="could not be verified", detail=known.reason if known else ""
            )
        if not known.ok:
            passing = [state for state in ("empty", "useless", "tests_only") if known.states.get(state) == 1]
            reason = "tests pass without the fix" if passing else "is not ok"
            reason = "the known fix gets no reward" if known.states.get("gold") == 0 else reason
            return replace(one, outcome="fallen", reason=reason, detail=known.reason)
        one = replace(one, stage="verified")
        if BEST_CONTROLS.index(known.control) < BEST_CONTROLS.index(self.options.min_control):
            reason = f"a control says {known.control} at best"
            return replace(
                one, outcome="fallen", reason=reason, detail=f"--min-control {self.options.min_control}"
            )
        return replace(one, stage="controlled")

    def _weighed(self, one: CommitCandidate, known: Verification | None) -> CommitCandidate:
        """The candidate with its end: kept, unless its tests are shown to be weak."""
        most = self.options.max_weakness
        if most is not None and known and known.weakness_interval and known.weakness_interval[0] > most:
            detail = f"{known.weakness:.2f}, --max-weakness {most}"
            return replace(one, outcome="fallen", reason="tests are weak", detail=detail)
        return replace(one, stage="strong", outcome="kept")

    def _write_kept(self) -> None:
        """Writes train.jsonl with what belongs to it, and where each task is from."""
        kept = [one for one in self.book.candidates.values() if one.outcome == "kept"]
        tasks = [one.task for one in kept if one.task]
        if not tasks:
            return
        golds: Mapping[str, Gold] = {one.gold.id: one.gold for one in kept if one.gold}
        entries = Book.beside(self.out / TASKS).entries
        if lost := [task.id for task in tasks if task.id not in entries]:
            path = verified_path(self.out / TASKS)
            raise ValueError(
                f"--out: {path} has no longer {lost[0]}: put it back, or choose another directory"
            )
        partial, train = self.out / SCRATCH / TRAIN, self.out / TRAIN
        outputs = Outputs(None, partial, "none", LogDirectory(None))
        outputs.write_passing(tasks, golds, [entries[task.id] for task in tasks])
        for beside in (gold_path, verified_path, Path):
            beside(partial).replace(beside(train))
        lines = [
            TaskProvenance(
                task=one.task.id,
                repository=self.history.origin or str(self.history.repository.resolve()),
                commit=one.sha,
                num_commits=one.num_commits,
                authored=one.authored,
                licence=one.licence,
                problem_source=one.problem_source,
                versions_before=one.versions_before,
            )
            for one in kept
            if one.task
        ]
        _replace(
            self.out / PROVENANCE, lambda path: path.write_bytes(msgspec.json.Encoder().encode_lines(lines))
        )


def _is_known(book: Book, task: Task, *, measured: bool) -> bool:
    """Whether there is a verdict on the task as it is now."""
    entry = standing(book.entries, task)
    if entry is None or is_broken(entry):
        return False
    return not (measured and entry.ok and entry.strength is None)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file so that at any moment the old or the new one is there."""
    partial = path.with_name(f".{path.name}")
    write(partial)
    partial.replace(path)
