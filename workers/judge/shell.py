"""Shell lines taken apart into simple commands, as far as rules need it: quotes, separators, redirections and here-documents are read, and
nothing is expanded or run.

The text comes from the policy, so reading it is linear in its length, and text that no shell would accept is read somehow.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

MAX_CHARS = 50_000  # of a line that are read

_TOKEN = re.compile(
    r"(?P<space>[ \t\r]+|\\\n|(?<![^\s;|&(])\#[^\n]*)"
    r"|(?P<join>&&|\|\||\|&|[;|&()\n])"
    r"|(?P<here><<-?[ \t]*['\"]?(?P<delimiter>\w+)['\"]?)"
    r"|(?P<redirect>(?:\d*|&)(?:>>|>\||>&|>|<<<|<&|<))"
    r"|(?P<word>(?:'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|[^\s'\"\\|&;()<>])+)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_QUOTED = re.compile(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|\\(.)", re.DOTALL)
_ESCAPED = re.compile(r"\\([\"\\$`])")
_ASSIGNMENT = re.compile(r"\w+=")
_PREFIXES = frozenset(
    {"env", "time", "timeout", "command", "exec", "sudo", "nohup", "then", "do", "else", "!", "{"}
)


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """One program and its arguments, without quotes, assignments and what only starts another program, such as `timeout 60`."""

    words: tuple[str, ...]
    writes: tuple[str, ...] = ()  # files that its output goes to
    appends: tuple[str, ...] = ()  # files that its output is put behind

    @property
    def line(self) -> str:
        return " ".join(self.words)


@lru_cache(maxsize=1024)
def simple_commands(text: str) -> tuple[SimpleCommand, ...]:
    """The simple commands of `text`, in order. Bodies of here-documents are left out."""
    reader = _CommandReader()
    position, text = 0, text[:MAX_CHARS]
    while position < len(text):
        found = _TOKEN.match(text, position)
        assert found is not None
        position = found.end()
        reader.read(found)
        if found["join"] == "\n":
            position = reader.skip_documents(text, position)
    reader.end_command()
    return tuple(reader.commands)


@dataclass(slots=True)
class _CommandReader:
    commands: list[SimpleCommand] = field(default_factory=list[SimpleCommand])
    words: list[str] = field(default_factory=list[str])
    targets: dict[str, list[str]] = field(default_factory=lambda: {">": [], ">>": []})
    redirect: str = ""  # whose file is the next word
    delimiters: list[str] = field(default_factory=list[str])  # of here-documents that begin on the next line

    def read(self, token: re.Match[str]) -> None:
        if token["join"]:
            self.end_command()
        elif token["here"]:
            self.delimiters.append(token["delimiter"])
        elif token["redirect"]:
            self.redirect = token["redirect"].lstrip("0123456789&")
        elif token["word"]:
            self._word(_unquoted(token["word"]))

    def _word(self, word: str) -> None:
        if not self.redirect:
            self.words.append(word)
        elif self.redirect in (">", ">|", ">>") and not word.startswith("/dev/"):
            self.targets[self.redirect.rstrip("|")].append(word)
        self.redirect = ""

    def end_command(self) -> None:
        words = _without_prefix(self.words)
        if words or any(self.targets.values()):
            self.commands.append(
                SimpleCommand(tuple(words), tuple(self.targets[">"]), tuple(self.targets[">>"]))
            )
        self.words, self.targets, self.redirect = [], {">": [], ">>": []}, ""

    def skip_documents(self, text: str, position: int) -> int:
        """Where the text goes on behind the here-documents that begin at `position`."""
        for delimiter in self.delimiters:
            end = re.compile(rf"^\t*{delimiter}[ \t]*$", re.MULTILINE).search(text, position)
            position = len(text) if end is None else min(end.end() + 1, len(text))
        self.delimiters = []
        return position


def _without_prefix(words: Sequence[str]) -> Sequence[str]:
    start = 0
    while start < len(words) and (_ASSIGNMENT.match(words[start]) or words[start] in _PREFIXES):
        start += 2 if words[start] == "timeout" else 1
    return words[start:]


def _unquoted(word: str) -> str:
    def inside(found: re.Match[str]) -> str:
        single, double, escaped = found.groups()
        return single or _ESCAPED.sub(r"\1", double or "") or escaped or ""

    return _QUOTED.sub(inside, word)
