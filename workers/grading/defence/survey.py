"""Finds the files of the repository that the eval script runs or names, and those that these files name, before the patch.

Three kinds of files are restored: files that a shell, an interpreter or `python -m` runs, or that a script sources; pytest plugins that the
repository's settings load; and other files that a script names. A correct fix may change source code, so a source file that is only named
is restored only if it is a test, a test runner, or a script, recognised by its first line or mode. Among a Python script's imports, only
files in its own directory and test runners count. Files that the known fix changes are never restored, because they are under test.
"""

import base64
import binascii
import hashlib
import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pipeline import runners
from pipeline.errors import GraderError
from pipeline.runners import LANGUAGES, PYTEST
from pipeline.task import Task
from workers.grading.defence.script_words import ScriptWords, imported_modules, loaded_plugins
from workers.grading.steps import step
from workers.sandbox.git import StartState
from workers.sandbox.protocol import CommandResult

SURVEY_S = 60.0
KEEP_BYTES = 16 * 1024 * 1024
READ_BYTES = 128 * 1024  # limit for one file
MOST_CANDIDATES = 3000
MOST_ROUNDS = 6  # rounds of reading files that other files name
MOST_SURVEYS = 256  # number of surveys that are kept
MOST_PLACES = 100
_TEST = re.compile(
    r"(?:^|[/_.-])(?:run|unit)?_?(?:test|spec|check|conftest)(?:s|ed|er|ing|suite|case|cases|runner|utils?|all|py)?(?:[/_.-]|$)"
)
_RUNNER = re.compile(r"(?:run_?(?:all_?)?tests?|tests?_?runner|_pytesttester)(?:\.py)?")
_STARTER = re.compile(r"(?:\w+_)?(?:runner|driver|suite|harness|tests?)")
_FROM_ROOT = re.compile(r"(?<![\w./~-])(?:~|\$HOME|\$\{HOME\})?((?:/[\w.-]+)+)", re.ASCII)
_SHELL_LINE = re.compile(r"#!.*\b(?:ba|da|k|z)?sh\b")
_PYTHON_LINE = re.compile(r"#!.*\bpython")
_PYTHON_PATH = re.compile(r"^\s*pythonpath\s*=\s*((?:.*\n?)(?:[ \t]+\S.*\n?|\s*[\"'].*\n?)*)", re.MULTILINE)


class BaseContainer(Protocol):
    """The container before the patch."""

    start: StartState

    @property
    def image(self) -> str: ...

    @property
    def workdir(self) -> str: ...

    async def run(
        self, command: str, *, timeout_s: float, keep_bytes: int = ..., plain: bool = False
    ) -> CommandResult: ...


@dataclass(frozen=True, slots=True)
class Surveyed:
    """The facts about the run that the eval script and the files that it names determine."""

    paths: tuple[str, ...] = ()  # files in the workdir that are restored, or removed if the image lacks them
    searched: tuple[str, ...] = ()  # directories in the workdir that Python searches before its own
    program_directories: tuple[str, ...] = ()  # directories in the workdir that are on the PATH
    # Directories that the scripts name, by absolute paths or from home, and the parent directories of these.
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    """A file of the repository. `is_script`: it is executable, or begins with `#!`."""

    is_script: bool
    text: str


class Surveys:
    """The results of surveys. A result can be reused because it is made before the patch: it depends only on the task and its image.

    We assume that a tag means the same image for as long as the process lives, if its repository has the same commit.
    """

    def __init__(self, most: int = MOST_SURVEYS) -> None:
        self._most = most
        # The key is a digest of everything that a survey depends on. The least recently used is first.
        self._made: dict[bytes, Surveyed] = {}

    async def survey(
        self, container: BaseContainer, task: Task, *, hidden: Iterable[str], under_test: Iterable[str]
    ) -> Surveyed:
        """Reads the files of the repository that the task's eval script names. `hidden` are the paths of the hidden tests,
        `under_test` the files that the known fix changes.

        Call it before the patch is applied.
        """
        hidden, under_test = tuple(hidden), tuple(under_test)
        script, variables = task.verdict.eval_script, sorted(task.env.items())
        base = (
            container.image,
            container.start.commit,
            container.workdir,
            task.setup_script,
            task.setup_patch,
        )
        key = hashlib.sha256(repr((base, script, variables, hidden, under_test)).encode()).digest()
        made = self._made.pop(key, None) or await _survey(
            container, script, variables=task.env, hidden=hidden, under_test=frozenset(under_test)
        )
        self._made[key] = made
        while len(self._made) > self._most:
            del self._made[next(iter(self._made))]
        return made


async def _survey(
    container: BaseContainer,
    script: str,
    *,
    variables: Mapping[str, str],
    hidden: tuple[str, ...],
    under_test: frozenset[str],
) -> Surveyed:
    reading = _Reading(container.workdir, {**variables, "PWD": container.workdir})
    reading.script(script, "")
    first = bool(PYTEST.named.search(script))
    for _ in range(MOST_ROUNDS):
        wanted = reading.unknown()
        if not wanted and not first:
            break
        found = await _look(container, wanted, conftests=first)
        first = False
        reading.add(wanted, found)
    return reading.result(hidden=hidden, under_test=under_test)


