"""Decides from the record of a run of the known fix which files are restored before the tests run, which tests a patch may change
nevertheless, and for which tests the code under test may determine the expected values.

Files that tests read and that belong to the tests are restored before the tests run, unless the known fix changes them.

The package under test consists of the files that the known fix changes and all files that do not belong to the tests by the rules below.
Another correct fix may change it, so it is not restored, with one exception below. These belong to the tests:

- *modules*: conftest.py; files that hold tests of the run and are named as such or first loaded by the runner; and every other module in a
  *folder of tests*, unless the import statement that ran it first is the package's. Modules elsewhere belong to the package, whatever
  imports them.
- *data* (files that are opened and are not source code): all in a folder of tests, whatever opens them; elsewhere those that the tests' own
  modules open and the package never does, unless they are in a folder of the package or are manifests of the repository, which contain
  much that a fix may change.
- missing files: paths in a folder of tests that the tests' own modules try to open although no file is there, and `__init__.py` of these
  folders.

A folder of tests is the outermost folder on the way to a file with tests that is named `test`, `tests` or similar; if there are several,
it is one that contains no file of the fix. If there is no such folder, it is the outermost one whose name suggests tests, such as
`testing` or `spec`, and that contains no file of the fix.

Tests whose cases or references the package under test provides are found in the source of a file with tests. A patch that may change the
package may change what such a test expects. The search finds

- cases: a value that is imported from the package, or that a function of it gives without arguments, used as a whole for the cases of
  `parametrize`, of a fixture or of a loop, or as their number;
- references: two functions of the package that are compared on the same arguments, and everything from a module of the package whose name
  says that it contains cases or references.

It does not report constants of the package that are a single expected value. The exception: a module with such cases or references is
restored if only the tests' own modules import it and the known fix leaves it alone. Its tests stay flagged, because code of the package can
change the values of the imported module.
"""

import ast
import dataclasses
import posixpath
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import msgspec
from msgspec.structs import replace

from pipeline.task import Calibration, Task
from workers.grading.controls import spans
from workers.grading.controls.conditions import name_of_call
from workers.grading.controls.locating import FoundFunction
from workers.grading.controls.placing import read_tests
from workers.grading.controls.reaching import functions_of_tests
from workers.grading.defence.governing import hidden_paths
from workers.grading.defence.survey import is_manifest
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded
from workers.sandbox.protocol import Sandbox
from workers.verify.fixed import FoundTests, Read, ReadRecord

_REFERENCE = re.compile(
    r"_*(?:\w+_)?(?:references?|expected|expectations|golden|oracles?|cases|test_?data|samples|vectors|fixtures)(?:_\w+)?"
)
_WHOLE = {
    "list",
    "tuple",
    "set",
    "sorted",
    "reversed",
    "enumerate",
    "zip",
    "iter",
    "dict",
    "chain",
    "product",
    "range",
}
_OF_MAPPING = {"items", "values", "keys", "copy"}
_EQUAL = re.compile(r"assert_?.*(?:equal|close|same|is)s?", re.IGNORECASE)


class Sources(msgspec.Struct, frozen=True):
    """The imports and values that a file with tests, or one that tests import, takes from other files of the repository."""

    imported: tuple[str, ...] = ()  # paths of files
    # Tests of the file, named as pytest names them, whose cases or references come from the package.
    provided: tuple[str, ...] = ()
    providing: tuple[str, ...] = ()  # paths of the package's files that those cases and references name themselves


