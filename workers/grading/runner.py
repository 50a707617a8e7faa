"""How a patch can manipulate the test runner instead of fixing the code, and which traces that leaves in a log.

Two defences are here: files that govern the runner are restored to what the image has, or removed; and where the witness
did not report, an exit status of 0 counts only if the runner's own closing line agrees.
"""

import configparser
import json
import re
import sys
import tomllib
from dataclasses import dataclass
from functools import cached_property
from typing import cast

# Restored whole if a patch touches one: they govern how tests run, or run code in every Python process.
CONTROL_NAMES = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "sitecustomize.py",
    "usercustomize.py",
    "*.pth",
    "*.egg-link",
    ".gitattributes",
    ".coveragerc",
    "jest.config.*",
    "vitest.config.*",
    "karma.conf.*",
    ".mocharc*",
    ".rspec",
    "phpunit.xml*",
)
# The same for directories with all their content: entry points make plugins.
CONTROL_DIRECTORIES = ("*.egg-info", "*.dist-info")
# The same for files that a program reads, if the eval script runs that program.
NAMES_OF_PROGRAMS = {
    "direnv": (".envrc",),
    "dotenv": (".env",),
    "grunt": ("Gruntfile.*",),
    "gulp": ("gulpfile.*",),
    "just": ("justfile", "Justfile", ".justfile"),
    "nox": ("noxfile.py",),
    "pipenv": (".env",),
    "rake": ("Rakefile", "rakefile"),
    "tox": ("toxfile.py",),
}
# Restored if a patch changes what they tell the runner. They contain much else that a fix may rightly change.
SETTINGS_NAMES = ("setup.cfg", "pyproject.toml", "package.json")
LOADERS = ("test/__init__.py", "tests/__init__.py", "*/test/__init__.py", "*/tests/__init__.py")
MAKEFILE_NAMES = ("GNUmakefile", "makefile", "Makefile")  # if the eval script runs make

# New modules of these names are removed wherever they are: Python would import them in place of the runner's, or at its
# start.
RUNNER_MODULES = (
    "_pytest",
    "attr",
    "attrs",
    "colorama",
    "conftest",
    "coverage",
    "exceptiongroup",
    "execnet",
    "importlib_metadata",
    "iniconfig",
    "nose",
    "packaging",
    "pkg_resources",
    "pluggy",
    "py",
    "pygments",
    "pytest",
    "setuptools",
    "sitecustomize",
    "six",
    "tomli",
    "typing_extensions",
    "unittest2",
    "usercustomize",
    "xdist",
    "zipp",
)
# The same, in directories that Python may search first, for libraries that the image has installed and tests check with.
CHECKING_MODULES = (
    "asynctest",
    "ddt",
    "flexmock",
    "freezegun",
    "hamcrest",
    "hypothesis",
    "mock",
    "numpy",
    "pandas",
    "parameterized",
    "pyfakefs",
    "requests_mock",
    "responses",
    "sure",
    "testfixtures",
    "testtools",
)
# New modules of these names are removed from directories that Python may search first.
STANDARD_MODULES = tuple(
    sorted(
        sys.stdlib_module_names
        - {
            "antigravity",
            "ensurepip",
            "idlelib",
            "lib2to3",
            "test",
            "this",
            "tkinter",
            "turtle",
            "turtledemo",
            "venv",
        }
    )
)

_HEADER = re.compile(
    rb"^(?:diff --git|---|\+\+\+|rename (?:from|to)|copy (?:from|to)|Index:) (.*)$", re.MULTILINE
)
_ESCAPE = re.compile(rb"\\[0-7]{3}")  # git quotes names; an escaped letter may hide any name
_ESCAPED_ASCII = re.compile(rb"\\[01][0-7]{2}")  # git itself never escapes a letter or a dot

