"""The interface of a programming language: the names of its tests, the outcomes in its runners' logs, and contradictions of what its tests
expect.

A language is one module of this folder, which is imported only for tasks that use the language. Its files are parsed by tree-sitter, whose
positions are bytes. Names, files and options of its runners are rows of `pipeline/runners.py`.
"""

import importlib
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from tree_sitter import Node

from pipeline.runners import run_by
from workers.grading.controls.spans import Span
from workers.grading.controls.values import ALPHABETS, Observed
from workers.grading.controls.writing import Candidate

PASSED, FAILED, SKIPPED = "PASSED", "FAILED", "SKIPPED"
_NUMBER = re.compile(r"(?P<digits>\d[\d_]*)(?P<fraction>\.[\d_]+)?(?P<rest>(?:[eE][+-]?\d+)?[A-Za-z_]*\d*)")
_HEX = re.compile(r"0[xX][\da-fA-F_]*[\da-fA-F]")
# The largest values of integer types: one more does not compile, or wraps around.
_LARGEST = frozenset(2**bits - 1 for bits in (7, 8, 15, 16, 31, 32, 63, 64))
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


class Language(Protocol):
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

    def candidates(
        self,
        source: bytes,
        chance: random.Random,
        observed: Mapping[Span, Observed],
        met: Iterable[Span],
    ) -> list[Candidate]:
        """Contradictions of what the tests of a file expect, each with the names of `tests` as its tests.

        `observed` are the values that its expressions had in a run, and `met` the expectations that code without the fix meets, too; both
        are empty unless the language has means to observe them.
        """
        ...


_MODULES = {name: f"workers.grading.languages.{name}" for name in ("go", "javascript", "rust")}


def language(name: str) -> Language | None:
    """The language of this name in `pipeline.runners.LANGUAGES`; None if it has no module."""
    return cast(Language, importlib.import_module(_MODULES[name]).LANGUAGE) if name in _MODULES else None


def languages_of(script: str) -> list[Language]:
    """The languages with a module whose runners a shell script runs: all of them if it runs one that runs commands of any language."""
    ran = {runner.language for runner in run_by(script)}
    names = _MODULES if "" in ran else [name for name in _MODULES if name in ran]
    return [found for name in names if (found := language(name)) is not None]


def joined(outcomes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The outcome of each test: failed if any of its outcomes is, otherwise the last one."""
    by_name: dict[str, str] = {}
    for name, outcome in outcomes:
        if by_name.get(name) != FAILED:
            by_name[name] = outcome
    return by_name


def nodes(root: Node, *types: str) -> Iterator[Node]:
    """The nodes of these types at and below `root`, in the order of the source; all nodes if there is no type."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if not types or node.type in types:
            yield node
        waiting += reversed(node.children)


def text_of(node: Node | None) -> str:
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
