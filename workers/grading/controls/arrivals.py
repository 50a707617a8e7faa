"""Where the text of a file comes from that the tests will read: the container as it is before the eval script runs, or the
script itself, which may write the file, patch it, copy it or check it out of a commit. What a script does after it has
started the tests is not looked at.
"""

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.grading.closing_line import RUNS_PYTEST, RUNS_UNITTEST
from workers.grading.controls import patches
from workers.grading.controls.commands import Command, Heredoc, Word, commands

_START_OF_TESTS = ">>>>> Start Test Output"
_INSTALLS = frozenset({"pip", "pip3", "conda", "mamba", "apt", "apt-get", "uv", "poetry"})
# Options of git apply and patch under which a diff means what it says.
_SAME_DIFF = re.compile(
    r"-|-i|-v|--verbose|-q|--quiet|--index|--3way|-3|--whitespace=.*|--recount|--allow-empty|--reject"
    r"|-N|--forward|-t|--batch|-s|--silent|-f|--force|--fuzz=\d+|-F\d*|-u|--no-backup-if-mismatch"
)
_STRIP = re.compile(r"(?:-p|--strip=)(\d+)")


@dataclass(frozen=True, slots=True)
class InContainer:
    """The file at `path` in the container."""

    path: str


@dataclass(frozen=True, slots=True)
class InCommit:
    """The file at `path` in the commit `commit`, which the script names at bytes `start` to `end`."""

    commit: str
    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Body:
    """A here-document of the script."""

    heredoc: Heredoc


@dataclass(frozen=True, slots=True)
class Patched:
    """What the section `number` of a here-document's diff makes of `old`; of nothing if that is None."""

    heredoc: Heredoc
    number: int
    old: "Source | None"
    sections: tuple[patches.Section, ...] = field(compare=False)  # of the whole diff


Source = InContainer | InCommit | Body | Patched


@dataclass(frozen=True, slots=True)
class _Written:
    path: str
    heredoc: Heredoc | None  # None: with a text that is not known


@dataclass(frozen=True, slots=True)
class _Applied:
    directory: str
    heredoc: Heredoc
    sections: tuple[patches.Section, ...]


@dataclass(frozen=True, slots=True)
class _Copied:
    origin: str
    target: str


@dataclass(frozen=True, slots=True)
class _CheckedOut:
    commit: Word
    paths: tuple[str, ...]


_Event = _Written | _Applied | _Copied | _CheckedOut


class Arrivals:
    """What the eval script `script`, started in `workdir`, does to files before it runs the tests.

    Paths are relative to the workdir if they lie in it, else absolute.
    """

    def __init__(self, script: bytes, workdir: str) -> None:
        self._script = script
        self._workdir = workdir
        self._events = _Events(script, workdir).read()

    def source(self, path: str) -> Source | None:
        """Where the text of the file at `path` comes from; None if that is not known, or nowhere."""
        return self._source(inside(path, self._workdir), len(self._events))

    def written(self) -> tuple[str, ...]:
        """Paths of the files that the script writes or patches from here-documents."""
        paths: dict[str, None] = {}
        for event in self._events:
            match event:
                case _Written(path=path, heredoc=Heredoc()):
                    paths[path] = None
                case _Applied():
                    paths |= dict.fromkeys(
                        self._joined(event, section.new)
                        for section in event.sections
                        if section.new is not None
                    )
                case _:
                    pass
        return tuple(paths)

    def copied(self) -> tuple[tuple[str, str], ...]:
        """Files and directories that the script copies: from where to where."""
        return tuple((event.origin, event.target) for event in self._events if isinstance(event, _Copied))

    def checked_out(self) -> tuple[str, ...]:
        """Paths that the script checks out of a commit."""
        found = (event.paths for event in self._events if isinstance(event, _CheckedOut))
        return tuple(dict.fromkeys(path for paths in found for path in paths))

    def _source(self, path: str, before: int) -> Source | None:
        for number in reversed(range(before)):
            match self._events[number]:
                case _Written() as event if event.path == path:
                    return None if event.heredoc is None else Body(event.heredoc)
                case _Applied() as event:
                    for index, section in enumerate(event.sections):
                        if self._joined(event, section.new) == path:
                            return self._patched(event, index, number)
                        if self._joined(event, section.old) == path and section.new is None:
                            return None
                case _Copied() as event if _under(path, event.target):
                    return self._source(_join(event.origin, path[len(event.target) :]), number)
                case _CheckedOut() as event if any(_under(path, place) for place in event.paths):
                    assert event.commit.text is not None
                    return InCommit(event.commit.text, path, event.commit.start, event.commit.end)
                case _:
                    pass
        return InContainer(path)

    def _patched(self, event: _Applied, index: int, number: int) -> Source | None:
        old = self._joined(event, event.sections[index].old)
        before = self._source(old, number) if old else None
        if old and before is None:
            return None
        return Patched(event.heredoc, index, before, event.sections)

    def _joined(self, event: _Applied, path: bytes | None) -> str:
        if path is None:
            return ""
        name = path.decode("utf-8", "surrogateescape")
        return inside(posixpath.join(event.directory, name), self._workdir)


