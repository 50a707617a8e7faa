"""`python -m workers.tasksets from-git REPO --out DIR`: makes verified tasks from the history of a repository.

Walks the commits of the line of first parents, newest first, and takes those that change code and tests. The change of the tests becomes
the hidden tests, the rest the known fix, and what people wrote about it the problem. Each gets an image, and is put before `workers.verify`
and `workers.leaks`; DIR/train.jsonl has what passes. DIR/candidates.jsonl says what became of each commit; the same command goes on where
a killed one ended. Exit status: 0 done; 1 some commits could not be tried because of the infrastructure; 2 misuse, with what to change.
"""

import argparse
import dataclasses
import functools
import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from pipeline.task import ExitCode, Task
from pipeline.taskfile import Gold
from workers.making.author import (
    NO_REPLY,
    Author,
    NoReply,
    Unusable,
    add_author_options,
    author_of,
    author_settings,
)
from workers.making.candidates import Settings, Stage, TaskCandidate
from workers.making.ecosystems.ecosystem import ECOSYSTEMS, Declaration
from workers.making.fixes import PART, Fix, Split, split_of
from workers.making.history import Commit, Fallen, GitError, iso_date, resolved
from workers.making.interfaces import expected, with_interface
from workers.making.problems import (
    Discussions,
    Pull,
    joined,
    problem_of,
    read_discussions,
)
from workers.making.reports import report_of_commit, request_of_commit
from workers.making.stages import Stages, add_making_options, require_positive, run_stages, settings_of

_DECLARED_TEST = re.compile(
    r"^([-+])[^\n#]*?\b(?:def|class|func)[ \t]+(?:\([^)\n]*\)[ \t]*)?([Tt]est\w+)", re.MULTILINE
)
LABELS: Mapping[Stage, str] = {"seen": "commits seen", "candidate": "change code and tests"}