_SCRIPT_RUN = re.compile(
    r"(?:^|[;&|(]|\bthen\b|\bdo\b)\s*(?:exec\s+|time\s+)?(?:(?:/\S*/)?(?:bash|sh|source|\.)\s+(?:-\w+\s+)*)?([\w./-]+)",
    re.MULTILINE,
)
_SOURCED = re.compile(
    r"(?:^|[;&|(]|\bthen\b|\bdo\b)\s*(?:source|\.)\s+[\"']?(?=\S*[./])([\w./-]+)", re.MULTILINE
)
_NAMED_TEST = re.compile(r"[./].*(?:test|check|spec|eval)|(?:test|check|spec|eval).*[./]", re.IGNORECASE)
_MAKES = re.compile(r"(?:^|[\s;&|(/])make\b([^\n;&|)]*)", re.MULTILINE)
_SETS_PATH = re.compile(r"(?:^|[\s;&|(])PATH=(\S+)", re.MULTILINE)
_HERE = re.compile(r"\$PWD\b|\$\{PWD\}|\$\(pwd\)|`pwd`")
_CHANGES_DIRECTORY = re.compile(r"\b(?:cd|pushd)\s+[\"']?([\w./-]+)")

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_INSTALLS = re.compile(r"\b(?:pip3?|conda|mamba|apt-get|apt|uv|poetry)\b.*\b(?:install|add)\b")
_RUNS_PYTEST = re.compile(r"(?:^|[\s;&|(/!`])(?:pytest|py\.test)(?:$|[\s;&|)`])")
_RUNS_UNITTEST = re.compile(r"\s-m\s+unittest\b")
_ENDS_AT_FAILURE = re.compile(r"^\s*set\s+-\w*e", re.MULTILINE)
_TOLERATES_FAILURE = re.compile(
    r"[|&!`]|\$\(|\(\)|<<|\b(?:if|while|until|case|trap|eval|function)\b|\bset\s+\+\w*e"
)
_PYTEST_STARTS = re.compile(r"^=+ test session starts =+$", re.MULTILINE)
_PYTEST_ENDS = re.compile(
    r"^(?:=+ )?(\d+ [a-z]+(?: [a-z]+)?(?:, \d+ [a-z]+(?: [a-z]+)?)*)"
    r" in [\d.]+ ?s(?:econds)?(?: \([\d:]+\))?(?: =+)?$",
    re.MULTILINE,
)
_UNITTEST_ENDS = re.compile(r"^Ran [1-9]\d* tests? in [\d.]+s\n+OK(?: \(.*\))?$", re.MULTILINE)


@dataclass(frozen=True)
class Control:
    """The files that govern the runner of the eval script `script`, which runs in `workdir`."""

    script: str
    workdir: str

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of files that are restored whole; `*` as in a shell."""
        read = [names for program, names in NAMES_OF_PROGRAMS.items() if _uses(self.script, program)]
        return (*CONTROL_NAMES, *dict.fromkeys(name for names in read for name in names))

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """Names of files that are restored only if they tell the runner something else."""
        return (*SETTINGS_NAMES, *(MAKEFILE_NAMES if _uses(self.script, "make") else ()))

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths in the workdir, `*` as in a shell: files that a shell runs as part of the script and that are tests by their
        name; files that a script of Python tests sources; and packages' own modules that choose tests.
        """
        words = {
            word for word in _SCRIPT_RUN.findall(self.script) if _NAMED_TEST.search(self._in_workdir(word))
        }
        if _RUNS_PYTEST.search(self.script) or _RUNS_UNITTEST.search(self.script):
            words.update(_SOURCED.findall(self.script))
        inside = {self._in_workdir(word) for word in words} - {""}
        return tuple(sorted({*inside, *(LOADERS if _RUNS_UNITTEST.search(self.script) else ())}))

    @cached_property
    def directories(self) -> tuple[str, ...]:
        """Directories in the workdir that Python may search before its own; the environment may name further ones."""
        entered = (self._in_workdir(word) for word in _CHANGES_DIRECTORY.findall(self.script))
        return tuple(sorted({".", "src", *(word for word in entered if word)}))

    @cached_property
    def program_directories(self) -> tuple[str, ...]:
        """Directories in the workdir that the script puts on the PATH."""
        entries = [entry for words in _SETS_PATH.findall(self.script) for entry in words.split(":")]
        inside = (self._in_workdir(_HERE.sub(self.workdir, entry.strip("\"'"))) for entry in entries)
        return tuple(sorted({entry for entry in inside if entry and "$" not in entry}))

    @cached_property
    def _touching(self) -> re.Pattern[bytes]:
        files = (*self.names, *self.settings, *(path.rpartition("/")[2] for path in self.paths))
        modules = "|".join(map(re.escape, (*RUNNER_MODULES, *CHECKING_MODULES, *STANDARD_MODULES)))
        either = "|".join(
            (
                *(_as_regex(name) for name in files),
                *(rf"{_as_regex(name)}(?:/[^\s\"]*)?" for name in CONTROL_DIRECTORIES),
                rf"(?:{modules})(?:\.(?:py|pyc|[^/\s\"]*so)|/__init__\.[^/\s\"]*)?",
            )
        )
        return re.compile(rf"(?:^|[\s/\"])(?:{either})(?:[\s\"]|$)".encode())

    def touched_by(self, patch: bytes) -> bool:
        """Whether `patch` may touch any of these files. It may say yes too often, never no too often."""
        touching = self._touching
        return any(touching.search(header) or _ESCAPE.search(header) for header in _HEADER.findall(patch))

    def _in_workdir(self, path: str) -> str:
        """`path` relative to the workdir, "" if it lies elsewhere."""
        inside = path.removeprefix(f"{self.workdir}/") if path != self.workdir else "."
        inside = inside.removeprefix("./").rstrip("/") or "."
        return "" if inside.startswith(("/", "..")) else inside


