"""The files that govern the test runner: a patch could manipulate the runner with them instead of fixing the code.

They are restored from the image, or removed.

Import directories are directories in which Python finds modules because of pytest's settings or conftest.py files of a patch. These files
are restored, but a correct fix may have moved the code and named its new directory there. So such directories of the repository are
searched nevertheless, after all others, if no module in them has the name of one that Python might find elsewhere. The files are only
parsed, and only the directories are used.
"""

import ast
import configparser
import fnmatch
import json
import posixpath
import re
import shlex
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

from pipeline import runners
from pipeline.runners import LANGUAGES, MAKE, PYTEST, Runner, uses
from pipeline.task import ExitCode, SwebenchLog, Verdict
from workers.grading.defence.survey import Surveyed
from workers.grading.defence.witness import touched_paths
from workers.grading.steps import step

# Files that are restored if the eval script uses the program that reads them.
NAMES_OF_PROGRAMS = {"direnv": (".envrc",), "dotenv": (".env",), "pipenv": (".env",)}
# Files in which only import directories are settings of the tests' run. setup.cfg and pyproject.toml have others, too.
IMPORTING_NAMES = ("conftest.py", *(name for name in PYTEST.options if name not in PYTEST.settings))
# Files that make a directory a virtual environment, in which pytest looks for no tests.
VIRTUAL_ENVIRONMENTS = ("*/bin/activate*", "*/Scripts/activate*", "*/conda-meta/history")

# New modules with the runner's names are removed from the directories that Python searches first, wherever its libraries are. So are
# modules with names of the standard library, and of modules that are installed in the image.
NEVER_IN_THE_WAY = {"antigravity", "idlelib", "lib2to3", "test", "this", "tkinter", "turtle", "turtledemo"}
STANDARD_MODULES = tuple(sorted(sys.stdlib_module_names - NEVER_IN_THE_WAY))

_HEADER = re.compile(
    rb"^(?:diff --git|---|\+\+\+|rename (?:from|to)|copy (?:from|to)|Index:) (.*)$", re.MULTILINE
)
_RENAMED = re.compile(r"^rename (?:from|to) (.*)$", re.MULTILINE)
_ESCAPE = re.compile(rb"\\[0-7]{3}")  # git quotes names, and an escape may hide any letter
_ESCAPED_ASCII = re.compile(rb"\\[01][0-7]{2}")  # git itself never escapes a letter or a dot

_NAMED_TEST = re.compile(r"[./].*(?:test|check|spec|eval)|(?:test|check|spec|eval).*[./]", re.IGNORECASE)
_MAKES = re.compile(r"(?:^|[\s;&|(/])make\b([^\n;&|)]*)", re.MULTILINE)