def sources(texts: dict[str, bytes], modules: tuple[str, ...], own: tuple[str, ...]) -> dict[str, Sources]:
    """The sources of each file in `texts` among `modules`, the modules of the repository, of which `own` belong to the tests.

    The caller runs it in a separate process.
    """
    trees = {path: file.tree for path, text in texts.items() if (file := spans.read(text))}
    known = _Modules(modules)
    bindings = {path: list(_bindings(tree, path, known)) for path, tree in trees.items()}
    values = {
        path: _Values(tree, {name: one for name, one in bindings[path] if one not in own})
        for path, tree in trees.items()
    }
    expecting = {path: set(one.functions()) for path, one in values.items()}
    everywhere = {path for path in trees if posixpath.basename(path) == "conftest.py"}
    found: dict[str, Sources] = {}
    for path, one in values.items():
        imported = {other for _, other in bindings[path]}
        handed_on = set[str]().union(*(expecting.get(other, ()) for other in imported | everywhere))
        found[path] = Sources(
            tuple(sorted(imported)), tuple(sorted(set(one.tests(handed_on)))), tuple(sorted({*one.files()}))
        )
    return found


def imported_by(texts: dict[str, bytes], modules: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """The files among `modules` that import statements in each file of `texts` name; a file that cannot be parsed is left out.

    The caller runs it in a separate process.
    """
    known = _Modules(modules)
    return {
        path: frozenset(other for _, other in _bindings(file.tree, path, known))
        for path, text in texts.items()
        if (file := spans.read(text))
    }


class _Modules:
    """The modules of the repository by the names under which import statements may find them."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._by_ending: dict[str, list[str]] = defaultdict(list)
        for path in sorted(self._paths, key=lambda path: (path.count("/"), path)):
            parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
            outermost = len(parts) - 1
            while outermost and f"{'/'.join(parts[:outermost])}/__init__.py" in self._paths:
                outermost -= 1
            for start in range(outermost + 1):
                self._by_ending[".".join(parts[start:])].append(path)

    def find(self, dotted: str) -> str | None:
        """The file of a module; the shortest path if several may be meant."""
        return next(iter(self._by_ending.get(dotted, ())), None)

    def beside(self, folder: str, dotted: str) -> str | None:
        """The file of a module that is named relative to a folder."""
        name = posixpath.join(folder, dotted.replace(".", "/")) if dotted else folder
        return next((path for path in (f"{name}.py", f"{name}/__init__.py") if path in self._paths), None)


def _bindings(tree: ast.Module, path: str, modules: _Modules) -> Iterator[tuple[str, str]]:
    """Each name that an import statement binds, with the file from which it comes."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for one in names:
                    if found := modules.find(one.name):
                        yield one.asname or one.name.partition(".")[0], found
            case ast.ImportFrom(module=module, names=names, level=level):
                for one in names:
                    if found := _from(module or "", one.name, level, path, modules):
                        yield one.asname or one.name, found
            case _:
                pass


def _from(module: str, name: str, level: int, path: str, modules: _Modules) -> str | None:
    submodule = f"{module}.{name}" if module else name
    if not level:
        return modules.find(submodule) or modules.find(module)
    folder = posixpath.dirname(path)
    for _ in range(level - 1):
        folder = posixpath.dirname(folder)
    return modules.beside(folder, submodule) or modules.beside(folder, module)


class _Values:
    """The expressions in a part of a file that are values of the package, and the functions that use these as expectations.

    `package` contains the file of each name of the package.
    """

    def __init__(self, part: ast.AST, package: Mapping[str, str]) -> None:
        self._part = part
        self._package = dict(package)
        self._given = dict(_assigned(part))
        self._package |= {
            name: next(self._files_in(value), "")
            for name, value in self._given.items()
            if self._is_whole(value)
        }

    def functions(self) -> Iterator[str]:
        """Names of the file's functions, as others may import them, that have cases or references from the package."""
        for node in ast.iter_child_nodes(self._part):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
                self._within(node).expected()
            ):
                yield node.name

    def files(self) -> Iterator[str]:
        """The files of the package that provide the cases and references in this part."""
        for node in ast.walk(self._part):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                values = self._within(node)
                for expression in values.expected():
                    yield from values._files_in(expression)
            elif isinstance(node, ast.ClassDef):
                for expression in node.decorator_list:
                    for cases in self._given_cases(expression):
                        yield from self._files_in(cases)

    def tests(self, handed_on: Container[str]) -> Iterator[str]:
        """Tests that have cases or references from the package, or that use a function in `handed_on`."""
        assert isinstance(self._part, ast.Module)
        found = functions_of_tests(self._part)
        for definition, tests in found:
            uses = any(name in handed_on for name in _names_in(definition))
            if uses or any(self._within(definition).expected()):
                yield from tests
        for node in ast.walk(self._part):
            if isinstance(node, ast.ClassDef) and any(map(self._given_cases, node.decorator_list)):
                yield from (
                    test for _, tests in found for test in tests if node.name in test.split("::")[:-1]
                )

    def expected(self) -> Iterator[ast.expr]:
        """The expressions of this part that are cases or references from the package."""
        for node in ast.walk(self._part):
            yield from self._expected_in(node)

    def _within(self, definition: ast.AST) -> "_Values":
        """The values in a function of this part, whose own names hide those of the part."""
        bound = {
            node.id
            for node in ast.walk(definition)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        bound |= {node.arg for node in ast.walk(definition) if isinstance(node, ast.arg)}
        package = {name: path for name, path in self._package.items() if name not in bound}
        return _Values(definition, package)

    def _given_cases(self, node: ast.AST) -> list[ast.expr]:
        """The cases from the package that a call of `parametrize` or of `fixture` gets."""
        if not isinstance(node, ast.Call) or name_of_call(node) not in ("parametrize", "fixture", "expand"):
            return []
        given = (*node.args, *(keyword.value for keyword in node.keywords))
        return [one for one in given if self._is_whole(one)]

    def _expected_in(self, node: ast.AST) -> Sequence[ast.expr]:
        """What of a node is a case or a reference from the package; of a comparison, both of the functions that are alike."""
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in self._package:
                return [node] if _says_reference(self._package[name]) else []
            case ast.For(iter=cases) | ast.AsyncFor(iter=cases) | ast.comprehension(iter=cases):
                return [cases] if self._is_whole(cases) else []
            case ast.Compare(left=one, ops=[ast.Eq() | ast.Is()], comparators=[other]):
                return self._alike(one, other)
            case ast.Call(args=[one, other, *_]) if _EQUAL.fullmatch(name_of_call(node) or ""):
                return self._alike(one, other)
            case _:
                return self._given_cases(node)

    def _alike(self, one: ast.expr, other: ast.expr) -> Sequence[ast.expr]:
        """Two functions of the package that are called with the same arguments; nothing if the two are not such functions."""
        left, right = (
            self._given.get(side.id, side) if isinstance(side, ast.Name) else side for side in (one, other)
        )
        if not isinstance(left, ast.Call) or not isinstance(right, ast.Call) or not left.args:
            return ()
        same = [ast.dump(arg) for arg in left.args] == [ast.dump(arg) for arg in right.args]
        functions = (left.func, right.func)
        differ = ast.dump(left.func) != ast.dump(right.func)
        return functions if same and differ and all(map(self._is_rooted, functions)) else ()

    def _files_in(self, node: ast.AST) -> Iterator[str]:
        """Yields the files of the package that the names in an expression refer to."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and self._package.get(part.id):
                yield self._package[part.id]

    def _is_whole(self, node: ast.expr) -> bool:
        """Whether the expression is an unchanged value of the package, or a collection of such values."""
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=attribute), args=[]) if (
                attribute in _OF_MAPPING
            ):
                return self._is_rooted(value)
            case ast.Call(func=function, args=[], keywords=[]) if not (name_of_call(node) or "")[
                :1
            ].isupper():
                return self._is_rooted(function)
            case ast.Call(args=arguments):
                return name_of_call(node) in _WHOLE and any(map(self._is_whole, arguments))
            case ast.Starred(value=value):
                return self._is_whole(value)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return any(isinstance(part, ast.Starred) and self._is_whole(part) for part in parts)
            case ast.ListComp(generators=[generator, *_]) | ast.GeneratorExp(generators=[generator, *_]):
                return self._is_whole(generator.iter)
            case ast.BinOp(left=left, right=right):
                return self._is_whole(left) or self._is_whole(right)
            case _:
                return self._is_rooted(node)

    def _is_rooted(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._package


def _assigned(part: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Variables that are assigned exactly one value, with the value; for a module, only assignments outside of its functions."""
    nodes = ast.iter_child_nodes(part) if isinstance(part, ast.Module) else ast.walk(part)
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _names_in(definition: ast.AST) -> Iterator[str]:
    for node in ast.walk(definition):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name
            case _:
                pass


def _says_reference(path: str) -> bool:
    return any(_REFERENCE.fullmatch(part) for part in path.removesuffix(".py").split("/"))


MOST_FILES = 2000
_TESTS = re.compile(r"_*(?:unit|func|functional|integration|system|acceptance)?_?tests?_*")
_SPEAKS_OF_TESTS = re.compile(r"_*(?:\w+[_-])?(?:tests?|testing|testsuite|specs?)(?:[_-]\w+)?")
_TEST_FILE = re.compile(r"tests?.*\.py|.*_tests?\.py")
SOURCE = re.compile(r".*\.(?:py|pyi|pyx|pxd|pyc|so|pyd)")


@dataclass(frozen=True)
class Support:
    """Decides which files in `record` belong to the tests. `test_files` contain its tests, `under_test` are the files of the known fix."""

    record: ReadRecord
    test_files: frozenset[str]
    under_test: frozenset[str]

    @cached_property
    def folders(self) -> frozenset[str]:
        """The folders of tests, as the module's docstring defines them."""
        return frozenset(folder for path in self.test_files if (folder := self._folder_of_tests(path)))

    @cached_property
    def modules(self) -> frozenset[str]:
        """Modules of the repository that belong to the tests, including those of the fix."""
        return frozenset(path for path in self._first_run if self._is_own(path, frozenset()))

    @cached_property
    def restored(self) -> tuple[str, ...]:
        """The tests' own files that the known fix does not change; not all if there are very many."""
        found = dict.fromkeys(
            path for path in (*sorted(self.modules), *sorted(self._data)) if self._is_there(path)
        )
        found |= dict.fromkeys(sorted(self._missing))
        return tuple(path for path in found if path not in self.under_test)[:MOST_FILES]

    @cached_property
    def unprotected_data(self) -> tuple[Read, ...]:
        """Data that the tests' own modules open and that a patch may change, because the known fix does, or because it belongs to the
        package.
        """
        return tuple(
            read
            for read in self.record.reads
            if read.kind == "opened" and read.by in self.modules and not SOURCE.fullmatch(read.path)
            if read.path in self.record.tracked
            and (read.path in self.under_test or read.path not in self._data)
        )

    def only_tests_run(self, path: str) -> bool:
        """Whether a module of the package, which the known fix leaves alone, was first imported by the tests' own."""
        read = self._first_run.get(path)
        return (
            read is not None
            and self._is_there(path)
            and path not in self.under_test
            and read.by in self.modules
        )

    def is_changeable(self, path: str) -> bool:
        """Whether a patch may change this file with tests, because the known fix does, or because it is a module of the package."""
        return path in self.under_test or (path in self._first_run and path not in self.modules)

    @cached_property
    def _first_run(self) -> dict[str, Read]:
        """The read with which each module was first run."""
        first: dict[str, Read] = {}
        for read in self.record.reads:
            if read.kind == "run":
                first.setdefault(read.path, read)
        return first

    @cached_property
    def _data(self) -> frozenset[str]:
        opened: dict[str, set[str]] = defaultdict(set)
        for read in self.record.reads:
            if read.kind == "opened" and not SOURCE.fullmatch(read.path):
                opened[read.path].add(read.by)
        return frozenset(
            path
            for path, by in opened.items()
            if self._lies_in_tests(path) or path in self.test_files or self._only_tests_read(path, by)
        ) | {
            read.path
            for read in self.record.reads
            if read.kind == "opened" and self._lies_in_tests(read.path)
        }

    @cached_property
    def _missing(self) -> set[str]:
        tried = {
            read.path
            for read in self.record.reads
            if read.kind == "missing" and self._lies_in_tests(read.path) and read.by in self.modules
        }
        inits = {
            f"{folder}/__init__.py"
            for path in self.modules
            for folder in _folders(path)
            if self._lies_in_tests(f"{folder}/__init__.py")
        }
        return tried | (inits - self._first_run.keys())

    @cached_property
    def _package_folders(self) -> frozenset[str]:
        package = {*(path for path in self._first_run if path not in self.modules), *self.under_test}
        return frozenset(folder for path in package if (folder := posixpath.dirname(path)))

    def _only_tests_read(self, path: str, by: set[str]) -> bool:
        in_package = any(folder in self._package_folders for folder in _folders(path))
        return by <= self.modules and not in_package and not is_manifest(path)

    def _is_own(self, path: str, seen: frozenset[str]) -> bool:
        """Whether the module belongs to the tests. `seen` are modules whose first import led to it."""
        name, read = posixpath.basename(path), self._first_run[path]
        if name == "conftest.py" or (path in self.test_files and (not read.by or _TEST_FILE.fullmatch(name))):
            return True
        if not self._lies_in_tests(path):
            return False
        if not read.is_direct or read.by in seen or read.by not in self._first_run:
            return True
        return self._is_own(read.by, seen | {path})

    def _lies_in_tests(self, path: str) -> bool:
        return any(folder in self.folders for folder in _folders(path))

    def _is_there(self, path: str) -> bool:
        return path in self.record.tracked

    def _folder_of_tests(self, path: str) -> str | None:
        folders = list(_folders(path))
        named = [folder for folder in folders if _TESTS.fullmatch(posixpath.basename(folder))]
        speaking = [folder for folder in folders if _SPEAKS_OF_TESTS.fullmatch(posixpath.basename(folder))]
        found = [*filter(self._holds_no_fix, named), *named, *filter(self._holds_no_fix, speaking)]
        return found[0] if found else None

    def _holds_no_fix(self, folder: str) -> bool:
        return not any(path.startswith(f"{folder}/") for path in self.under_test)


def _folders(path: str) -> Iterator[str]:
    """The parent folders of a file, outermost first."""
    parts = path.split("/")
    return ("/".join(parts[:end]) for end in range(1, len(parts)))


SOURCES_CPU_S = 120


async def with_reads(
    sandbox: Sandbox,
    task: Task,
    calibration: Calibration,
    recorded: ReadRecord,
    found: FoundTests,
) -> tuple[Calibration, FoundTests]:
    """`calibration` with what its tests read, and `found` with their other modules; unchanged if nothing was recorded. The known fix is
    in place in `sandbox`.

    Raises RolloutError.
    """
    if not recorded.reads:
        return calibration, found
    hidden = hidden_paths(task.verdict, sandbox.workdir)
    fixed = [path for path in calibration.fix_paths if not _lies_in(path, hidden)]
    tests = Tests(calibration.passing, found.functions, recorded, frozenset(fixed), frozenset(hidden))
    texts = await read_tests(sandbox, task.verdict.eval_script, tests.support.modules)
    modules = tuple(sorted({read.path for read in recorded.reads if read.kind == "run"}))
    try:
        read = await isolation.call(
            sources, texts, modules, tuple(sorted(tests.support.modules)), cpu_s=SOURCES_CPU_S
        )
    except LimitExceeded:
        read = dict[str, Sources]()
    provided = await _provided_by_tests_alone(sandbox, task.verdict.eval_script, tests.support, read, modules)
    calibration = replace(
        calibration,
        reads=(*tests.support.restored, *provided),
        in_fix=tuple(sorted(tests.in_fix(read))),
        from_package=tuple(sorted(tests.from_package(read))),
    )
    support = {path: texts[path] for path in texts if path not in fixed and path not in found.texts}
    return calibration, dataclasses.replace(found, support=support)


@dataclass(frozen=True)
class Tests:
    """The tests of a task: their `names`, the known functions of them, and the record of their run."""

    __test__ = False  # pytest collects classes of such a name

    names: Sequence[str]
    functions: Mapping[str, FoundFunction]
    recorded: ReadRecord
    fixed: frozenset[str]  # files of the known fix, without hidden tests
    hidden: frozenset[str]

    @cached_property
    def files(self) -> dict[str, str]:
        """The file of each known test, by the test's name."""
        written = {name: name.partition("::")[0] for name in self.names}
        tracked = {name: path for name, path in written.items() if path in self.recorded.tracked}
        return tracked | {name: place.path for name, place in self.functions.items()}

    @cached_property
    def support(self) -> Support:
        """The analysis of which files belong to the tests. Modules with doctests do not count as files that hold tests."""
        doctests = {name for name, place in self.functions.items() if place.is_doctest}
        files = frozenset(path for name, path in self.files.items() if name not in doctests)
        return Support(self.recorded, files, self.fixed)

    def in_fix(self, found: Mapping[str, Sources]) -> Iterator[str]:
        """Tests whose code, or a file that it imports or opens among the tests' own, is in a file that a patch may change."""
        changed = {path for path in self.support.modules if path in self.fixed}
        for name, path in self.files.items():
            if not changed.isdisjoint(self._reached(path, found)) or not self._is_kept(path):
                yield name
        yield from self._opening(found, by_fix=True)

    def from_package(self, found: Mapping[str, Sources]) -> Iterator[str]:
        """Tests that have cases, references or data from the package."""
        provided = {path: frozenset(one.provided) for path, one in found.items()}
        for name, place in self.functions.items():
            if place.function in provided.get(place.path, ()):
                yield name
        yield from self._opening(found, by_fix=False)

    def _opening(self, found: Mapping[str, Sources], *, by_fix: bool) -> Iterator[str]:
        """Tests that open data which a patch may change: data of the fix, or otherwise of the package."""
        known = frozenset(self.names)
        for read in self.support.unprotected_data:
            if (read.path in self.fixed) == by_fix and read.test:
                yield from known.intersection([read.test])
            elif (read.path in self.fixed) == by_fix:
                yield from (
                    name for name, path in self.files.items() if read.by in self._reached(path, found)
                )

    def _is_kept(self, path: str) -> bool:
        return _lies_in(path, self.hidden) or not self.support.is_changeable(path)

    def _reached(self, path: str, found: Mapping[str, Sources]) -> frozenset[str]:
        """The file and the tests' own modules that it imports, directly or through others of them."""
        if path not in self._known_reached:
            reached, waiting = {path}, [path]
            while waiting:
                sources = found.get(waiting.pop(), Sources())
                new = {one for one in sources.imported if one in self.support.modules} - reached
                reached |= new
                waiting += new
            self._known_reached[path] = frozenset(reached)
        return self._known_reached[path]

    @cached_property
    def _known_reached(self) -> dict[str, frozenset[str]]:
        return {}


async def _provided_by_tests_alone(
    sandbox: Sandbox, script: str, support: Support, found: Mapping[str, Sources], modules: tuple[str, ...]
) -> tuple[str, ...]:
    """Modules of the package with cases or references that only the tests' own modules import, and that the known fix leaves alone.

    The result is empty if a module of the package cannot be read, because it may import them. Raises RolloutError.
    """
    providing = {path for one in found.values() for path in one.providing if support.only_tests_run(path)}
    package = {path for path in modules if path.endswith(".py")} - support.modules
    if not providing:
        return ()
    texts = await read_tests(sandbox, script, package)
    with suppress(LimitExceeded):
        imported = await isolation.call(imported_by, texts, modules, cpu_s=SOURCES_CPU_S)
        if imported.keys() == package:
            return tuple(sorted(providing.difference(*imported.values())))
    return ()


def _lies_in(path: str, places: Iterable[str]) -> bool:
    return any(path == place or path.startswith(f"{place.rstrip('/')}/") for place in places)
