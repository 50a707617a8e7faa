"""The files that govern the test runner: a patch could manipulate the runner by them instead of fixing the code.

They are restored to what the image has, or removed.
"""

import configparser
import json
import posixpath
import re
import sys
import tomllib
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from pipeline.task import ExitCode, SwebenchLog, Verdict
from workers.grading.closing_line import RUNS_UNITTEST
from workers.grading.survey import Surveyed
from workers.grading.witness import touched_paths

# Restored whole if a patch touches one: they govern how tests run, or run code in every Python process.
GOVERNING_NAMES = (
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
    "pyvenv.cfg",
)
# The same for directories with all their content: entry points make plugins.
GOVERNING_DIRECTORIES = ("*.egg-info", "*.dist-info")
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
# What makes a directory a virtual environment, in which pytest looks for no tests.
VIRTUAL_ENVIRONMENTS = ("*/bin/activate*", "*/Scripts/activate*", "*/conda-meta/history")
MAKEFILE_NAMES = ("GNUmakefile", "makefile", "Makefile")  # if the eval script runs make

# New modules of these names are removed from the directories that Python searches first, wherever these libraries are.
RUNNER_MODULES = (
    "_pytest",
    "conftest",
    "pluggy",
    "py",
    "pytest",
    "sitecustomize",
    "unittest2",
    "usercustomize",
    "xdist",
)
# The same for Python's own modules, and for those that are installed in the image.
NEVER_IN_THE_WAY = {"antigravity", "idlelib", "lib2to3", "test", "this", "tkinter", "turtle", "turtledemo"}
STANDARD_MODULES = tuple(sorted(sys.stdlib_module_names - NEVER_IN_THE_WAY))

_HEADER = re.compile(
    rb"^(?:diff --git|---|\+\+\+|rename (?:from|to)|copy (?:from|to)|Index:) (.*)$", re.MULTILINE
)
_RENAMED = re.compile(r"^rename (?:from|to) (.*)$", re.MULTILINE)
_ESCAPE = re.compile(rb"\\[0-7]{3}")  # git quotes names; an escaped letter may hide any name
_ESCAPED_ASCII = re.compile(rb"\\[01][0-7]{2}")  # git itself never escapes a letter or a dot

_NAMED_TEST = re.compile(r"[./].*(?:test|check|spec|eval)|(?:test|check|spec|eval).*[./]", re.IGNORECASE)
_MAKES = re.compile(r"(?:^|[\s;&|(/])make\b([^\n;&|)]*)", re.MULTILINE)


@dataclass(frozen=True)
class GoverningFiles:
    """The files that govern the runner of the eval script `script`. `surveyed` is what it and its files name."""

    script: str
    surveyed: Surveyed

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of files that are restored whole; `*` as in a shell."""
        read = [names for program, names in NAMES_OF_PROGRAMS.items() if _uses(self.script, program)]
        return (*GOVERNING_NAMES, *dict.fromkeys(name for names in read for name in names))

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """Names of files that are restored only if they tell the runner something else."""
        return (*SETTINGS_NAMES, *(MAKEFILE_NAMES if _uses(self.script, "make") else ()))

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths in the workdir of further files that are restored whole, `*` as in a shell."""
        loaders = LOADERS if RUNS_UNITTEST.search(self.script) else ()
        return (*self.surveyed.paths, *loaders, *VIRTUAL_ENVIRONMENTS)

    @cached_property
    def restored(self) -> tuple[str, ...]:
        """Files that are as the image has them when the tests run: names, `*` as in a shell, and paths after a slash."""
        return (*self.names, *(f"/{path}" for path in self.surveyed.paths))

    @cached_property
    def _touching(self) -> re.Pattern[bytes]:
        # A link may stand in for any folder of a path.
        on_the_way = {part for path in self.paths for part in path.split("/")} - {"*"}
        files = (*self.names, *self.settings, *sorted(on_the_way))
        either = "|".join(
            (
                *(_as_regex(name) for name in files),
                *(rf"{_as_regex(name)}(?:/[^\s\"]*)?" for name in GOVERNING_DIRECTORIES),
            )
        )
        return re.compile(rf"(?:^|[\s/\"])(?:{either})(?:[\s\"]|$)".encode())

    def touched_by(self, patch: bytes) -> bool:
        """Whether `patch` may touch any of these files. It may say yes too often, never no too often."""
        touching = self._touching
        return any(touching.search(header) or _ESCAPE.search(header) for header in _HEADER.findall(patch))


def path_inside(path: str, workdir: str) -> str:
    """`path` relative to `workdir`, "" if it lies elsewhere."""
    inside = posixpath.relpath(posixpath.join(workdir, path), workdir) if path else ""
    return "" if inside == ".." or inside.startswith("../") else inside


def hidden_paths(verdict: Verdict, workdir: str) -> list[str]:
    """Paths in `workdir` of the hidden tests, whichever way they arrive: their files return to the base commit first.

    A renamed file counts by both names, also in a patch that the eval script applies by itself. Of other files that such a
    patch changes only tests count, because it may be there to change the code.
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
    """Whether a header of `patch` writes a plain letter as a number, as git never does."""
    return any(_ESCAPED_ASCII.search(header) for header in _HEADER.findall(patch))


def same_runner_settings(name: str, old: bytes | None, new: bytes | None, script: str = "") -> bool:
    """Whether both contents of the settings file `name` (None: absent) mean the same to the runner of `script`."""
    try:
        return _runner_settings(name, old, script) == _runner_settings(name, new, script)
    except (ValueError, RecursionError, configparser.Error):
        return False  # unreadable now: tomllib's, JSON's and Unicode's errors are ValueErrors


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
