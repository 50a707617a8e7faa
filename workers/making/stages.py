"""The stages of the tasks that a command makes of a repository, from the problem on: image, verification, controls, leaks, strength.

What the candidates are is up to the command: `from_git.py` takes them from the repository's history, `plant.py` plants bugs. Both have
the same book, options, gate and files. Every stage is entered in the book, so that the same command goes on where a killed one ended.
"""

import argparse
import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from pipeline.agent.option import read_agent
from pipeline.request import Limits
from pipeline.screen import visible, visible_line
from pipeline.task import BEST_CONTROLS
from pipeline.taskfile import (
    Gold,
    TaskProvenance,
    Verification,
    as_verified,
    gold_path,
    provenance_path,
    standing,
    verified_path,
    write_gold,
    write_provenance,
    write_tasks,
)
from workers.making.candidates import IMAGE_FIX, CandidateBook, Settings, Stage, TaskCandidate, funnel
from workers.making.history import History
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

if TYPE_CHECKING:
    from workers.making.author import Author
    from workers.making.ecosystems.ecosystem import BaseEnvironment, Ecosystem
    from workers.making.environments import Environments

BOOK, TASKS, TRAIN, SCRATCH = "candidates.jsonl", "tasks.jsonl", "train.jsonl", ".work"
NUM_CONTROLS, NUM_PARTIAL_FIXES = 3, 20
# Options that decide what becomes of a candidate, whatever it is made of.
DECIDING = (
    "base",
    "max_files",
    "repeat",
    "min_control",
    "max_weakness",
    "pip_before_date",
    "requires",
)
_LICENCE = re.compile(r"(?:LICEN[CS]E|COPYING)[^/]*", re.IGNORECASE)


