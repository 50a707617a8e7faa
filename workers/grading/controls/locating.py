"""The functions of tests, found by the names that runners and parsers give to the tests.

pytest writes `tests/test_x.py::T::test_a[1]`, relative to a directory that may be above or below the workdir, and `docs/x.rst::x.rst` for
the examples of a text file; unittest writes `test_a (pkg.test_x.T)` or `test_a (pkg.test_x.T.test_a)`; some verdicts contain only
`T.test_a` or `test_a`, which is then looked for in the files of the hidden tests. Names in other languages are compared with those that the
sources of the tests declare.
"""

import posixpath
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline import diff
from pipeline.errors import GraderError
from pipeline.runners import PYTEST
from pipeline.task import ExitCode, SwebenchLog, Task
from workers.grading.controls.arrivals import Arrivals, inside
from workers.grading.controls.placing import read_tests
from workers.grading.languages.language import DeclaredTest, Form, language, languages_of
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded
from workers.sandbox.git import GIT
from workers.sandbox.protocol import Sandbox

LIST_S = 300.0
LIST_KEEP_BYTES = 16 * 1024 * 1024
MATCHING_CPU_S = 60  # limit for finding the tests of one language by their names

# Git may ignore files with tests, as in an image that was built around a repository.
_NO_TESTS = (":(exclude,glob)**/site-packages/**", ":(exclude,glob)**/node_modules/**")
_TEXT_NAME = re.compile(r"(?:\.{1,2}/)*((?:.+/)?([\w-][\w.-]*\.\w+))::\2")
_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")
_BARE = re.compile(r"(?:\w+(?:\.|::))*\w+")
_FUNCTION = r"^[ \t]*(?:async[ \t]+)?def[ \t]+{}\b"
_CLASS = r"^[ \t]*class[ \t]+{}\b"


@dataclass(frozen=True, slots=True)
class FoundFunction:
    """The function `function` of the file at `path`, as pytest writes it: `T::test_a`. Its class may inherit it.

    The examples of a text file are one test, which has the file's name instead of a function's. In other languages than Python it is the
    name of a declared test.
    """

    path: str  # relative to the workdir, or absolute
    function: str

    @property
    def is_doctest(self) -> bool:
        """Whether it is an object whose docstring is the test, as pytest names it: `pkg.module.function`."""
        return "." in self.function and self.path.endswith(".py")


@dataclass(slots=True)
class _Files:
    """The files that may contain tests."""

    by_basename: dict[str, list[str]] = field(default_factory=lambda: defaultdict[str, list[str]](list))
    hidden: set[str] = field(default_factory=set[str])

    def add(self, path: str, *, hidden: bool) -> None:
        paths = self.by_basename[path.rpartition("/")[2]]
        if path not in paths:
            paths.append(path)
        if hidden:
            self.hidden.add(path)

    def find(self, path: str) -> str | None:
        """The only file that `path` may mean. Hidden tests come first, because they are run."""
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
    """The function of each test, by the test's name. A test is left out if its function is uncertain.

    Call it when the hidden tests are in place, and before the eval script runs.
    """
    names = tuple(names)
    texts = {text[2] for name in names if (text := _TEXT_NAME.fullmatch(name))}
    files = await _files(sandbox, task, (".py",), texts)
    located: dict[str, FoundFunction] = {}
    bare: dict[str, str] = {}
    for name in names:
        if pytest := PYTEST.test_name.match(name):
            path = files.find(pytest[1])
            if path is not None:
                located[name] = FoundFunction(path, pytest[2].partition("[")[0])
        elif text := _TEXT_NAME.fullmatch(name):
            path = files.find(text[1])
            if path is not None:
                located[name] = FoundFunction(path, text[2])
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
    for other in languages_of(task.verdict.eval_script):
        if left := [name for name in names if name not in located]:
            located |= await _declared(sandbox, task, other, left)
    return located


async def _declared(sandbox: Sandbox, task: Task, of: str, names: Sequence[str]) -> dict[str, FoundFunction]:
    """The tests of these names in the language `of`."""
    spoken, script = language(of), task.verdict.eval_script
    files = await _files(sandbox, task, spoken.endings)
    paths = {path for found in files.by_basename.values() for path in found if spoken.may_hold_tests(path)}
    texts = await read_tests(sandbox, script, sorted(paths))
    hidden = [path for path in texts if path in files.hidden]
    # Where there are too many other files, those of the hidden tests may still be few enough.
    for some in (texts, {path: texts[path] for path in hidden}):
        with suppress(LimitExceeded):
            return await isolation.call(declared_in, of, some, hidden, list(names), cpu_s=MATCHING_CPU_S)
    return {}