def hides_names(patch: bytes) -> bool:
    """Whether a header of `patch` writes a plain letter as a number, as git never does."""
    return any(_ESCAPED_ASCII.search(header) for header in _HEADER.findall(patch))


def same_runner_settings(name: str, old: bytes | None, new: bytes | None, script: str = "") -> bool:
    """Whether both contents of the settings file `name` (None: absent) mean the same to the runner of `script`."""
    try:
        return _runner_settings(name, old, script) == _runner_settings(name, new, script)
    except (ValueError, RecursionError, configparser.Error):
        return False  # unreadable now: tomllib's, JSON's and Unicode's errors are ValueErrors


def num_pytest_sessions(log: str) -> int:
    """Number of pytest sessions whose start `log` shows."""
    return len(_PYTEST_STARTS.findall(_plain(log)))


def contradiction(script: str, log: str) -> str | None:
    """Why `log` contradicts an exit status of 0 of `script`; None if it does not.

    A pytest run must close with its summary (at most one `-q`), a unittest run with its OK. Other runners are not checked.
    """
    plain = _plain(log)
    commands = [
        line
        for line in script.splitlines()
        if not line.lstrip().startswith("#") and not _INSTALLS.search(line)
    ]
    if any(_RUNS_PYTEST.search(line) for line in commands) or _PYTEST_STARTS.search(plain):
        return _pytest_contradiction(plain)
    if any(_RUNS_UNITTEST.search(line) for line in commands) and not _UNITTEST_ENDS.search(plain):
        return "unittest did not report OK"
    return None


def each_must_pass(script: str, num_runs: int) -> bool:
    """Whether `script`, in which `num_runs` test runs were seen, would have failed if any of them had. False if in doubt."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    runs = [line for line in lines if _RUNS_PYTEST.search(line) or _RUNS_UNITTEST.search(line)]
    plain = not any(_TOLERATES_FAILURE.search(line) for line in lines)
    return plain and len(runs) == num_runs and any(_ENDS_AT_FAILURE.search(line) for line in lines)


def _plain(log: str) -> str:
    return _ANSI.sub("", log).replace("\r\n", "\n")


def _pytest_contradiction(log: str) -> str | None:
    summaries: list[str] = _PYTEST_ENDS.findall(log)
    if not summaries:
        return "pytest did not report its end"
    counts = {words.split(" ", 1)[1]: int(words.split(" ", 1)[0]) for words in summaries[-1].split(", ")}
    if counts.keys() & {"failed", "error", "errors"}:
        return f"pytest reported {summaries[-1]}"
    if not counts.get("passed"):
        return f"pytest passed no test: {summaries[-1]}"
    return None


def _as_regex(name: str) -> str:
    return re.escape(name).replace(r"\*", r"[^/\s]*")


def _uses(script: str, program: str) -> bool:
    return re.search(rf"(?:^|[\s;&|(/]){program}(?:$|[\s;&|)])", script, re.MULTILINE) is not None


def _runner_settings(name: str, content: bytes | None, script: str) -> object:
    if content is None:
        return None
    text = content.decode()
    match name:
        case "pyproject.toml":
            settings = tomllib.loads(text)
            ways = (("tool", "pytest"), ("tool", "tox"), ("project", "entry-points", "pytest11"))
            return _said([_at(settings, *way) for way in (*ways, ("tool", "poetry", "plugins", "pytest11"))])
        case "package.json":
            settings = json.loads(text)
            return _said([_at(settings, key) for key in ("scripts", "jest", "mocha", "ava")])
        case "setup.cfg":
            return _of_setup_cfg(text)
        case _:
            return _of_makefile(text, script)


def _at(settings: object, *keys: str) -> object:
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
        if "pytest" in section or section.startswith("tox")
    }
    plugins = parser.get("options.entry_points", "pytest11", fallback=None)
    lines = [line for line in text.splitlines() if "pytest" in line] if sections else []
    return _said([sections, plugins, lines])


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