def add_making_options(parser: argparse.ArgumentParser, *, items: str) -> None:
    """Adds REPO, --out and the options of environments, gate and grading. `items` are what is tried side by side."""
    add = parser.add_argument
    add(
        "repository",
        type=Path,
        metavar="REPO",
        help="a clone of a repository; nothing is written to it",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="where tasks and their book go")
    add(
        "--branch",
        default="HEAD",
        metavar="NAME",
        help="the branch, tag or commit to begin at; default: HEAD",
    )
    add(
        "--max-files",
        type=int,
        default=20,
        metavar="N",
        help="most files that a fix and its tests may change; default: %(default)s",
    )
    add(
        "--base",
        metavar="IMAGE",
        help="an image with git and what runs the tests; default: ours for the language",
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
    add_grading_options(parser, items=items)


def require_positive(options: argparse.Namespace, *names: str) -> None:
    """Raises ValueError naming the first of these options whose value is below 1."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, is {value}")


def settings_of(options: argparse.Namespace, **more: str) -> Settings:
    """What the book is made with: the deciding options and `more`, values by the names of options. Raises ValueError naming one."""
    require_positive(options, "repeat")
    if options.max_files < 2:
        raise ValueError(
            f"--max-files must be 2 or more, one for the fix and one for its tests, is {options.max_files}"
        )
    for name in ("requires", "pip_before_date"):
        if getattr(options, name) and options.language != "python":
            raise ValueError(f"--{name.replace('_', '-')} is for --language python only, leave it out")
    if options.requires:
        from workers.making.ecosystems.python import REQUIREMENT

        if odd := [one for one in options.requires if not REQUIREMENT.fullmatch(one)]:
            raise ValueError(f"--requires: {odd[0]!r} is no package of an index, such as 'numpy<2'")
    if options.max_weakness is not None and not 0 <= options.max_weakness <= 1:
        raise ValueError(f"--max-weakness must be between 0 and 1, is {options.max_weakness}")
    kept = {name: str(getattr(options, name)) for name in DECIDING} | more
    return Settings(
        repository=str(options.repository.resolve()),
        options={f"--{name.replace('_', '-')}": value for name, value in kept.items()},
    )


def run_stages(
    options: argparse.Namespace,
    labels: Mapping[Stage, str],
    settings: Callable[[], Settings],
    make: Callable[["Stages"], bool],
) -> int:
    """Makes the tasks in DIR, or reports on them, and returns the exit status. `make` finds candidates, takes them through the stages, and
    returns whether something is missing because the infrastructure failed.

    Raises ValueError, OSError.
    """
    out: Path = options.out
    if options.report:
        if not (out / BOOK).exists():
            raise ValueError(f"--out: {out / BOOK} does not exist: make tasks first, without --report")
        print(visible("\n".join(funnel(CandidateBook.read(out / BOOK), labels))))
        return 0
    from workers.making.ecosystems.ecosystem import ecosystem

    of_language = ecosystem(options.language)
    options.base = options.base or of_language.base_image
    limits, made_with = limits_of(options), settings()
    out.mkdir(parents=True, exist_ok=True)
    book = CandidateBook.open(out / BOOK, made_with)
    shutil.rmtree(out / SCRATCH, ignore_errors=True)
    (out / SCRATCH).mkdir()

    def work() -> int:
        stages = Stages(
            options,
            out,
            book,
            History(options.repository, out / SCRATCH / "history.git"),
            limits,
            of_language,
        )
        is_missing = make(stages)
        stages.write_kept()
        print(visible("\n".join(funnel(book, labels))))
        return int(is_missing)

    try:
        return exit_status(
            work,
            kept_if_stopped=lambda: f"the same command goes on; {book.path} has what was found until now",
            kept_if_unwritable=lambda: f"{book.path} has what was found",
        )
    finally:
        shutil.rmtree(out / SCRATCH, ignore_errors=True)
        book.close()  # last, because another command may then use the directory


class ProblemWriter(Protocol):
    """Writes problems of candidates whose hidden tests have run."""

    @property
    def author(self) -> "Author":
        """The author that writes them."""
        ...

    async def with_problem(self, one: TaskCandidate) -> TaskCandidate:
        """The candidate with a problem, built, or with the reason why it has none."""
        ...


@dataclass(slots=True)
class Stages:
    """Takes candidates of one repository through the stages."""

    options: argparse.Namespace
    out: Path
    book: CandidateBook
    history: History
    limits: Limits
    ecosystem: "Ecosystem"
    _base: "BaseEnvironment | None" = field(default=None, init=False)

    def licence(self, commit: str) -> str:
        """The path of the licence file at the commit; "" if there is none."""
        return next((path for path in self.history.files(commit) if _LICENCE.fullmatch(path)), "")

    def to_do(self, least: Stage, most: Stage | None = None) -> list[TaskCandidate]:
        """The candidates that have passed `least` and not yet another stage than `most`, and are still open."""
        found = [one for one in self.book.at(least) if one.outcome in ("open", "failed")]
        return [one for one in found if most is None or one.stage == most]

    @asynccontextmanager
    async def environments(self) -> "AsyncGenerator[tuple[Environments, Sandboxes]]":
        """What builds the images of the repository's tasks, and what opens containers of them."""
        from workers.making.environments import Environments, probed_base

        sandboxes, resolved = (
            command_sandboxes(fleet=f"making-{os.getpid()}"),
            self.history.repository.resolve(),
        )
        try:
            self._base = self._base or await probed_base(self.options.base, self.ecosystem, sandboxes)
            yield (
                Environments(
                    self.ecosystem,
                    self.history,
                    self._base,
                    re.sub(r"[^a-z0-9]+", "-", resolved.name.lower()).strip("-") or "repository",
                    self.out / SCRATCH,
                    before_date=self.options.pip_before_date,
                    requires=tuple(self.options.requires),
                ),
                sandboxes,
            )
        finally:
            await sandboxes.close()

    def build(self, todo: Sequence[TaskCandidate], writer: "ProblemWriter | None" = None) -> None:
        """Builds an image for each candidate, runs its tests with and without the known fix, and lets `writer` write its problem."""
        if todo:
            asyncio.run(self._build(todo, writer))

    async def _build(self, todo: Sequence[TaskCandidate], writer: "ProblemWriter | None") -> None:
        from workers.making.probing import CandidateProber

        began_at, num_done = time.monotonic(), 0
        async with (
            self.environments() as (environments, sandboxes),
            writer.author.opened() if writer else nullcontext(),
        ):
            prober = CandidateProber(environments, sandboxes, self.limits, keeps_failures=writer is not None)

            async def build(one: TaskCandidate) -> None:
                nonlocal num_done
                since = time.monotonic()
                done = one if one.task and one.task.image else await prober.built(one)
                if writer and done.task and done.task.image:
                    done = replace(done, stage="candidate", outcome="open", reason="", detail="")
                    self.book.enter(done)  # what the tests said is not asked for again
                    done = await writer.with_problem(done)
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

    def gate(self, todo: Sequence[TaskCandidate]) -> None:
        """Verifies those of `todo` that are built, looks for leaks, and enters what each has passed."""
        from workers.verify.run import verify

        built = [one for one in self.book.at("built") if one.task and one.gold]
        if not built:
            return
        tasks = [one.task for one in built if one.task]
        golds = {one.gold.id: one.gold for one in built if one.gold}
        replace_file(self.out / TASKS, lambda path: write_tasks(path, tasks))
        replace_file(gold_path(self.out / TASKS), lambda path: write_gold(path, golds.values()))
        verified, measured = Book.beside(self.out / TASKS), self.options.max_weakness is not None
        unknown = [
            one.task
            for one in todo
            if one.task and not self._is_known(standing(verified.entries, one.task), measured=measured)
        ]
        if unknown:
            asyncio.run(
                verify(
                    unknown,
                    golds,
                    verified,
                    Outputs(None, None, "none", LogDirectory(None)),
                    sandboxes=command_sandboxes(fleet=f"making-{os.getpid()}"),
                    limits=self.limits,
                    num_repeats=self.options.repeat,
                    num_jobs=self.options.jobs,
                    num_controls=NUM_CONTROLS,
                    num_partial_fixes=NUM_PARTIAL_FIXES if measured else 0,
                    image_fix=IMAGE_FIX,
                    agent_config=read_agent([str(DEFAULT_AGENT)]),
                    wanted_control=self.options.min_control,
                )
            )
        asyncio.run(self._judge_all(todo, verified))

    async def _judge_all(self, todo: Sequence[TaskCandidate], verified: Book) -> None:
        from workers.leaks.__main__ import look

        sandboxes: Sandboxes = command_sandboxes(fleet=f"making-{os.getpid()}")

        async def judge(one: TaskCandidate) -> None:
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

    def _judged(self, one: TaskCandidate, known: Verification | None) -> TaskCandidate:
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
        if not self._is_controlled(known):
            reason = f"a control says {known.control} at best"
            return replace(
                one, outcome="fallen", reason=reason, detail=f"--min-control {self.options.min_control}"
            )
        return replace(one, stage="controlled")

    def _is_controlled(self, known: Verification) -> bool:
        return BEST_CONTROLS.index(known.control) >= BEST_CONTROLS.index(self.options.min_control)

    def _is_known(self, entry: Verification | None, *, measured: bool) -> bool:
        """Whether a task need not be verified again."""
        if entry is None or is_broken(entry):
            return False
        return not (measured and entry.ok and self._is_controlled(entry) and entry.strength is None)

    def _weighed(self, one: TaskCandidate, known: Verification | None) -> TaskCandidate:
        """The candidate with its end: kept, unless its tests are shown to be weak."""
        most = self.options.max_weakness
        if most is not None and known and known.weakness_interval and known.weakness_interval[0] > most:
            detail = f"{known.weakness:.2f}, --max-weakness {most}"
            return replace(one, outcome="fallen", reason="tests are weak", detail=detail)
        return replace(one, stage="strong", outcome="kept")

    def write_kept(self) -> None:
        """Writes train.jsonl with what belongs to it, and where each task is from."""
        kept = self.book.kept
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
                commit=one.commit or one.sha,
                num_commits=one.num_commits,
                authored=one.authored,
                licence=one.licence,
                problem_source=one.problem_source,
                versions_before=one.versions_before,
                bugs=one.bugs,
                seed=self.options.seed if one.bugs else None,
            )
            for one in kept
            if one.task
        ]
        replace_file(provenance_path(train), lambda path: write_provenance(path, lines))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file so that at any moment the old or the new one is there."""
    partial = path.with_name(f".{path.name}")
    write(partial)
    partial.replace(path)
