"""What shell commands of an agent do, from their text and their outputs: which files they show and edit, and whether tests passed.

Nothing is run, and nothing about the task is known. Recognised are files shown by `cat`, `nl`, `head`, `tail`, `less`, `sed -n` and by
`grep` with context; edits by `sed -i`, `perl -i`, `patch`, `git apply`, `tee` and redirections; edits reverted by `git checkout`,
`restore`, `stash` and `reset`; test runners, and an expression about imported code that is printed.

Shell lines are split into simple commands as far as this needs it: quotes, separators, redirections and here-documents are read, and
nothing is expanded. The text comes from the policy, so parsing takes time linear in its length, and text that no shell would accept still
gets some result.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from pipeline.runners import Closing, started_by
from pipeline.trajectory import Action, Observation, Turn

MAX_CHARS = 50_000  # the part of a line that is read

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
    """One program and its arguments, without quotes, assignments, and programs that only start another one, such as `timeout 60`."""

    words: tuple[str, ...]
    writes: tuple[str, ...] = ()  # files that its output goes to
    appends: tuple[str, ...] = ()  # files that its output is appended to

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
    redirect: str = ""  # the redirection operator before a file name, which is the next word
    delimiters: list[str] = field(default_factory=list[str])  # here-documents that begin on the next line

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
        """The position at which the text continues after the here-documents that begin at `position`."""
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


Verdict = Literal["passed", "failed"]

TAIL_CHARS = 1000  # characters of the end of an output, which contains the result of a test run
# Exit status 1 of these is a finding ("nothing matches", "they differ"), not an error.
_FINDERS = re.compile(
    r"(?:\S*/)?(?:grep|egrep|fgrep|rg|ag|diff|cmp|test|\[|\[\[|git\s+(?:diff|grep))(?:\s|$)"
)
# A check by hand: an expression with imported code that is printed.
_PRINTED_CHECK = re.compile(r"(?:\S*/)?python[\d.]*\s+-c\s(?=.*\bimport )(?=.*\bprint\()", re.DOTALL)
_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Exit)\b")


def failed(action: Action) -> bool:
    """Whether the command failed or was stopped at its time limit. A failing test run reveals a fault, and a search without matches is a
    result: neither counts as a failure.
    """
    seen = action.observation
    if seen is None:
        return False
    if seen.exit_code is None:
        return True
    commands = simple_commands(action.command)
    if seen.exit_code == 0 or any(started_by(command.line) for command in commands):
        return False
    return not (seen.exit_code == 1 and _FINDERS.match(commands[-1].line if commands else ""))


def verdict_of_tests(action: Action) -> Verdict | None:
    """The result of the tests that the command ran, from the output of the runner or of a check by hand, otherwise from the exit status.
    None: it ran no tests, or their result is not known.
    """
    seen, commands = action.observation, simple_commands(action.command)
    if seen is None or seen.exit_code is None:
        return None
    tail = seen.output[-TAIL_CHARS:]
    ran = [runner for command in commands if (runner := started_by(command.line))]
    closing = next((runner.closing for runner in ran if runner.closing), None)
    if closing is not None:
        return _by_evidence(seen, tail, closing)
    if ran:
        # The exit status of the line is that of its last command.
        return ("failed" if seen.exit_code else "passed") if started_by(commands[-1].line) else None
    by_hand = any(_PRINTED_CHECK.match(command.line) for command in commands)
    return _verdict_by_hand(tail) if by_hand else None


def _by_evidence(seen: Observation, tail: str, closing: Closing) -> Verdict | None:
    if closing.failed.search(tail):
        return "failed"
    return "passed" if seen.exit_code == 0 and closing.passed.search(tail) else None


def _verdict_by_hand(tail: str) -> Verdict | None:
    last = tail.strip().rpartition("\n")[2].strip()
    if last == "True":
        return "passed"
    return "failed" if last == "False" or _EXCEPTION.match(last) else None


_VIEWERS = frozenset({"cat", "nl", "head", "tail", "less", "more", "bat", "batcat"})
_SEARCHES = frozenset({"grep", "egrep", "rg"})
_CONTEXT_FLAGS = ("-A", "-B", "-C", "--context", "--after-context", "--before-context")
_TAKES_BACK = frozenset({"checkout", "restore", "stash", "reset"})
_SCRATCH = "/tmp/"


@dataclass(frozen=True, slots=True)
class CommandEffect:
    """The effect of a command line, from its text alone."""

    shows: tuple[str, ...]  # files
    edits: tuple[str, ...]  # existing files
    changes: bool  # whether it edits, writes or reverts something
    takes_back: bool  # whether it reverts earlier edits, and changes nothing else


def verdicts_of(turn: Turn) -> list[Verdict]:
    return [found for action in turn.actions if (found := verdict_of_tests(action)) is not None]


def effects_of(turn: Turn) -> list[CommandEffect]:
    """The effects of the commands that ended well."""
    return [
        effect_of(action.command)
        for action in turn.actions
        if action.observation is not None and action.observation.exit_code == 0
    ]


def edits(turn: Turn) -> bool:
    return any(effect.changes and not effect.takes_back for effect in effects_of(turn))


def changes(turn: Turn) -> bool:
    return any(effect.changes for effect in effects_of(turn))


def last_verdict(turns: Sequence[Turn]) -> Verdict | None:
    """The verdict of the checks after the last change."""
    for turn in reversed(turns):
        if verdicts := verdicts_of(turn):
            return verdicts[-1]
        if changes(turn):
            return None
    return None


def is_informed(turns: Sequence[Turn], index: int) -> bool:
    """Whether every file that the turn edits was shown before."""
    shown = {
        posixpath.basename(path)
        for turn in turns[:index]
        for effect in effects_of(turn)
        for path in effect.shows
    }
    return all(
        posixpath.basename(path) in shown for effect in effects_of(turns[index]) for path in effect.edits
    )


@lru_cache(maxsize=1024)
def effect_of(command: str) -> CommandEffect:
    commands = simple_commands(command)
    shows = tuple(path for one in commands for path in _shown(one))
    edits = tuple(path for one in commands for path in _edited(one))
    patches = any(one.words[:1] == ("patch",) or one.words[:2] == ("git", "apply") for one in commands)
    writes = patches or any(_written(one) for one in commands)
    takes_back = any(one.words[:1] == ("git",) and _TAKES_BACK & {*one.words[1:3]} for one in commands)
    return CommandEffect(
        shows, edits, bool(edits or writes or takes_back), takes_back and not (edits or writes)
    )


def _shown(command: SimpleCommand) -> Iterator[str]:
    """Files whose content the command shows to the policy."""
    if command.writes or command.appends or not command.words:
        return
    program, words = posixpath.basename(command.words[0]), command.words[1:]
    views = program in _VIEWERS or (program == "sed" and "-n" in words and not _is_in_place(words))
    searches = program in _SEARCHES and any(word.startswith(_CONTEXT_FLAGS) for word in words)
    if views or searches:
        yield from (word for word in words if not word.startswith("-"))


def _edited(command: SimpleCommand) -> Iterator[str]:
    """Existing files that the command changes."""
    yield from (path for path in command.appends if not path.startswith(_SCRATCH))
    if not command.words or posixpath.basename(command.words[0]) not in ("sed", "perl"):
        return
    words = command.words[1:]
    if _is_in_place(words):
        files = [word for word in words if not word.startswith("-")]
        # The script is the first of these, even after -e.
        yield from files[1:]


def _is_in_place(words: Sequence[str]) -> bool:
    return any(word.startswith(("-i", "-pi", "-ni", "--in-place")) for word in words)


def _written(command: SimpleCommand) -> bool:
    """Whether the command writes a file of the repository, which may be a new one."""
    tee = command.words[1:] if command.words[:1] == ("tee",) else ()
    paths = [*command.writes, *(word for word in tee if not word.startswith("-"))]
    return any(not path.startswith(_SCRATCH) for path in paths)
