"""Which changes in a repository's history may become a task, and what of them is the known fix and what are hidden tests."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from workers.making.ecosystems.ecosystem import Ecosystem
from workers.making.history import NO_COMMIT, Commit, Fallen, GitError, History, PathChange
from workers.tasksets.fleet import is_placed_as_test
from workers.tasksets.patches import divided, paths_of

_BOT = re.compile(
    r"\[bot\]|\bbot\b|dependabot|renovate|pre-commit-ci|github-actions|pyup|greenkeeper|snyk", re.IGNORECASE
)
_SUBMODULE = "160000"
_LFS = re.compile(r"^[-+]version https://git-lfs\.github\.com/spec/", re.MULTILINE)
PART = "only a part of its pull request is among the commits"  # another run may have the rest


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that may become a task: from the commit `base` to the commit `head`."""

    base: str
    head: Commit
    commits: tuple[Commit, ...]  # newest first; several are one pull request
    is_part: bool = False  # whether commits of the pull request are not among those of the command


@dataclass(frozen=True, slots=True)
class Split:
    """A fix, divided: the change of the code, the hidden tests, and the test modules among these that the runner can be given."""

    fix: str
    tests: str
    modules: tuple[str, ...]
    test_paths: tuple[str, ...]


def split_of(history: History, fix: Fix, ecosystem: Ecosystem, *, max_files: int) -> Split:
    """The code and the tests of a fix. Raises Fallen with the reason why it is no candidate."""
    changes = _candidate_changes(history, fix, ecosystem, max_files)
    diff = history.diff(fix.base, fix.head.sha)
    if _LFS.search(diff):
        raise Fallen("changes a file of Git LFS")
    try:
        tests, code = divided(diff, is_placed_as_test)
        test_paths = paths_of(tests)
        code_paths = paths_of(code)
    except ValueError as error:
        raise Fallen("a file's name cannot be kept", str(error)) from error
    if not any(path.endswith(ecosystem.ending) for path in code_paths):
        raise Fallen(f"changes no {ecosystem.language} code beside tests")
    left = {change.path.decode("utf-8", "replace") for change in changes if change.new != NO_COMMIT}
    modules = tuple(path for path in test_paths if path in left and ecosystem.is_module(path))
    if not modules:
        raise Fallen("changes no test module", f"none is named {ecosystem.module_names}")
    return Split(code, tests, modules, test_paths)


def _candidate_changes(history: History, fix: Fix, ecosystem: Ecosystem, max_files: int) -> list[PathChange]:
    """The changed files. Raises Fallen with the reason why the fix is no candidate, cheapest questions first."""
    if not fix.base:
        raise Fallen("has no parent")
    if fix.is_part:
        raise Fallen(PART, "--max-commits, --since, --until, --branch or --only cuts it")
    if any(_BOT.search(f"{one.author} {one.email}") for one in fix.commits):
        raise Fallen("by a bot", fix.head.author)
    try:
        changes = history.changes(fix.base, fix.head.sha)
    except GitError as error:
        raise Fallen("cannot be read", str(error)) from error
    ending = ecosystem.ending.encode()
    code = [change for change in changes if change.path.endswith(ending) and not _is_test(change)]
    tests = [change for change in changes if _is_test(change)]
    if not tests:
        raise Fallen("changes no tests")
    if not code:
        raise Fallen(f"changes no {ecosystem.language} code beside tests")
    if len(changes) > max_files:
        raise Fallen("changes too many files", f"{len(changes)}, --max-files {max_files}")
    if any(_SUBMODULE in (change.old_mode, change.new_mode) for change in changes):
        raise Fallen("changes a submodule")
    try:
        if _same_meaning(history, code, ecosystem):
            raise Fallen("moves or formats code only")
        if _same_meaning(history, tests, ecosystem):
            raise Fallen("moves or formats tests only")
    except GitError as error:
        raise Fallen("cannot be read", str(error)) from error
    return changes


def _is_test(change: PathChange) -> bool:
    return is_placed_as_test(change.path.decode("utf-8", "replace"))


def _same_meaning(history: History, changes: Iterable[PathChange], ecosystem: Ecosystem) -> bool:
    """Whether the files, wherever they are, mean the same before and after."""

    def meanings(sides: Iterable[tuple[bytes, str]]) -> Counter[str | bytes]:
        found: Counter[str | bytes] = Counter()
        for path, sha in sides:
            if sha != NO_COMMIT:
                source = history.blob(sha)
                is_code = path.endswith(ecosystem.ending.encode())
                found[(ecosystem.meaning(source) if is_code else None) or source] += 1
        return found

    changed = list(changes)
    return meanings((one.path, one.old) for one in changed) == meanings(
        (one.path, one.new) for one in changed
    )
