"""Reads the commands of an eval script as bash would, as far as it takes to know which files they write.

Only what the script says literally is known: a word with a variable, a substitution or a pattern in it is None. Branches
and loops are read as if each of their commands ran once. Nothing depends on a reading that is wrong: a control that it
misplaces has no effect in verification, and is dropped there. Texts have one character per byte of the script.
"""

import re
from dataclasses import dataclass, field

_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_ARITHMETIC = re.compile(r"\(\(.*?\)\)", re.DOTALL)
_REDIRECTION = re.compile(r"(\d*)(<<<|<<-|<<|<&|<>|<|&>>|&>|>>|>\||>&|>)")
_SEPARATOR = re.compile(r"&&|\|\||;;|\|&|[;&|()\n]")
_PLAIN = re.compile(r"[^\s\\'\"$`;&|()<>*?\[\]{}~]+")
_ESCAPED_QUOTES = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL)  # the rest of $'it\'s'
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
    literal: bool  # the shell changes nothing in it but, if `indented`, the tabs at the start of lines
    indented: bool

    def text(self, script: bytes) -> bytes | None:
        """What the command reads; None if the shell would put something else in its place."""
        body = script[self.start : self.end]
        if not self.literal and _EXPANDED.search(body.decode("latin-1")):
            return None
        return re.sub(rb"^\t+", b"", body, flags=re.MULTILINE) if self.indented else body

    def body(self, script: bytes, text: bytes) -> bytes | None:
        """The body that makes the command read `text`; None if none does. Lines are indented as the first one was."""
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
    """A word at bytes `start` to `end` of the script; `text` None: not known."""

    text: str | None
    start: int
    end: int


@dataclass(slots=True)
class Command:
    """A simple command, with what it reads and writes."""

    words: list[Word] = field(default_factory=list[Word])
    redirections: list[tuple[str, str | None]] = field(default_factory=list[tuple[str, str | None]])
    heredoc: Heredoc | None = None
    piped: bool = False  # reads what the command before it prints
    depth: int = 0  # number of subshells around it

    def texts(self) -> list[str | None]:
        """The words without keywords and assignments in front of the command."""
        return [word.text for word in self.plain_words()]

    def plain_words(self) -> list[Word]:
        """The same as words."""
        for index, word in enumerate(self.words):
            if word.text is None or not (word.text in _KEYWORDS or _ASSIGNMENT.match(word.text)):
                return self.words[index:]
        return []


def commands(script: bytes) -> list[Command]:
    """The commands of `script`, in order."""
    return _Reader(script.decode("latin-1")).read()  # so that characters are bytes


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
        if self._at == start:  # nothing that a word can begin with
            self._at += 1
        return Word("".join(parts) if known else None, start, self._at), quoted


def _find(script: str, text: str, at: int) -> int:
    found = script.find(text, at)
    return len(script) if found < 0 else found


def _double_quoted(script: str, at: int) -> tuple[str | None, int]:
    """What stands between double quotes, None if it is not literal, and where it has ended."""
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
    """Where what begins at `at` with a dollar sign, a backtick or a pattern's sign has ended."""
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