@dataclass(frozen=True)
class GoverningFiles:
    """The files that govern the runner of the eval script `script`. `surveyed` are the files that it and its files name."""

    script: str
    surveyed: Surveyed

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of files that are restored whole; `*` as in a shell."""
        read = [names for program, names in NAMES_OF_PROGRAMS.items() if uses(self.script, (program,))]
        governing = (name for name in self._of_runners if "/" not in name)
        return tuple(
            dict.fromkeys((".gitattributes", *governing, *(name for names in read for name in names)))
        )

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """Names of files that are restored only if they change the runner's settings: they contain much that a fix may change."""
        names = (name for runner in runners.RUNNERS for name in runner.settings)
        return (*dict.fromkeys(names), *(MAKE.commands_in if MAKE.is_used_by(self.script) else ()))

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths in the workdir of further files that are restored whole, `*` as in a shell."""
        governing = (path for path in self._of_runners if "/" in path)
        return (*self.surveyed.paths, *governing, *VIRTUAL_ENVIRONMENTS)

    @cached_property
    def _of_runners(self) -> tuple[str, ...]:
        languages = (name for language in LANGUAGES for name in language.governed_by)
        always = (name for runner in runners.RUNNERS for name in runner.governed_by)
        used = (runner for runner in runners.RUNNERS if runner.is_used_by(self.script))
        return (*languages, *always, *(name for runner in used for name in runner.governed_by_if_used))

    def step(self, name: str, **arguments: str | Iterable[str]) -> str:
        """The bash code of a step in the container, with these files as arguments; see steps.sh."""
        return step(name, **self._arguments, **arguments)

    @cached_property
    def _arguments(self) -> dict[str, str | Iterable[str]]:
        # A symbolic link may replace a directory, so its name alone counts, too.
        folders = [f"*/{folder}{inside}" for folder in governing_directories() for inside in ("", "/*")]
        paths = [f"./{path}" for path in self.paths]
        of_languages = (program for language in LANGUAGES for program in language.programs)
        return {
            "GOVERNING": _either(("-name", self.names), ("-ipath", folders), ("-path", paths)),
            "SETTINGS": _either(("-name", (*self.settings, *IMPORTING_NAMES))),
            "NAMED": [path for path in self.surveyed.paths if "/" in path],
            "ON_PATH": self.surveyed.program_directories,
            "PROGRAMS": [*of_languages, *(name for one in runners.RUNNERS for name in one.programs)],
            "PLACES": self.surveyed.places,
            "SEARCHED": self.surveyed.searched,
            "STANDARD": f"/{'/'.join(STANDARD_MODULES)}/",
            "ALWAYS": f"/{'/'.join(runner_modules())}/",
        }

    @cached_property
    def restored(self) -> tuple[str, ...]:
        """Files that are as in the image when the tests run: names, `*` as in a shell, and paths after a slash."""
        return (*self.names, *(f"/{path}" for path in self.surveyed.paths))

    def puts_back(self, path: str) -> bool:
        """Whether the file at this path of the repository is among `restored`."""
        name = posixpath.basename(path)
        return any(fnmatch.fnmatchcase(f"/{path}" if "/" in one else name, one) for one in self.restored)

    @cached_property
    def _touching(self) -> re.Pattern[bytes]:
        # A symbolic link may replace any folder of a path.
        on_the_way = {part for path in self.paths for part in path.split("/")} - {"*"}
        files = (*self.names, *self.settings, *sorted(on_the_way))
        whole = sorted({path.split("/")[-2] for path in self.paths if path.endswith("/*")})
        either = "|".join(
            (
                *(_as_regex(name) for name in files),
                *(rf"{_as_regex(name)}(?:/[^\s\"]*)?" for name in whole),
                *(rf"(?i:{_as_regex(name)})(?:/[^\s\"]*)?" for name in governing_directories()),
            )
        )
        return re.compile(rf"(?:^|[\s/\"])(?:{either})(?:[\s\"]|$)".encode())

    def touched_by(self, patch: bytes) -> bool:
        """Whether `patch` may touch any of these files. The answer may be yes too often, never no too often."""
        touching = self._touching
        return any(touching.search(header) or _ESCAPE.search(header) for header in _HEADER.findall(patch))


def governing_directories() -> list[str]:
    """Names of directories that are restored with all their content, in any case; `*` as in a shell."""
    return [name for language in LANGUAGES for name in language.governed_by_directories]


def runner_modules() -> list[str]:
    """Modules that runners consist of or look for, and modules that every process of a language looks for."""
    own = (module for runner in runners.RUNNERS for module in runner.own_modules)
    return sorted({*own, *(module for language in LANGUAGES for module in language.looked_for)})


def path_inside(path: str, workdir: str) -> str:
    """`path` relative to `workdir`, "" if it is elsewhere."""
    inside = posixpath.relpath(posixpath.join(workdir, path), workdir) if path else ""
    return "" if inside == ".." or inside.startswith("../") else inside


def hidden_paths(verdict: Verdict, workdir: str) -> list[str]:
    """Paths in `workdir` of the hidden tests, whichever way they arrive: their files return to the base commit first.

    A renamed file counts with both names, also in a patch that the eval script applies itself. Among the other files of such a patch
    only tests count, because its purpose may be to change the code.
    """
    files = () if isinstance(verdict, SwebenchLog) else verdict.files
    applied = verdict.test_patch if isinstance(verdict, ExitCode) else b""
    script = verdict.eval_script.encode("utf-8", "surrogateescape")
    renamed = set(_RENAMED.findall(verdict.eval_script))
    by_script = [path for path in touched_paths(script) if path in renamed or _NAMED_TEST.search(path)]
    given = [*verdict.protected_paths, *(file.path for file in files), *touched_paths(applied), *by_script]
    inside = (path_inside(path, workdir) for path in given)
    return [path for path in dict.fromkeys(inside) if path not in ("", ".")]


def hides_names(patch: bytes) -> bool:
    """Whether a header of `patch` writes a plain letter as an octal escape, which git never does."""
    return any(_ESCAPED_ASCII.search(header) for header in _HEADER.findall(patch))


def same_runner_settings(name: str, old: bytes | None, new: bytes | None, script: str = "") -> bool:
    """Whether both contents of the settings file `name` (None: absent) mean the same to the runner of `script`."""
    try:
        return _runner_settings(name, old, script) == _runner_settings(name, new, script)
    except (ValueError, RecursionError, configparser.Error):
        return False  # it cannot be read now: the errors of tomllib, JSON and Unicode are ValueErrors


def _either(*tests: tuple[str, Iterable[str]]) -> list[str]:
    """The arguments of `find` that select files for which any of these tests matches any of its patterns."""
    words = [word for test, patterns in tests for pattern in patterns for word in ("-o", test, pattern)]
    return words[1:]


def _as_regex(name: str) -> str:
    return re.escape(name).replace(r"\*", r"[^/\s]*")


def _runner_settings(name: str, content: bytes | None, script: str) -> object:
    if content is None:
        return None
    text = content.decode()
    match name:
        case "pyproject.toml":
            places = ("project.entry-points", "tool.poetry.plugins")
            plugins = [f"{place}.{runner.entry_points}" for runner in _with_plugins() for place in places]
            settings = tomllib.loads(text)
            return _said([setting(settings, *way.split(".")) for way in (*_parts(name), *plugins)])
        case "package.json":
            settings = json.loads(text)
            return _said([setting(settings, *way.split(".")) for way in _parts(name)])
        case "setup.cfg":
            return _of_setup_cfg(text)
        case _:
            return _of_makefile(text, script)


def _parts(file: str) -> list[str]:
    """The parts of the settings file that runners read."""
    return list(dict.fromkeys(part for one in runners.RUNNERS for part in one.settings.get(file, ())))


def _with_plugins() -> list[Runner]:
    return [runner for runner in runners.RUNNERS if runner.entry_points]


def setting(settings: object, *keys: str) -> object:
    """The value under these keys in decoded TOML or JSON, None if there is none."""
    for key in keys:
        if not isinstance(settings, dict):
            return None
        settings = cast("dict[str, object]", settings).get(key)
    return settings


def _said(settings: list[object]) -> object:
    return settings if any(settings) else None


def _of_setup_cfg(text: str) -> object:
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    parser.read_string(text)
    sections = {
        section: parser.items(section)
        for section in parser.sections()
        if any(fnmatch.fnmatchcase(section, part) for part in _parts("setup.cfg"))
    }
    found = _with_plugins()
    plugins = [parser.get("options.entry_points", one.entry_points, fallback=None) for one in found]
    lines = [line for line in text.splitlines() if any(one.name in line for one in found)] if sections else []
    return _said([sections, *plugins, lines])


def _of_makefile(text: str, script: str) -> object:
    """The rules of the targets that the script makes, the variables in them, and settings that apply to every rule."""
    text = text.replace("\\\n", " ")
    named = {word for words in _MAKES.findall(script) for word in words.split() if word[0] not in "-$\"'"}
    first = re.search(r"^([^\s.#:=][^:=\n]*?)\s*:(?!=)", text, re.MULTILINE)
    targets = named or ({first[1]} if first else set[str]())
    either = "|".join(map(re.escape, sorted(targets)))
    rules = re.findall(
        rf"^(?:[^\t#\n:]*\s)?(?:{either})(?:\s[^:\n]*)?::?(?!=).*(?:\n\t.*)*", text, re.MULTILINE
    )
    variables = sorted(set(re.findall(r"\$[({](\w+)", "\n".join(rules))))
    settings = "|".join(("SHELL", "MAKEFLAGS", *variables))
    governing = re.findall(
        rf"^ *(?:(?:override +)?(?:{settings})\s*[:?+!]*=.*|define .*|-?s?include .*|(?:un)?export\b.*|\.(?!PHONY)[A-Z]+\b.*)$",
        text,
        re.MULTILINE,
    )
    return _said([rules, governing])


IMPORT_OPTION = "pythonpath"
MOST_DIRECTORIES = 16  # number of directories that one patch may add
LONGEST_CHARS = 1000
# Names that do not name a module in a directory on the search path.
NO_MODULES = frozenset(("", "__init__", "__main__", "__pycache__"))

# A path without special meaning to a shell, a .pth file and Python's search for installed distributions.
_PLAIN = re.compile(r"(?![^\n]*[.]egg(?:/|$))\w[\w.-]*(?:/\w[\w.-]*)*", re.ASCII | re.IGNORECASE)
_TEST_NAME = re.compile(r"test_.*|.*_test|conftest")
_MODULE_ENDING = re.compile(r"|(?:.*\.)?(?:py|pyc|so)")  # an empty ending means a folder or a link
_METHODS = frozenset(("absolute", "as_posix", "joinpath", "resolve", "with_name"))  # methods of a path
_JOINING = frozenset(("Path", "PosixPath", "PurePath", "PurePosixPath", "join", "joinpath"))
_MADE_ABSOLUTE = frozenset(("abspath", "absolute", "realpath", "resolve"))
_SAME = frozenset(("as_posix", "fspath", "normpath", "str"))
# Methods of sys.path, and which of their arguments adds to it.
_ADDING = {"append": 0, "extend": 0, "insert": 1}


def added(path: str, old: bytes | None, new: bytes | None, workdir: str) -> set[str]:
    """The directories in `workdir`, relative to it, that the file at `path` adds with its new content but not with its old one (None:
    absent).
    """
    return _directories(path, new, workdir) - _directories(path, old, workdir)


def _directories(path: str, content: bytes | None, workdir: str) -> set[str]:
    file = posixpath.normpath(posixpath.join(workdir, path))
    try:
        text = (content or b"").decode()
        if posixpath.basename(file) == "conftest.py":
            found = [posixpath.join(workdir, each) for each in _of_conftest(text, file, workdir)]
        else:
            folder = posixpath.dirname(file)
            found = [posixpath.join(folder, each) for each in _of_settings(posixpath.basename(file), text)]
    except (ValueError, SyntaxError, RecursionError, MemoryError, configparser.Error):
        return set()  # the errors of tomllib, Unicode and shlex are ValueErrors
    inside = (path_inside(each, workdir) for each in found if len(each) <= LONGEST_CHARS)
    return {each for each in inside if _PLAIN.fullmatch(each)}


def _of_settings(name: str, text: str) -> list[str]:
    tables = PYTEST.options.get(name, ())
    if not tables:
        return []
    if not name.endswith(".toml"):
        parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
        parser.read_string(text)
        return shlex.split(parser.get(tables[0], IMPORT_OPTION, fallback=None) or "")
    settings = tomllib.loads(text)
    found: list[str] = []
    for table in tables:
        said = setting(settings, *table.split("."), IMPORT_OPTION)
        if isinstance(said, str):
            found += shlex.split(said)
        elif isinstance(said, list):
            found += [value for value in cast("list[object]", said) if isinstance(value, str)]
    return found


def _of_conftest(text: str, file: str, workdir: str) -> list[str]:
    """The directories that the code adds to sys.path, in the order of its lines, if literals and __file__ alone determine them."""
    paths = _Paths(file, workdir)
    found: list[str] = []
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt | ast.Call))
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                paths.names[name] = paths.known(value)
            case _:
                found += [path for each in _added_by(node) if (path := paths.known(each))]
    return found


def _added_by(node: ast.stmt | ast.Call) -> Iterator[ast.expr]:
    """The expressions whose values `node` adds to sys.path."""
    match node:
        case ast.Call(func=ast.Attribute(attr="addsitedir"), args=[value]):
            yield value
        case ast.Call(func=ast.Attribute(attr=attr, value=to), args=values) if _is_search_path(to):
            for value in values[_ADDING.get(attr, len(values)) :]:
                yield from value.elts if isinstance(value, ast.List | ast.Tuple) else (value,)
        case ast.Assign(targets=[target], value=value) | ast.AugAssign(target=target, value=value):
            if _is_search_path(target.value if isinstance(target, ast.Subscript) else target):
                for part in ast.walk(value):
                    yield from part.elts if isinstance(part, ast.List | ast.Tuple) else ()
        case _:
            pass


def _is_search_path(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(attr="path", value=ast.Name(id="sys")):
            return True
        case _:
            return False


@dataclass(slots=True)
class _Paths:
    """Computes the values of expressions that are paths. `names` are the variables so far, None for a variable whose value is not known."""

    file: str
    workdir: str
    names: dict[str, str | None] = field(default_factory=dict[str, "str | None"])

    def known(self, node: ast.expr) -> str | None:
        """The path; None if it depends on more than literals and __file__."""
        try:
            return self._value(node)
        except ValueError:
            return None

    def _value(self, node: ast.expr) -> str:
        value = self._called(node) if isinstance(node, ast.Call) else self._read(node)
        if value is None or len(value) > LONGEST_CHARS:
            raise ValueError(f"the value in line {node.lineno} is not known")
        return value

    def _read(self, node: ast.expr) -> str | None:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id="__file__"):
                return self.file
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return posixpath.join(self._value(left), self._value(right))
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._value(left) + self._value(right)
            case ast.JoinedStr(values=parts):
                return "".join(map(self._value, parts))
            case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
                return self._value(inner)
            case ast.Attribute(value=inner, attr="parent"):
                return posixpath.dirname(self._value(inner))
            case ast.Subscript(
                value=ast.Attribute(value=inner, attr="parents"), slice=ast.Constant(value=int(number))
            ):
                levels = self._value(inner).split("/")
                return "/".join(levels[: -number - 1]) if 0 <= number < len(levels) - 1 else None
            case ast.Attribute(attr="pardir"):
                return ".."
            case ast.Attribute(attr="sep"):
                return "/"
            case _:
                return None

    def _called(self, call: ast.Call) -> str | None:
        arguments = list(call.args)
        match call.func:
            case ast.Attribute(attr=name, value=path) if name in _METHODS:
                arguments.insert(0, path)
            case ast.Attribute(attr=name) | ast.Name(id=name):
                pass
            case _:
                return None
        if name in ("getcwd", "cwd"):
            return self.workdir
        if not arguments:
            return None
        path, *rest = map(self._value, arguments)
        if name in _JOINING:
            return posixpath.join(path, *rest)
        if name == "dirname":
            return posixpath.dirname(path)
        if name == "with_name":
            return posixpath.join(posixpath.dirname(path), *rest)
        if name in _MADE_ABSOLUTE:
            return posixpath.normpath(posixpath.join(self.workdir, path))
        return path if name in _SAME else None


def searchable(listing: bytes) -> list[str]:
    """The directories in the output of `print_modules` that may be searched. None of them contains a module with the name of one of the
    runner's, of the standard library, of an installed package, or of one elsewhere in the repository.
    """
    entries: dict[str, list[str]] = defaultdict(list)
    files: list[str] = []
    packages: set[str] = set()
    taken = {*runner_modules(), *STANDARD_MODULES}
    for word in listing.decode("utf-8", "surrogateescape").split("\0"):
        kind, path = word[:1], word[1:]
        if kind == "d":
            entries[posixpath.dirname(path)].append(path)
        elif kind == "i":
            taken.add(path.partition(".")[0])
        elif kind == "p":
            packages.add(posixpath.dirname(path))
        elif kind == "f":
            files.append(path)
    packages -= {""}  # modules are imported from the root in any case
    modules = [(path, name) for path in files for name in _top_names(path, packages)]
    return [
        directory
        for directory, inside in entries.items()
        if not _names(inside)
        & (taken | {name for path, name in modules if not path.startswith(f"{directory}/")})
    ]


def _names(entries: Iterable[str]) -> set[str]:
    """The names under which modules among these files and folders are imported."""
    split = (posixpath.basename(path).partition(".") for path in entries)
    return {name for name, _, ending in split if _MODULE_ENDING.fullmatch(ending)} - NO_MODULES


def _top_names(path: str, packages: set[str]) -> set[str]:
    """The names under which a file, or a parent folder of it, can be imported from a directory that is not a package of the base.

    Only the outermost parent folder of a test counts, because the tests of a package are often in a folder of its name.
    """
    *folders, file = path.split("/")
    name = file.partition(".")[0]
    names = {name} if posixpath.dirname(path) not in packages else set[str]()
    for depth, folder in enumerate(folders[:1] if _TEST_NAME.fullmatch(name) else folders):
        if "/".join(folders[:depth]) not in packages:
            names.add(folder)
    return names - NO_MODULES