def declared_in(
    of: str, texts: dict[str, bytes], hidden: list[str], names: list[str]
) -> dict[str, FoundFunction]:
    """The tests of these names in the sources `texts`, of which `hidden` hold hidden tests. Where the place in a name fits several files
    equally well, those with hidden tests are meant. A name that may still mean several tests is left out. Call it in a separate process.
    """
    spoken = language(of)
    by_key: dict[str, list[tuple[str, DeclaredTest]]] = defaultdict(list)
    computed: list[tuple[str, DeclaredTest]] = []
    for path, text in texts.items():
        for test in spoken.tests(text):
            computed += [(path, test)] if test.pattern else []
            for key in test.keys:
                by_key[key].append((path, test))

    def meant(form: Form) -> set[FoundFunction]:
        tests = by_key.get(form.key) or [
            (path, test) for path, test in computed if test.pattern and test.pattern.fullmatch(form.key)
        ]
        near = {path: _nearness(form.place, path, spoken.endings) for path, _ in tests}
        num_wanted = len(_components(form.place, spoken.endings))
        most_same = num_wanted if form.is_exact else max((same for same, _ in near.values()), default=0)
        nearest = {path for path, (same, _) in near.items() if same == most_same}
        nearest = nearest.intersection(hidden) or nearest
        if not form.is_exact:
            most = max((near[path] for path in nearest), default=None)
            nearest = {path for path in nearest if near[path] == most}
        return {FoundFunction(path, test.name) for path, test in tests if path in nearest}

    located: dict[str, FoundFunction] = {}
    for name in names:
        is_known = False
        for form in spoken.forms(name):
            if form.is_last and is_known:
                break
            found = meant(form)
            is_known = is_known or bool(found)
            if len(found) == 1:
                located[name] = found.pop()
                break
    return located


def _nearness(place: str, path: str, endings: Iterable[str]) -> tuple[int, int]:
    """How well the end of a path, which a test's name contains, fits the file at `path` or its directory: the number of components that
    are the same, and the negative number of those of the path that are left over.
    """
    wanted = _components(place, endings)
    pairs: list[tuple[int, int]] = []
    for parts in (_components(path, endings), _components(posixpath.dirname(path), ())):
        same = 0
        while same < min(len(parts), len(wanted)) and parts[-1 - same] == wanted[-1 - same]:
            same += 1
        pairs.append((same, same - len(parts)))
    return max(pairs)


def _components(path: str, endings: Iterable[str]) -> list[str]:
    ending = next((one for one in endings if path.endswith(one)), "")
    return [part for part in path.removesuffix(ending).split("/") if part not in ("", ".")]


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


async def _files(
    sandbox: Sandbox, task: Task, endings: tuple[str, ...], texts: Collection[str] = ()
) -> _Files:
    """The files with these endings, and the files whose names without directories are in `texts`."""
    verdict = task.verdict
    arrivals = Arrivals(verdict.eval_script.encode("utf-8", "surrogateescape"), sandbox.workdir)
    put = () if isinstance(verdict, SwebenchLog) else tuple(file.path for file in verdict.files)
    applied = diff.sections(verdict.test_patch) if isinstance(verdict, ExitCode) else []
    patched = [section.new.decode("utf-8", "surrogateescape") for section in applied if section.new]
    written = {inside(path, sandbox.workdir) for path in (*put, *patched, *arrivals.written())}
    hidden = {inside(path, sandbox.workdir) for path in (*verdict.protected_paths, *arrivals.checked_out())}
    files = _Files()
    patterns = [f"*{ending}" for ending in endings]
    wanted = (*patterns, *(f":(glob)**/{name}" for name in sorted(texts)), *_NO_TESTS)
    for path in await _list(sandbox, f"{GIT}\ngit ls-files -z --cached --others -- {shlex.join(wanted)}"):
        files.add(path, hidden=path in written or _lies_in(path, hidden))
    for path in (*written, *hidden):
        if path.endswith(endings) or path.rpartition("/")[2] in texts:
            files.add(path, hidden=True)
    named = " -o ".join(f"-name {shlex.quote(pattern)}" for pattern in patterns)
    for origin, target in arrivals.copied():
        for path in await _list(
            sandbox, f"find {shlex.quote(origin)} \\( {named} \\) -type f -print0 2>/dev/null; true"
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
