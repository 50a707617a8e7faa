"""Finds the function of each test by the name that its runner gives it.

pytest writes `tests/test_x.py::T::test_a[1]`, relative to a directory that may lie above or below the workdir; unittest
writes `test_a (pkg.test_x.T)` or `test_a (pkg.test_x.T.test_a)`; some verdicts know nothing but `T.test_a` or `test_a`,
which is then looked for in the files of the hidden tests.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.errors import GraderError
from pipeline.task import ExitCode, SwebenchLog, Task
from workers.grading.controls import patches
from workers.grading.controls.arrivals import Arrivals, inside
from workers.grading.controls.placing import read_tests
from workers.sandbox.git import GIT
from workers.sandbox.protocol import Sandbox

LIST_S = 300.0
LIST_KEEP_BYTES = 16 * 1024 * 1024

# Tests may be in files that git ignores, as in an image that was built around a repository.
_LIST = f"""{GIT}
git ls-files -z --cached --others -- '*.py' ':(exclude,glob)**/site-packages/**' ':(exclude,glob)**/node_modules/**'
"""
_PYTEST = re.compile(r"(?:\.{1,2}/)*(.+?\.py)::(.+)", re.DOTALL)
_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")
_BARE = re.compile(r"(?:\w+(?:\.|::))*\w+")
_FUNCTION = r"^[ \t]*(?:async[ \t]+)?def[ \t]+{}\b"
_CLASS = r"^[ \t]*class[ \t]+{}\b"


@dataclass(frozen=True, slots=True)
class FoundFunction:
    """The function `function` of the file at `path`, as pytest writes it: `T::test_a`. Its class may inherit it."""

    path: str  # in the workdir, or absolute
    function: str


@dataclass(slots=True)
class _Files:
    """The Python files that may hold tests."""

    by_basename: dict[str, list[str]] = field(default_factory=lambda: defaultdict[str, list[str]](list))
    hidden: set[str] = field(default_factory=set[str])

    def add(self, path: str, *, hidden: bool) -> None:
        paths = self.by_basename[path.rpartition("/")[2]]
        if path not in paths:
            paths.append(path)
        if hidden:
            self.hidden.add(path)

    def find(self, path: str) -> str | None:
        """The one file that `path` may mean: hidden tests first, since they are what is run."""
        near = [
            other
            for other in self.by_basename.get(path.rpartition("/")[2], ())
            if f"/{other}".endswith(f"/{path}") or f"/{path}".endswith(f"/{other}")
        ]
        for some in ([one for one in near if one == path], [one for one in near if one in self.hidden], near):
            if len(some) == 1:
                return some[0]
        return None

    def find_module(self, parts: Sequence[str]) -> str | None:
        """The file of the module of this dotted name."""
        path = "/".join(parts)
        return self.find(f"{path}.py") or self.find(f"{path}/__init__.py")


async def locate(sandbox: Sandbox, task: Task, names: Iterable[str]) -> dict[str, FoundFunction]:
    """The function of each test, by the test's name; left out where it is not known for sure.

    To be called when the hidden tests are in place, and before the eval script runs.
    """
    files = await _files(sandbox, task)
    located: dict[str, FoundFunction] = {}
    bare: dict[str, str] = {}
    for name in names:
        if pytest := _PYTEST.match(name):
            path = files.find(pytest[1])
            if path is not None:
                located[name] = FoundFunction(path, pytest[2].partition("[")[0])
        elif (unittest := _UNITTEST.match(name)) and (found := _of_unittest(files, unittest[1], unittest[2])):
            located[name] = found
        elif unittest:
            bare[name] = f"{unittest[2].removesuffix(f'.{unittest[1]}').rpartition('.')[2]}::{unittest[1]}"
        elif plain := _BARE.match(name):
            bare[name] = plain[0].replace(".", "::")
    if bare:
        texts = await read_tests(sandbox, task.verdict.eval_script, sorted(files.hidden))
        for name, function in bare.items():
            paths = [path for path, text in texts.items() if _defines(text, function)]
            if len(paths) == 1:
                located[name] = FoundFunction(paths[0], function)
    return located


def _of_unittest(files: _Files, function: str, dotted: str) -> FoundFunction | None:
    """The function in `test_a (pkg.test_x.T)`."""
    parts = dotted.removesuffix(f".{function}").split(".")
    for number in range(len(parts) - 1, 0, -1):
        path = files.find_module(parts[:number])
        if path is not None:
            return FoundFunction(path, "::".join((*parts[number:], function)))
    return None


def _defines(text: bytes, function: str) -> bool:
    *classes, name = (re.escape(part) for part in function.split("::"))
    patterns = [_FUNCTION.format(name), *(_CLASS.format(one) for one in classes)]
    return all(re.search(pattern.encode(), text, re.MULTILINE) for pattern in patterns)


async def _files(sandbox: Sandbox, task: Task) -> _Files:
    verdict = task.verdict
    arrivals = Arrivals(verdict.eval_script.encode("utf-8", "surrogateescape"), sandbox.workdir)
    put = () if isinstance(verdict, SwebenchLog) else tuple(file.path for file in verdict.files)
    applied = patches.sections(verdict.test_patch) if isinstance(verdict, ExitCode) else []
    patched = [section.new.decode("utf-8", "surrogateescape") for section in applied if section.new]
    written = {inside(path, sandbox.workdir) for path in (*put, *patched, *arrivals.written())}
    hidden = {inside(path, sandbox.workdir) for path in (*verdict.protected_paths, *arrivals.checked_out())}
    files = _Files()
    for path in await _list(sandbox, _LIST):
        files.add(path, hidden=path in written or _lies_in(path, hidden))
    for path in (*written, *hidden):
        if path.endswith(".py"):
            files.add(path, hidden=True)
    for origin, target in arrivals.copied():
        for path in await _list(
            sandbox, f"find {shlex.quote(origin)} -name '*.py' -type f -print0 2>/dev/null; true"
        ):
            files.add(target + path.removeprefix(origin), hidden=True)
    return files


def _lies_in(path: str, places: set[str]) -> bool:
    parts = path.split("/")
    return any("/".join(parts[:number]) in places for number in range(1, len(parts) + 1))


async def _list(sandbox: Sandbox, command: str) -> list[str]:
    result = await sandbox.run(command, timeout_s=LIST_S, keep_bytes=LIST_KEEP_BYTES, plain=True)
    if result.exit_code != 0 or result.dropped_bytes:
        raise GraderError(
            f"listing test files ended with status {result.exit_code}: {result.output[-500:]!r}"
        )
    return [path.decode("utf-8", "surrogateescape") for path in result.output.split(b"\0") if path]
