"""The interface of a programming language: the names of its tests, the outcomes in its runners' logs, and contradictions of what its tests
expect.

A language is one module of this folder, which is imported only for tasks that use the language. Its files are parsed by tree-sitter, whose
positions are bytes. Names, files and options of its runners are rows of `pipeline/runners.py`.
"""

import importlib
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from pipeline.runners import RUNNERS, builds_in, run_by, spoken_in, started_by
from pipeline.task import ContradictionKind
from workers.grading.controls.arrivals import Command, commands
from workers.grading.controls.literals import ALPHABETS
from workers.grading.controls.spans import Candidate, Edit, Span

# Graders use this module for every task, and most need no parser.
if TYPE_CHECKING:
    from tree_sitter import Node

MOST = 2000  # candidates of one file
MOST_PER_TEST: Mapping[ContradictionKind, int] = {"value": 5, "opposite": 3, "nothing": 2}
PASSED, FAILED, SKIPPED = "PASSED", "FAILED", "SKIPPED"
_NUMBER = re.compile(r"(?P<digits>\d[\d_]*)(?P<fraction>\.[\d_]+)?(?P<rest>(?:[eE][+-]?\d+)?[A-Za-z_]*\d*)")
_HEX = re.compile(r"0[xX][\da-fA-F_]*[\da-fA-F]")
# The largest values of integer types: one more does not compile, or wraps around.
_LARGEST = frozenset(2**bits - 1 for bits in (7, 8, 15, 16, 31, 32, 63, 64))
# Options that a runner refuses beside the one that makes it name tests.
_NO_OPTION = re.compile(r"\s--(?:no-run|max-fail)\b")
# Letters after a backslash or a percent sign, and what is in braces, may be no text but a form of the language.
_NO_TEXT = re.compile(r"\\(?:u\{[^}]*\}|[xuU][\da-fA-F]+|.)|%[-+# 0]*[\d.]*\w|\$?\{[^}]*\}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DeclaredTest:
    """A test in the source of a file."""

    name: str  # names it within its file; two tests of a file may share it
    # The forms in which runners and parsers name it, the most specific one first; see `Form.key`.
    keys: tuple[str, ...]
    # Matches all its forms, if some parts of the name are computed while the tests run; None if none are.
    pattern: re.Pattern[str] | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """One reading of the name that a runner or a parser gives to a test."""

    key: str  # the same text as one of the keys of the test in the source
    place: str = ""  # the end of the path of its file, or of the file's directory, with slashes; "" if the name does not have it
    # Whether only files are meant whose path ends with the whole place. Otherwise those are meant whose paths agree with it longest.
    is_exact: bool = False
    # Whether it counts only if no file has a test of an earlier form
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class ExpectedPlace:
    """A place in a source where an expectation can be contradicted."""

    span: Span
    kind: ContradictionKind
    checked: Span  # where the expectation is checked
    write: Callable[[], str | None]  # draws another text for the place; None if there is none


class LanguageModule(Protocol):
    """A programming language. Sources that are not UTF-8 or do not parse have no tests and no candidates."""

    @property
    def endings(self) -> tuple[str, ...]:
        """The endings of the names of its files, with their dots."""
        ...

    def may_hold_tests(self, path: str) -> bool:
        """Whether a file at this path may hold tests, by its name and its directories."""
        ...

    def tests(self, source: bytes) -> list[DeclaredTest]:
        """The tests that the source of a file declares."""
        ...

    def forms(self, name: str) -> list[Form]:
        """The readings of the name that a runner or a parser gives to a test, the most specific one first."""
        ...

    def outcomes(self, log: str) -> dict[str, str]:
        """The outcome of each test in the logs of its runners: PASSED, FAILED or SKIPPED, by the name that the log gives to it.

        Code under test may have written the log. A test that the log reports as failed anywhere has failed.
        """
        ...

    def candidates(self, source: bytes, chance: random.Random) -> list[Candidate]:
        """Contradictions of what the tests of a file expect, each with the names of `tests` as its tests."""
        ...


_MODULES = {name: f"workers.grading.languages.{name}" for name in ("go", "java", "javascript", "rust")}
_MODULES["c"] = "workers.grading.languages.cpp"  # C++, too


def language(name: str) -> LanguageModule:
    """The language of a name that `languages_of` returns."""
    return cast(LanguageModule, importlib.import_module(_MODULES[name]).LANGUAGE)


def languages_of(script: str) -> list[str]:
    """The languages with a module whose runners a shell script runs, or whose tests it may build as programs: all of them if it runs a
    runner that runs commands of any language.
    """
    ran = {*(runner.language for runner in run_by(script)), *builds_in(script)}
    return [name for name in _MODULES if name in ran or "" in ran]


def language_of(path: str) -> str | None:
    """The language with a module in which a file at this path is written; None if there is none."""
    return spoken if (spoken := spoken_in(path)) in _MODULES else None


def reporting(script: bytes) -> bytes:
    """A shell script whose runners' logs have the outcome of each test, as far as an option of the runner brings that about."""
    places: list[tuple[int, bytes]] = []
    for command in commands(script):
        words, text = command.plain_words(), _text_of(command, script)
        runner = started_by(text)
        option = runner.reporting_option if runner is not None else ""
        # cargo refuses an option that is given twice.
        is_free = option not in text.split() and not _NO_OPTION.search(text)
        if runner and option and is_free and (found := runner.started.match(text)):
            places.append((words[0].start + found.end(), f" {option}".encode()))
    for end, added in sorted(places, reverse=True):
        script = script[:end] + added + script[end:]
    return script


def _text_of(command: Command, script: bytes) -> str:
    words = command.plain_words()
    return script[words[0].start : words[-1].end].decode("latin-1") if words else ""


def outcomes_in(script: str, log: str) -> dict[str, str]:
    """The outcome of each test that the log of a shell script reports in these languages.

    Tests that a log names only because there is one file of them are left out: a patch may add another file.
    """
    started = [started_by(_text_of(command, script.encode())) for command in commands(script.encode())]
    left_out = {
        runner.language
        for runner in RUNNERS
        if runner.names_of_one_file.search(log) and runner not in started
    }
    found = [language(name).outcomes(log) for name in languages_of(script) if name not in left_out]
    return joined(one for outcomes in found for one in outcomes.items())


def candidates_at(places: Mapping[str, Sequence[ExpectedPlace]], chance: random.Random) -> list[Candidate]:
    """Candidates at some of the places of each test, drawn by chance. A place that several tests have is one candidate of all of them."""
    tests: dict[tuple[Span, str], list[str]] = defaultdict(list)
    checked: dict[tuple[Span, str], list[Span]] = defaultdict(list)
    for test, ones in places.items():
        for one in ones:
            key = one.span, one.kind
            tests[key] += [test] if test not in tests[key][-1:] else []
            checked[key] += [one.checked] if one.checked not in checked[key] else []
    written: dict[tuple[Span, str], Candidate | None] = {}
    for ones in places.values():
        for kind, most in MOST_PER_TEST.items():
            of_kind = list({one.span: one for one in ones if one.kind == kind}.values())
            num_found = 0
            for one in chance.sample(of_kind, len(of_kind)):
                key = one.span, one.kind
                if key not in written:
                    becomes = one.write()
                    edits = () if becomes is None else (Edit(*one.span, becomes),)
                    found = Candidate(tuple(tests[key]), edits, kind, checked=tuple(checked[key]))
                    written[key] = found if edits else None
                num_found += written[key] is not None
                if num_found == most:
                    break
    return [one for one in written.values() if one is not None][:MOST]


def joined(outcomes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The outcome of each test: failed if any of its outcomes is, otherwise the last one."""
    by_name: dict[str, str] = {}
    for name, outcome in outcomes:
        if by_name.get(name) != FAILED:
            by_name[name] = outcome
    return by_name


def nodes(root: "Node", *types: str) -> "Iterator[Node]":
    """The nodes of these types at and below `root`, in the order of the source; all nodes if there is no type."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if not types or node.type in types:
            yield node
        waiting += reversed(node.children)


def text_of(node: "Node | None") -> str:
    """The source of a node; "" for None."""
    return "" if node is None or node.text is None else node.text.decode("utf-8", "replace")


def other_number(text: str, chance: random.Random) -> str | None:
    """A near number of the same type and with as many digits where that is possible, written as `text` is; None if it is no number.

    An integer changes by one, a fraction or a hexadecimal number in its last digit.
    """
    if (hexadecimal := _HEX.match(text)) is not None:
        end = hexadecimal.end()
        return f"{text[: end - 1]}{_other(text[end - 1], '0123456789abcdef', chance)}{text[end:]}"
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    digits, fraction, rest = found["digits"], found["fraction"] or "", found["rest"]
    if fraction:
        return f"{digits}{fraction[:-1]}{_other(fraction[-1], '0123456789', chance)}{rest}"
    number = int(digits.replace("_", ""))
    steps = [1] if number == 0 else [-1] if number in _LARGEST else [-1, 1]
    near = [number + step for step in steps]
    same_length = [one for one in near if len(str(one)) == len(str(number))]
    becomes = str(chance.choice(same_length or near))
    if len(digits) > len(becomes) and digits.startswith("0"):
        becomes = becomes.zfill(len(digits))
    return f"{becomes}{rest}"


def other_text(text: str, chance: random.Random) -> str | None:
    """What is between the quotes of a literal, with one letter or digit replaced by another of its kind; None if there is none.

    Escapes, and what a format may replace, stay as they are.
    """
    no_text = {place for found in _NO_TEXT.finditer(text) for place in range(*found.span())}
    places = [place for place, one in enumerate(text) if one in ALPHABETS and place not in no_text]
    if not places:
        return None
    place = chance.choice(places)
    return f"{text[:place]}{_other(text[place], ALPHABETS[text[place]], chance)}{text[place + 1 :]}"


def _other(character: str, among: str, chance: random.Random) -> str:
    return chance.choice(among.replace(character.lower(), "").replace(character, ""))