async def _look(container: BaseContainer, paths: Iterable[str], *, conftests: bool) -> dict[str, _Found]:
    listed = base64.b64encode("\n".join(paths).encode("utf-8", "surrogateescape") + b"\n").decode()
    script = step("look_at_files", LISTED=listed, READ_BYTES=str(READ_BYTES), CONFTESTS=str(int(conftests)))
    result = await container.run(script, timeout_s=SURVEY_S, keep_bytes=KEEP_BYTES, plain=True)
    if result.exit_code != 0 or result.dropped_bytes:
        raise GraderError(f"looking at the script's files ended with status {result.exit_code}")
    found: dict[str, _Found] = {}
    for line in result.output.splitlines():
        try:
            path, kind, content = line.split(b" ")
            name = base64.b64decode(path).decode("utf-8", "surrogateescape")
            found[name] = _Found(kind == b"x", base64.b64decode(content).decode("utf-8", "replace"))
        except (ValueError, binascii.Error) as error:
            raise GraderError(f"unreadable list of the script's files: {line[:200]!r}") from error
    return found


@dataclass(slots=True)
class _Reading:
    """The files read so far. Paths are relative to the workdir."""

    workdir: str
    variables: Mapping[str, str]
    words: ScriptWords = field(default_factory=ScriptWords)
    folders: set[str] = field(default_factory=lambda: {"."})  # directories to which names may be relative
    searched: set[str] = field(default_factory=lambda: {"."})
    on_path: set[str] = field(default_factory=set[str])
    # None: the file does not exist
    known: dict[str, _Found | None] = field(default_factory=dict[str, "_Found | None"])
    run: set[str] = field(default_factory=set[str])  # files that are run or loaded, whether they exist or not
    imported: set[str] = field(default_factory=set[str])
    named: set[str] = field(default_factory=set[str])
    places: set[str] = field(default_factory=set[str])  # see `Surveyed.places`

    def script(self, text: str, folder: str) -> None:
        """Reads a shell script in `folder`, or the eval script."""
        words = ScriptWords()
        words.read(text, self.variables)
        self.folders.update(self._inside((folder,) if folder else (), {"."}))
        self.folders |= self._inside(words.entered, self.folders)
        self.searched |= self._inside(words.entered, self.folders)
        self.searched |= self._inside(words.on_python_path, self.folders)
        self.on_path |= self._inside(words.on_path, self.folders) - {""}
        near = {*self.folders, *((folder,) if folder else ())}
        self.run |= self._inside(words.runs, near) | self._inside(words.programs, self.on_path)
        self.named |= self._inside(words.names, near)
        self.places |= _places(text)
        self._modules(words.modules)
        self._modules(name for name in words.imports if _STARTER.fullmatch(name.rpartition(".")[2]))
        used = (one for one in runners.RUNNERS if words.programs.intersection(one.programs))
        self.named |= self._inside(
            (*PYTEST.options, *(name for one in used for name in one.commands_in)), self.folders
        )
        self.words.programs |= words.programs

    def unknown(self) -> list[str]:
        """Paths that may be files and have not been read."""
        named = self.named | self._inside(_module_files(self.named), {"."})
        wanted = {*self.run, *self.imported, *named} - self.known.keys()
        return sorted(path for path in wanted if "\n" not in path and path not in (".", ""))[:MOST_CANDIDATES]

    def add(self, wanted: Iterable[str], found: Mapping[str, _Found]) -> None:
        """Adds the contents of files that were read, and follows those that name others."""
        for path in wanted:
            self.known[path] = found.get(path)
        for path, file in found.items():
            self.known[path] = file
            self._follow(path, file)

    def _follow(self, path: str, file: _Found) -> None:
        name, folder = posixpath.basename(path), posixpath.dirname(path) or "."
        if name == "conftest.py":
            self._modules(loaded_plugins(file.text), (folder, "."))
        elif name in PYTEST.options or is_manifest(path):
            self._settings(name, folder, file.text)
        elif path.endswith(".py") or _PYTHON_LINE.match(file.text):
            if path in self.run or _RUNNER.fullmatch(name):
                self._python(folder, file.text)
        elif _SHELL_LINE.match(file.text) or path.endswith(".sh") or self._is_plain_script(path, file):
            self.script(file.text, folder)

    def _is_plain_script(self, path: str, file: _Found) -> bool:
        return (
            path in self.run
            and not file.text.startswith("#!")
            and not _is_source(path)
            and "\0" not in file.text
        )

    def _settings(self, name: str, folder: str, text: str) -> None:
        self._modules(re.findall(r"(?:^|[\s\"'])-p[\s=\"',]*(?!no:)([A-Za-z_][\w.]*)", text), (folder,))
        for value in _PYTHON_PATH.findall(text):
            self.searched |= self._inside(re.findall(r"[\w./-]+", value), {folder})
        if name == "package.json":
            self.script(_npm_scripts(text), folder)
        elif "makefile" in name.lower():
            self.script(re.sub(r"^\t[@+-]*", "", text, flags=re.MULTILINE), folder)
        elif name == "tox.ini":
            self.script(text.replace(" = ", "\n"), folder)

    def _python(self, folder: str, text: str) -> None:
        """Reads a Python script that is run: Python searches its folder first."""
        self.searched.add(folder)
        files = self._inside(_module_files(imported_modules(text)), {".", folder})
        beside = (
            {path for path in files if posixpath.dirname(path) == folder} if folder != "." else set[str]()
        )
        self.imported |= {path for path in files - beside if _RUNNER.fullmatch(posixpath.basename(path))}
        self.run |= {path for path in beside if posixpath.basename(path) != "__init__.py"}
        named = re.findall(r"[\"']([\w./-]+\.(?:py|sh|cfg|ini|toml))[\"']", text)
        self.imported |= {
            path for path in self._inside(named, {".", folder}) if _RUNNER.fullmatch(posixpath.basename(path))
        }

    def _modules(self, names: Iterable[str], folders: Iterable[str] = ()) -> None:
        """Adds modules that are run or loaded, in all directories in which Python may find them."""
        names = [name for name in names if name]
        files = [*_module_files(names), *(f"{name.replace('.', '/')}/__main__.py" for name in names)]
        self.run |= self._inside(files, {*self.folders, *self.searched, *folders, "src"})

    def _inside(self, paths: Iterable[str], folders: Iterable[str]) -> set[str]:
        """The paths that are inside the workdir, relative to each of `folders`."""
        inside: set[str] = set()
        for path in paths:
            if not path or len(path) > 300 or "\0" in path:
                continue
            for folder in folders if not path.startswith("/") else (".",):
                absolute = posixpath.normpath(posixpath.join(self.workdir, folder, path))
                if absolute == self.workdir:
                    inside.add(".")
                elif absolute.startswith(f"{self.workdir}/") and not absolute.startswith(
                    f"{self.workdir}/.git/"
                ):
                    inside.add(absolute[len(self.workdir) + 1 :])
        return inside

    def result(self, *, hidden: tuple[str, ...], under_test: frozenset[str]) -> Surveyed:
        paths = {path for path in self.run if path != "." and not self._is_package(path)}
        paths |= {path for path in self.imported if _RUNNER.fullmatch(posixpath.basename(path))}
        paths |= {
            path
            for path in self.named | self._inside(_module_files(self.named), {"."})
            if self._governs(path)
        }
        paths |= {f"{folder}/__init__.py" for path in hidden for folder in _test_folders(path)}
        paths = {path for path in paths if not is_manifest(path)} - under_test
        return Surveyed(
            paths=tuple(sorted(paths)),
            searched=tuple(sorted(self.searched)),
            program_directories=tuple(sorted(self.on_path)),
            places=tuple(sorted(self.places, key=lambda path: (path.count("/"), path))[:MOST_PLACES]),
        )

    def _is_package(self, path: str) -> bool:
        """Whether this file makes a folder a package of the image. Scripts may run the code under test as a module of a package."""
        return posixpath.basename(path) == "__init__.py" and self.known.get(path) is not None

    def _governs(self, path: str) -> bool:
        file = self.known.get(path)
        if file is None:
            return False
        return not _is_source(path) or file.is_script or bool(_TEST.search(path))


