"""The origin of the text of a file that the tests will read: the container as it is before the eval script runs, or the script itself,
which may write the file, patch it, copy it or check it out of a commit. Actions of a script after it has started the tests are ignored.

The script's commands are parsed like bash, as far as needed to find which files they write. Only literal words are known: a word with a
variable, a substitution or a pattern in it is None. Branches and loops are treated as if each of their commands ran once. A wrong result
does no harm: a control that it misplaces has no effect in verification, and is dropped there. Texts have one character per byte of the
script.
"""

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline import diff
from pipeline.runners import PYTEST, UNITTEST

_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_ARITHMETIC = re.compile(r"\(\(.*?\)\)", re.DOTALL)
_REDIRECTION = re.compile(r"(\d*)(<<<|<<-|<<|<&|<>|<|&>>|&>|>>|>\||>&|>)")
_SEPARATOR = re.compile(r"&&|\|\||;;|\|&|[;&|()\n]")
_PLAIN = re.compile(r"[^\s\\'\"$`;&|()<>*?\[\]{}~]+")
# Matches the rest of a $'...' string, as in $'it\'s'.
_ESCAPED_QUOTES = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL)
_EXPANDED = re.compile(r"[$`\\]")
_KEYWORDS = frozenset(
    {"!", "do", "elif", "else", "if", "then", "time", "until", "while", "{", "command", "sudo"}
)
_ASSIGNMENT = re.compile(r"\w+\+?=")


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A here-document. Its body is at bytes `start` to `end` of the script, without the line of its delimiter."""

    start: int
    end: int
    delimiter: str
    literal: bool  # the shell changes nothing in it, except that it removes leading tabs if `indented`
    indented: bool

    def text(self, script: bytes) -> bytes | None:
        """Returns the text that the command reads; None if the shell would expand something in it."""
        body = script[self.start : self.end]
        if not self.literal and _EXPANDED.search(body.decode("latin-1")):
            return None
        return re.sub(rb"^\t+", b"", body, flags=re.MULTILINE) if self.indented else body

    def body(self, script: bytes, text: bytes) -> bytes | None:
        """Returns the body from which the command reads `text`; None if there is none. All lines get the indentation of the first line."""
        lines = re.findall(rb"[^\n]*\n|[^\n]+", text)
        if (text and not text.endswith(b"\n")) or self.delimiter.encode("latin-1") + b"\n" in lines:
            return None
        if not self.literal and _EXPANDED.search(text.decode("latin-1")):
            return None
        if not self.indented:
            return text
        indent = re.match(rb"\t*", script[self.start : self.end])
        if indent is None or any(line.startswith(b"\t") for line in lines):
            return None
        return b"".join(indent[0] + line for line in lines)


@dataclass(slots=True)
class Word:
    """A shell word, which occupies the bytes from `start` to `end` of the script. `text` is None if its value is not known."""

    text: str | None
    start: int
    end: int


@dataclass(slots=True)
class Command:
    """A simple command, with its inputs and outputs."""

    words: list[Word] = field(default_factory=list[Word])
    redirections: list[tuple[str, str | None]] = field(default_factory=list[tuple[str, str | None]])
    heredoc: Heredoc | None = None
    piped: bool = False  # whether it reads the output of the command before it
    depth: int = 0  # number of subshells around it

    def texts(self) -> list[str | None]:
        """The words without keywords and assignments in front of the command."""
        return [word.text for word in self.plain_words()]

    def plain_words(self) -> list[Word]:
        """The words without keywords and assignments in front of the command, with their positions."""
        for index, word in enumerate(self.words):
            if word.text is None or not (word.text in _KEYWORDS or _ASSIGNMENT.match(word.text)):
                return self.words[index:]
        return []


def commands(script: bytes) -> list[Command]:
    """The commands of `script`, in order."""
    return _Reader(script.decode("latin-1")).read()  # each character of latin-1 is one byte


class _Reader:
    def __init__(self, script: str) -> None:
        self._script = script
        self._at = 0
        self._depth = 0
        self._read: list[Command] = []
        self._current = Command()
        self._awaited: list[tuple[Command, str, bool, bool]] = []  # here-documents whose bodies follow

    def read(self) -> list[Command]:
        while self._at < len(self._script):
            if blank := _BLANK.match(self._script, self._at):
                self._at = blank.end()
            elif comment := _COMMENT.match(self._script, self._at):
                self._at = comment.end()
            elif not self._current.words and (arithmetic := _ARITHMETIC.match(self._script, self._at)):
                self._at = arithmetic.end()
            elif redirection := _REDIRECTION.match(self._script, self._at):
                self._at = redirection.end()
                self._redirect(redirection[1], redirection[2])
            elif separator := _SEPARATOR.match(self._script, self._at):
                self._at = separator.end()
                self._separate(separator[0])
            else:
                self._current.words.append(self._word()[0])
        self._separate("\n")
        return self._read

    def _separate(self, separator: str) -> None:
        if self._current.words or self._current.redirections:
            self._read.append(self._current)
        self._depth = max(0, self._depth + {"(": 1, ")": -1}.get(separator, 0))
        self._current = Command(piped=separator in ("|", "|&"), depth=self._depth)
        if separator == "\n":
            for command, delimiter, literal, indented in self._awaited:
                command.heredoc = self._body(delimiter, literal=literal, indented=indented)
            self._awaited = []

    def _redirect(self, descriptor: str, operator: str) -> None:
        if blank := _BLANK.match(self._script, self._at):
            self._at = blank.end()
        word, quoted = self._word()
        if operator in ("<<", "<<-"):
            if word.text and descriptor in ("", "0"):
                self._awaited.append((self._current, word.text, quoted, operator == "<<-"))
        elif descriptor in ("", "1") or operator.startswith("&"):
            self._current.redirections.append((operator, word.text))

    def _body(self, delimiter: str, *, literal: bool, indented: bool) -> Heredoc:
        start = at = self._at
        while at < len(self._script):
            end = self._script.find("\n", at)
            end = len(self._script) if end < 0 else end
            line = self._script[at:end]
            if (line.lstrip("\t") if indented else line) == delimiter:
                self._at = min(end + 1, len(self._script))
                return Heredoc(start, at, delimiter, literal, indented)
            at = end + 1
        self._at = len(self._script)
        return Heredoc(start, len(self._script), delimiter, literal, indented)

    def _word(self) -> tuple[Word, bool]:
        """The word that begins here, and whether any of it is quoted."""
        start, parts, known, quoted = self._at, [""], True, False
        script = self._script
        while self._at < len(script):
            if plain := _PLAIN.match(script, self._at):
                parts.append(plain[0])
                self._at = plain.end()
                continue
            character = script[self._at]
            if character in " \t\n;&|()<>":
                break
            if character == "'":
                end = _find(script, "'", self._at + 1)
                parts.append(script[self._at + 1 : end])
                quoted, self._at = True, end + 1
            elif character == '"':
                text, self._at = _double_quoted(script, self._at + 1)
                parts.append(text or "")
                quoted, known = True, known and text is not None
            elif character == "\\":
                parts.append(script[self._at + 1 : self._at + 2].replace("\n", ""))
                quoted, self._at = True, self._at + 2
            else:
                known = known and character in "[]{}"
                parts.append(character)
                self._at = _after_expansion(script, self._at)
        if self._at == start:  # no character here can begin a word
            self._at += 1
        return Word("".join(parts) if known else None, start, self._at), quoted


def _find(script: str, text: str, at: int) -> int:
    found = script.find(text, at)
    return len(script) if found < 0 else found


def _double_quoted(script: str, at: int) -> tuple[str | None, int]:
    """Returns the text between double quotes, or None if it is not literal, and the position after it."""
    parts: list[str] = []
    known = True
    while at < len(script) and script[at] != '"':
        if script[at] == "\\":
            escaped = script[at + 1 : at + 2]
            parts.append({"\n": ""}.get(escaped, escaped if escaped in '$`"\\' else f"\\{escaped}"))
            at += 2
        elif script[at] in "$`":
            known = False
            at = _after_expansion(script, at)
        else:
            parts.append(script[at])
            at += 1
    return ("".join(parts) if known else None), at + 1


def _after_expansion(script: str, at: int) -> int:
    """Returns the position after the expansion or pattern character that begins at `at`."""
    if script[at] == "`":
        return _find(script, "`", at + 1) + 1
    opening = script[at + 1 : at + 2] if script[at] == "$" else ""
    if opening == "'":
        quoted = _ESCAPED_QUOTES.match(script, at + 2)
        return quoted.end() if quoted else len(script)
    if opening not in ("(", "{"):
        return at + 1
    closing = {"(": ")", "{": "}"}[opening]
    depth, at = 1, at + 2
    while at < len(script) and depth:
        if script[at] == "\\":
            at += 1
        elif script[at] == "'":
            at = _find(script, "'", at + 1)
        elif script[at] == '"':
            at = _double_quoted(script, at + 1)[1] - 1
        else:
            depth += (script[at] == opening) - (script[at] == closing)
        at += 1
    return at


_START_OF_TESTS = ">>>>> Start Test Output"
_INSTALLS = frozenset({"pip", "pip3", "conda", "mamba", "apt", "apt-get", "uv", "poetry"})
# Options of git apply and patch that do not change what a diff does to its files.
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
    """The result of applying section `number` of a here-document's diff to `old`; to an empty file if `old` is None. The diff may have
    been written to a file first.
    """

    heredoc: Heredoc
    number: int
    old: "Source | None"
    sections: tuple[diff.Section, ...] = field(compare=False)  # all sections of the diff


Source = InContainer | InCommit | Body | Patched


@dataclass(frozen=True, slots=True)
class _Written:
    path: str
    heredoc: Heredoc | None  # None: its text is not known


@dataclass(frozen=True, slots=True)
class _Applied:
    directory: str
    heredoc: Heredoc
    sections: tuple[diff.Section, ...]


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
    """The effects on files of the eval script `script`, started in `workdir`, before it runs the tests.

    Paths inside the workdir are relative to it, others are absolute.
    """

    def __init__(self, script: bytes, workdir: str) -> None:
        self._script = script
        self._workdir = workdir
        self._events = _Events(script, workdir).read()

    def source(self, path: str) -> Source | None:
        """The origin of the text of the file at `path`; None if it is not known, or if there is none."""
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
        """Files and directories that the script copies, as pairs of source and destination."""
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
        self._directories: list[str | None] = [workdir]  # working directory of each subshell; None: not known
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
        for operator, word in command.redirections:
            heredoc = self._written_to(word) if operator == "<" else heredoc
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
            case ["apply", *rest] if directory is not None:
                # The paths of a git diff are relative to the repository's root, whichever directory git runs in.
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
        self, words: Sequence[str | None], heredoc: Heredoc | None, directory: str, strip: int | None = 1
    ) -> None:
        named: list[Heredoc] = []
        for word in words:
            if word and (option := _STRIP.fullmatch(word)):
                strip = int(option[1])
            elif word and _SAME_DIFF.fullmatch(word):
                continue
            elif (written := self._written_to(word)) is not None:
                named.append(written)
            else:
                return
        for one in named or ([heredoc] if heredoc is not None else []):
            text = one.text(self._script)
            if text is not None and strip is not None:
                applied = _Applied(directory, one, tuple(diff.sections(text, strip=strip)))
                # Scripts try `git apply` in several ways, one after the other.
                self._events += [applied] if applied not in self._events else []

    def _written_to(self, word: str | None) -> Heredoc | None:
        """The here-document that was written to a file last; None if its text is not known."""
        path = self._at(word)
        written = (event for event in reversed(self._events) if isinstance(event, _Written))
        return next((event.heredoc for event in written if event.path == path), None)

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
    return bool(PYTEST.named.search(text) or UNITTEST.named.search(text))


def inside(path: str, workdir: str) -> str:
    """`path` relative to the workdir if it is inside it, otherwise unchanged."""
    absolute = posixpath.normpath(posixpath.join(workdir, path))
    root = workdir.rstrip("/")
    return "." if absolute == root else absolute.removeprefix(f"{root}/")


def _under(path: str, place: str) -> bool:
    return path == place or path.startswith("" if place == "." and path[0] != "/" else f"{place}/")


def _join(place: str, rest: str) -> str:
    return posixpath.normpath(f"{place}/{rest.lstrip('/')}") if rest else place
