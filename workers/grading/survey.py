"""Which files of the repository the eval script runs or names, and which of them name others in turn, before the patch.

Restored are files that are run, by a shell, an interpreter or `python -m`, and those that a script sources; plugins of pytest
that the repository's settings load; and other files that a script names, but for source code, which a right fix may change:
of that only tests, test runners, and scripts by their first line or mode. Of what a Python script imports, what lies beside
it and test runners count. What the known fix changes is never restored: it is under test.
"""

import base64
import binascii
import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.errors import GraderError
from pipeline.task import Task
from workers.grading.closing_line import RUNS_PYTEST
from workers.grading.script_words import ScriptWords, imported_modules, loaded_plugins
from workers.sandbox.protocol import CommandResult

SURVEY_S = 60.0
KEEP_BYTES = 16 * 1024 * 1024
READ_BYTES = 128 * 1024  # of one file
MOST_CANDIDATES = 3000
MOST_ROUNDS = 6  # of files that name files
MOST_SURVEYS = 256  # that are kept
MOST_PLACES = 100
# In the workdir or in a directory that the script enters.
SETTINGS = (
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
)
# Those that name commands, by the programs that run these.
OF_PROGRAMS = {
    "make": ("GNUmakefile", "makefile", "Makefile"),
    "npm": ("package.json",),
    "yarn": ("package.json",),
    "pnpm": ("package.json",),
    "tox": ("tox.ini",),
}
# Files that are named and yet hold much that a fix may change. Of some of them the runner's part is restored (governing.py).
MANIFESTS = frozenset(
    [
        "CMakeLists.txt",
        "Cargo.lock",
        "Cargo.toml",
        "GNUmakefile",
        "Gemfile",
        "Makefile",
        "build.gradle",
        "build.gradle.kts",
        "go.mod",
        "go.sum",
        "makefile",
        "package-lock.json",
        "package.json",
        "pom.xml",
        "pyproject.toml",
        "setup.cfg",
        "yarn.lock",
    ]
)
_SOURCE = re.compile(
    r".*\.(?:py|pyi|pyx|pxd|[ch]|cc|cpp|cxx|hh|hpp|rs|go|java|kt|scala|[cm]?[jt]sx?|rb|php|p[lm]|lua|cs|swift|hs|mli?"
    r"|erl|exs?|cljs?|R|jl|sql)"
)
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
    """The container as it is before the patch."""

    head: str

    @property
    def image(self) -> str: ...

    @property
    def workdir(self) -> str: ...

    async def run(
        self, command: str, *, timeout_s: float, keep_bytes: int = ..., plain: bool = False
    ) -> CommandResult: ...


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What the eval script and the files that it names say of the run."""

    paths: tuple[str, ...] = ()  # files in the workdir that are restored, or removed if the image lacks them
    searched: tuple[str, ...] = ()  # directories in the workdir that Python searches before its own
    program_directories: tuple[str, ...] = ()  # directories in the workdir that are on the PATH
    # Directories that the scripts name, from the root or from home, and those on the way to them.
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    """A file of the repository. `is_script`: it is executable, or begins with `#!`."""

    is_script: bool
    text: str


# Prints a line for each file among its arguments, a newline-separated list in base64: path, "x" for a script or "-", content.
# With a second argument also for each conftest.py that names plugins.
LOOK = f"""
look() {{
  local path kind
  while IFS= read -r path; do
    [ -f "$path" ] || continue
    kind=-
    [ -x "$path" ] && kind=x
    IFS= read -r -n 2 start <"$path" 2>/dev/null
    [ "$start" = '#!' ] && kind=x
    echo "$(printf %s "$path" | base64 -w 0) $kind $(head -c {READ_BYTES} "$path" | base64 -w 0)"
  done
}}
base64 -d <<<"$1" | look 2>/dev/null
[ -z "$2" ] || git ls-files -z -- conftest.py '*/conftest.py' | xargs -0 -r grep -l pytest_plugins -- | look 2>/dev/null
true
"""


class Surveys:
    """What surveys found. One that was made is kept, because it is made before the patch: only the task and its image matter.

    We assume that a tag means the same image for as long as the process lives, where its repository has the same commit.
    """

    def __init__(self, most: int = MOST_SURVEYS) -> None:
        self._most = most
        # By a digest of all that they depend on; those used last stand last.
        self._made: dict[bytes, Surveyed] = {}

    async def survey(
        self, container: BaseContainer, task: Task, *, hidden: Iterable[str], under_test: Iterable[str]
    ) -> Surveyed:
        """Reads the files of the repository that the task's eval script names. `hidden` are the paths of the hidden tests,
        `under_test` the files that the known fix changes.

        To be called before the patch is applied.
        """
        hidden, under_test = tuple(hidden), tuple(under_test)
        script, variables = task.verdict.eval_script, sorted(task.env.items())
        base = (container.image, container.head, container.workdir, task.setup_script, task.setup_patch)
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
    first = bool(RUNS_PYTEST.search(script))
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
    arguments = shlex.join((listed, "conftests" if conftests else ""))
    result = await container.run(
        f"set -- {arguments}\n{LOOK}", timeout_s=SURVEY_S, keep_bytes=KEEP_BYTES, plain=True
    )
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
    """What has been read so far. Paths are relative to the workdir."""

    workdir: str
    variables: Mapping[str, str]
    words: ScriptWords = field(default_factory=ScriptWords)
    folders: set[str] = field(default_factory=lambda: {"."})  # that names may be relative to
    searched: set[str] = field(default_factory=lambda: {"."})
    on_path: set[str] = field(default_factory=set[str])
    known: dict[str, _Found | None] = field(default_factory=dict[str, "_Found | None"])  # None: not there
    run: set[str] = field(default_factory=set[str])  # files that are run or loaded, there or not
    imported: set[str] = field(default_factory=set[str])
    named: set[str] = field(default_factory=set[str])
    places: set[str] = field(default_factory=set[str])  # see `Surveyed.places`

    def script(self, text: str, folder: str) -> None:
        """Reads a shell script that lies in `folder`, or the eval script."""
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
        read_by = {name for program in words.programs for name in OF_PROGRAMS.get(program, ())}
        self.named |= self._inside((*SETTINGS, *read_by), self.folders)
        self.words.programs |= words.programs

    def unknown(self) -> list[str]:
        """Paths that may be files and have not been looked at."""
        named = self.named | self._inside(_module_files(self.named), {"."})
        wanted = {*self.run, *self.imported, *named} - self.known.keys()
        return sorted(path for path in wanted if "\n" not in path and path not in (".", ""))[:MOST_CANDIDATES]

    def add(self, wanted: Iterable[str], found: Mapping[str, _Found]) -> None:
        """Takes in what is in the files that were looked at, and reads those that name others in turn."""
        for path in wanted:
            self.known[path] = found.get(path)
        for path, file in found.items():
            self.known[path] = file
            self._follow(path, file)

    def _follow(self, path: str, file: _Found) -> None:
        name, folder = posixpath.basename(path), posixpath.dirname(path) or "."
        if name == "conftest.py":
            self._modules(loaded_plugins(file.text), (folder, "."))
        elif name in SETTINGS or name in MANIFESTS:
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
            and not _SOURCE.fullmatch(path)
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
        """Notes modules that are run or loaded, wherever Python may find them."""
        names = [name for name in names if name]
        files = [*_module_files(names), *(f"{name.replace('.', '/')}/__main__.py" for name in names)]
        self.run |= self._inside(files, {*self.folders, *self.searched, *folders, "src"})

    def _inside(self, paths: Iterable[str], folders: Iterable[str]) -> set[str]:
        """The paths that lie in the workdir, relative to each of `folders`."""
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
        paths = {path for path in paths if posixpath.basename(path) not in MANIFESTS} - under_test
        return Surveyed(
            paths=tuple(sorted(paths)),
            searched=tuple(sorted(self.searched)),
            program_directories=tuple(sorted(self.on_path)),
            places=tuple(sorted(self.places, key=lambda path: (path.count("/"), path))[:MOST_PLACES]),
        )

    def _is_package(self, path: str) -> bool:
        """Whether this is the image's package that a module is run from: what is under test may be run so."""
        return posixpath.basename(path) == "__init__.py" and self.known.get(path) is not None

    def _governs(self, path: str) -> bool:
        file = self.known.get(path)
        if file is None:
            return False
        return not _SOURCE.fullmatch(path) or file.is_script or bool(_TEST.search(path))


def _places(text: str) -> set[str]:
    places: set[str] = set()
    for found in _FROM_ROOT.finditer(text):
        home = "" if found[0].startswith("/") else "~"
        parts = found[1].split("/")
        places.update(home + "/".join(parts[:end]) for end in range(2, len(parts) + 1))
    return places


def _module_files(names: Iterable[str]) -> list[str]:
    """The files that a module of one of these names may be in."""
    paths = [name.replace(".", "/") for name in names if re.fullmatch(r"[A-Za-z_]\w*(?:\.\w+)*", name)]
    return [f"{path}{ending}" for path in paths for ending in (".py", "/__init__.py")]


def _test_folders(path: str) -> list[str]:
    """The folders on the way to a test, from the first on that has tests by its name."""
    folders = path.split("/")[:-1]
    first = next((index for index, folder in enumerate(folders) if _TEST.search(folder)), len(folders))
    return ["/".join(folders[: end + 1]) for end in range(first, len(folders))]


def _npm_scripts(text: str) -> str:
    try:
        scripts = json.loads(text)["scripts"].values()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    return "\n".join(script for script in scripts if isinstance(script, str))