def is_manifest(path: str) -> bool:
    """Whether a file is a package manifest: a script may name it, but a fix may change much in it.

    In some manifests, the part that configures the test runner is restored (governing.py).
    """
    return any(posixpath.basename(path) in language.manifests for language in LANGUAGES)


def _is_source(path: str) -> bool:
    name = posixpath.basename(path)
    return any(name.endswith(f".{ending}") for language in LANGUAGES for ending in language.endings)


def _places(text: str) -> set[str]:
    places: set[str] = set()
    for found in _FROM_ROOT.finditer(text):
        home = "" if found[0].startswith("/") else "~"
        parts = found[1].split("/")
        places.update(home + "/".join(parts[:end]) for end in range(2, len(parts) + 1))
    return places


def _module_files(names: Iterable[str]) -> list[str]:
    """The files that may contain a module with one of these names."""
    paths = [name.replace(".", "/") for name in names if re.fullmatch(r"[A-Za-z_]\w*(?:\.\w+)*", name)]
    return [f"{path}{ending}" for path in paths for ending in (".py", "/__init__.py")]


def _test_folders(path: str) -> list[str]:
    """The parent folders of a test, beginning with the first whose name is that of a tests folder."""
    folders = path.split("/")[:-1]
    first = next((index for index, folder in enumerate(folders) if _TEST.search(folder)), len(folders))
    return ["/".join(folders[: end + 1]) for end in range(first, len(folders))]


def _npm_scripts(text: str) -> str:
    try:
        scripts = json.loads(text)["scripts"].values()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    return "\n".join(script for script in scripts if isinstance(script, str))