def add_from_git_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_making_options(parser, items="commits tried")
    help_ = "the language of code and tests; default: %(default)s"
    add("--language", choices=ECOSYSTEMS, default="python", help=help_)
    add("--since", metavar="DATE", help="leave out commits before this date, such as 2024-05-31")
    add("--until", metavar="DATE", help="leave out commits after this date")
    add("--max-commits", type=int, metavar="N", help="look at the newest N of these commits")
    add("--only", metavar="SHA,...", help="look at these commits alone")
    add("--pulls", type=Path, metavar="FILE.jsonl", help="an export of pull requests and issues")
    help_ = "fewest words of a problem; default: %(default)s"
    add("--min-words", type=int, default=8, metavar="N", help=help_)
    add_author_options(parser, writes="the problems")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Makes the tasks, or reports on them, and returns the exit status. Raises ValueError, OSError."""

    def make(stages: Stages) -> bool:
        author = author_of(options)
        walk = CommitWalk(stages, has_author=author is not None)
        walk.enter_all()
        if author:
            stages.build(stages.to_do("candidate", "candidate"), ProblemAuthor(walk, author))
        else:
            stages.build(stages.to_do("problem", "problem"))
        stages.gate(stages.to_do("built"))
        return stages.book.has_failures

    return run_stages(options, LABELS, functools.partial(_checked, options), make)


def _checked(options: argparse.Namespace) -> Settings:
    """What the book is made with. Raises ValueError naming an option."""
    require_positive(options, "min_words", "max_commits")
    for name in ("since", "until"):
        if value := getattr(options, name):
            setattr(options, name, iso_date(value, f"--{name}", is_end=name == "until"))
    pulls = hashlib.sha256(options.pulls.read_bytes()).hexdigest() if options.pulls else ""
    return settings_of(
        options,
        language=options.language,
        min_words=str(options.min_words),
        pulls=pulls,
        **author_settings(options),
    )


@dataclass(frozen=True, slots=True)
class CommitWalk:
    """Enters the commits of the history, each with its problem or with the reason why it becomes no task. With an author the problem is
    still to be written, and until then a task has people's text as cleaned, of any length.
    """

    stages: Stages
    has_author: bool = False

    def enter_all(self) -> None:
        """Enters every commit that is not in the book yet, and those of which it had only a part."""
        history, pulls = self.stages.history, self.stages.options.pulls
        name = PurePosixPath(history.origin or history.repository.resolve()).name.removesuffix(".git")
        discussions = read_discussions(pulls, name) if pulls else Discussions()
        pull_of = {sha: pull for pull in discussions.pulls.values() for sha in pull.commits}
        for fix in joined(self._commits(), discussions):
            # `joined` knows of earlier commits alone.
            if (pull := pull_of.get(fix.head.sha)) and self._goes_on(fix, pull):
                fix = dataclasses.replace(fix, is_part=True)
            known = self.stages.book.candidates.get(fix.head.sha)
            if known and (known.reason != PART or fix.is_part):
                continue
            began_at = time.monotonic()
            one = self._candidate(fix, discussions)
            self.stages.book.enter(replace(one, seconds=round(time.monotonic() - began_at, 3)))
        found = len(self.stages.book.at("candidate" if self.has_author else "problem"))
        print(
            f"{len(self.stages.book.candidates)} commits seen, {found} may become tasks",
            file=sys.stderr,
            flush=True,
        )

    def _goes_on(self, fix: Fix, pull: Pull) -> bool:
        """Whether later commits of its pull request are not among those of the fix."""
        shas = {one.sha for one in fix.commits}
        return any(
            self.stages.history.is_ancestor(fix.head.sha, sha) for sha in pull.commits if sha not in shas
        )

    def _commits(self) -> tuple[Commit, ...]:
        """The commits that the options choose. Raises GitError naming the option."""
        options = self.stages.options
        if options.only:
            shas = [
                resolved(options.repository, name.strip(), "--only")
                for name in options.only.split(",")
                if name.strip()
            ]
            return _newest_first([next(self.stages.history.commits(sha, "-1")) for sha in shas])
        head = resolved(options.repository, options.branch, "--branch")
        words = [f"--{name}={value}" for name in ("since", "until") if (value := getattr(options, name))]
        words += [f"--max-count={options.max_commits}"] if options.max_commits else []
        return tuple(self.stages.history.commits(head, *words))

    def _candidate(self, fix: Fix, discussions: Discussions) -> TaskCandidate:
        """The fix with its problem, or with the reason why it becomes no task."""
        one = TaskCandidate(
            sha=fix.head.sha,
            stage="seen",
            outcome="fallen",
            num_commits=len(fix.commits),
            authored=fix.head.authored,
            base=fix.base,
        )
        try:
            split = split_of(
                self.stages.history, fix, self.stages.ecosystem, max_files=self.stages.options.max_files
            )
            one = replace(one, stage="candidate")
            is_given_away, tests = self.given_away(fix, split), _new_tests(split)
            least_words = 0 if self.has_author else self.stages.options.min_words
            problem = problem_of(
                fix,
                discussions,
                split.fix,
                lambda name: name in tests or is_given_away(name),
                least_words=least_words,
            )
            interface = self._interface(fix, split)
        except Fallen as fallen:
            return replace(one, reason=fallen.reason, detail=fallen.detail)
        except GitError as error:
            return replace(one, reason="cannot be read", detail=str(error))
        name = self.stages.history.repository.resolve().name
        task = Task(
            id=f"git:{name}-{fix.head.sha[:12]}",
            repo=self.stages.history.origin or name,
            base_commit="",
            image="",
            workdir="",
            problem=problem.text if self.has_author else with_interface(problem.text, interface),
            verdict=ExitCode(
                eval_script=self.stages.ecosystem.eval_script(split.modules),
                test_patch=split.tests.encode(),
                protected_paths=split.test_paths,
            ),
        )
        return replace(
            one,
            stage="candidate" if self.has_author else "problem",
            outcome="open",
            problem_source=problem.source,
            problem_removed=problem.removed,
            interface=interface,
            modules=split.modules,
            licence=self.stages.licence(fix.head.sha),
            task=task,
            gold=Gold(id=task.id, patch=split.fix, test_patch=split.tests),
        )

    def given_away(self, fix: Fix, split: Split) -> Callable[[str], bool]:
        """A function that says whether a name, of a file, too, is new in the fix, and known neither to the base nor to the hidden tests."""
        old: set[str] = set()
        new: set[str] = set()
        for path, before, after in self._code(fix, split):
            old |= self._names(before)
            new |= self._names(after)
            if not before:
                new.add(PurePosixPath(path).stem)
        only_new = new - old - set(re.findall(r"\w+", split.tests))
        return lambda name: name in only_new and not self.stages.history.contains(fix.base, name)

    def _names(self, source: bytes) -> frozenset[str]:
        """The names in a source, or all its words where it cannot be parsed, such as that of a newer version of the language."""
        found = self.stages.ecosystem.names(source)
        return found or frozenset(re.findall(r"\w+", source.decode("utf-8", "replace")))

    def _interface(self, fix: Fix, split: Split) -> tuple[str, ...]:
        """What the hidden tests use of the code that only the fix brings."""
        old: list[tuple[str, Declaration]] = []
        new: list[tuple[str, Declaration]] = []
        ecosystem = self.stages.ecosystem
        for path, before, after in self._code(fix, split):
            old += ((path, one) for one in ecosystem.declarations(before))
            new += ((path, one) for one in ecosystem.declarations(after))
        return expected(old, new, split.tests, ecosystem.namespace)

    def _code(self, fix: Fix, split: Split) -> Iterator[tuple[str, bytes, bytes]]:
        """The path of each file of code that the fix changes, and its source before and after."""
        history = self.stages.history
        for change in history.changes(fix.base, fix.head.sha):
            path = change.path.decode("utf-8", "replace")
            if path.endswith(self.stages.ecosystem.ending) and path not in split.test_paths:
                yield path, history.blob(change.old), history.blob(change.new)


def _newest_first(chosen: Sequence[Commit]) -> tuple[Commit, ...]:
    """The commits, each once and directly before its first parent, where that is among them."""
    by_sha = {one.sha: one for one in chosen}
    first_parents = {sha for one in by_sha.values() for sha in one.parents[:1]}

    def line(one: Commit | None) -> Iterator[Commit]:
        while one is not None:
            yield one
            one = by_sha.get(one.parents[0]) if one.parents else None

    ordered = (each for one in by_sha.values() if one.sha not in first_parents for each in line(one))
    return tuple(dict.fromkeys(ordered))


def _new_tests(split: Split) -> set[str]:
    """The names of the tests that only the hidden tests bring."""
    found = {sign: set[str]() for sign in "-+"}
    for sign, name in _DECLARED_TEST.findall(split.tests):
        found[sign].add(name)
    return found["+"] - found["-"]


@dataclass(frozen=True, slots=True)
class ProblemAuthor:
    """Writes the problems of commits whose hidden tests have run; implements `workers.making.stages.ProblemWriter`."""

    walk: CommitWalk
    author: Author

    async def with_problem(self, one: TaskCandidate) -> TaskCandidate:
        """The candidate with the author's problem, or with the reason why it has none."""
        stages, task, gold = self.walk.stages, one.task, one.gold
        assert task is not None
        assert gold is not None
        least_words = stages.options.min_words
        fix = Fix(one.base, next(stages.history.commits(one.sha, "-1")), ())
        split = Split(gold.patch, gold.test_patch, one.modules, task.verdict.protected_paths)
        is_given_away = self.walk.given_away(fix, split)

        def use(reply: str) -> tuple[str, tuple[str, ...]]:
            return report_of_commit(reply, one, is_given_away, least_words=least_words)

        try:
            written = await self.author.write(request_of_commit(one, least_words=least_words), use)
        except NoReply as error:
            return replace(one, outcome="failed", reason=NO_REPLY, detail=str(error)[-300:])
        except Unusable as error:
            return replace(
                one, outcome="fallen", reason="the author wrote no usable problem", detail=str(error)
            )
        text, removed = written.value
        return replace(
            one,
            stage="built",
            outcome="open",
            reason="",
            detail="",
            task=replace(task, problem=with_interface(text, one.interface)),
            problem_source=f"{self.author.name}: {f'{one.problem_source}, ' if task.problem else ''}failing tests",
            problem_removed=(*one.problem_removed, *removed),
            author_saw=(written.prompt,),
        )