class _Events:
    """Reads the commands of a script that matter to files."""

    def __init__(self, script: bytes, workdir: str) -> None:
        self._script = script
        self._workdir = workdir
        self._directories: list[str | None] = [workdir]  # where each subshell is; None: not known
        self._events: list[_Event] = []

    def read(self) -> list[_Event]:
        before: Command | None = None
        for command in commands(self._script):
            if _starts_tests(command):
                break
            while len(self._directories) <= command.depth:
                self._directories.append(self._directories[-1])
            del self._directories[command.depth + 1 :]
            self._follow(command, before)
            before = command
        return self._events

    def _follow(self, command: Command, before: Command | None) -> None:
        words = command.texts()
        heredoc = command.heredoc
        if (
            heredoc is None
            and command.piped
            and before is not None
            and before.texts() in (["cat"], ["cat", "-"])
        ):
            heredoc = before.heredoc
        match words:
            case ["cd"] | ["cd", "-"] | ["pushd" | "popd", *_]:
                self._directories[-1] = None
            case ["cd", *_]:
                self._directories[-1] = self._absolute(words[-1])
            case ["cat"] | ["cat", "-"]:
                self._write(command, [], heredoc)
            case ["tee", *rest]:
                self._write(command, rest, heredoc)
            case ["git", *rest]:
                self._git(command, rest, heredoc)
            case ["patch", *rest] if heredoc is not None:
                self._patch(rest, heredoc)
            case ["cp" | "mv", *rest]:
                self._copy([word for word in rest if word is None or not word.startswith("-")])
            case _:
                self._write(command, [], None)

    def _write(self, command: Command, words: Sequence[str | None], heredoc: Heredoc | None) -> None:
        readable = heredoc if heredoc is not None and heredoc.text(self._script) is not None else None
        for operator, word in command.redirections:
            path = self._at(word) if operator.strip("&|").startswith(">") else None
            if path is not None:
                self._events.append(
                    _Written(path, readable if operator in (">", ">|") and not words else None)
                )
        appends = any(word in ("-a", "--append") for word in words)
        for word in words:
            path = self._at(word) if word and not word.startswith("-") else None
            if path is not None:
                self._events.append(_Written(path, None if appends else readable))

    def _git(self, command: Command, words: list[str | None], heredoc: Heredoc | None) -> None:
        directory = self._directories[-1]
        plain = command.plain_words()[1:]
        while len(words) > 2 and words[0] in ("-C", "-c"):
            if words[0] == "-C":
                directory = self._absolute(words[1])
            words, plain = words[2:], plain[2:]
        match words:
            case ["apply", *rest] if heredoc is not None and directory is not None:
                # A git diff's paths are relative to the repository, wherever in it git is called.
                inside = f"{directory}/".startswith(f"{self._workdir}/")
                self._apply(rest, heredoc, self._workdir if inside else directory)
            case ["checkout", *rest] if directory is not None:
                self._check_out(rest, plain[1:], directory)
            case _:
                pass

    def _patch(self, words: Sequence[str | None], heredoc: Heredoc) -> None:
        directory = self._directories[-1]
        if directory is not None:
            self._apply(words, heredoc, directory, strip=None)

    def _apply(
        self, words: Sequence[str | None], heredoc: Heredoc, directory: str, strip: int | None = 1
    ) -> None:
        for word in words:
            if word and (option := _STRIP.fullmatch(word)):
                strip = int(option[1])
            elif word is None or not _SAME_DIFF.fullmatch(word):
                return
        text = heredoc.text(self._script)
        if text is not None and strip is not None:
            found = tuple(patches.sections(text, strip=strip))
            self._events.append(_Applied(directory, heredoc, found))

    def _check_out(self, words: Sequence[str | None], plain: Sequence[Word], directory: str) -> None:
        """`git checkout COMMIT [--] PATH...`."""
        named = [word for word in plain if word.text is None or not word.text.startswith("-")]
        options = [word for word in words if word and word.startswith("-")]
        if len(named) < 2 or set(options) - {"--", "-q", "--quiet", "-f", "--force"} or named[0].text is None:
            return
        paths = [self._at(word.text) for word in named[1:]]
        found = tuple(path for path in paths if path is not None)
        self._events.append(_CheckedOut(named[0], found))

    def _copy(self, words: Sequence[str | None]) -> None:
        if len(words) != 2 or words[1] is None:
            return
        origin, target = self._at(words[0]), self._at(words[1])
        if origin is None or target is None:
            return
        if words[1].endswith("/") or target == ".":
            target = _join(target, posixpath.basename(origin))
        self._events.append(_Copied(origin, target))

    def _at(self, word: str | None) -> str | None:
        path = self._absolute(word)
        return None if path is None else inside(path, self._workdir)

    def _absolute(self, word: str | None) -> str | None:
        directory = self._directories[-1]
        if not word or (directory is None and not word.startswith("/")):
            return None
        text = word.encode("latin-1").decode("utf-8", "surrogateescape")
        return posixpath.normpath(posixpath.join(directory or "/", text))


def _starts_tests(command: Command) -> bool:
    words = command.texts()
    text = " ".join(word or "?" for word in words)
    if any(word and _START_OF_TESTS in word for word in words):
        return True
    if not words or words[0] in _INSTALLS or words[:3] == ["python", "-m", "pip"]:
        return False
    return bool(RUNS_PYTEST.search(text) or RUNS_UNITTEST.search(text))


def inside(path: str, workdir: str) -> str:
    """`path` relative to the workdir if it lies in it."""
    absolute = posixpath.normpath(posixpath.join(workdir, path))
    root = workdir.rstrip("/")
    return "." if absolute == root else absolute.removeprefix(f"{root}/")


def _under(path: str, place: str) -> bool:
    return path == place or path.startswith("" if place == "." and path[0] != "/" else f"{place}/")


def _join(place: str, rest: str) -> str:
    return posixpath.normpath(f"{place}/{rest.lstrip('/')}") if rest else place
