"""Java: tests of JUnit 3 to 6 and TestNG, with the assertions of these, Hamcrest, AssertJ and Truth.

A contradiction compiles: what it puts in place of an expression evaluates it wherever that may assign to a variable, and has a type with
which the call is still valid.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from workers.grading.controls.spans import Candidate
from workers.grading.languages.java_checks import checks
from workers.grading.languages.java_source import LITERALS, JavaFile, JavaTest
from workers.grading.languages.java_values import JavaValues, other
from workers.grading.languages.language import (
    FAILED,
    PASSED,
    SKIPPED,
    DeclaredTest,
    ExpectedPlace,
    Form,
    candidates_at,
    joined,
    text_of,
)

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Maven: `pkg.Outer$Inner.test(int)[1] -- Time elapsed: 0.1 s <<< FAILURE!`, before version 3 `test(pkg.Outer)  Time elapsed: 0.1 sec`.
_SUREFIRE = re.compile(
    r"^(?:\[\w+\] +)?(?P<name>[\w.$]+(?:[({\[].*?)?)(?:(?: --)? +Time elapsed: [\d.,]+ s(?:ec)?(?P<bad> +<<< \w+!?)?| (?P<skipped>skipped))"
)
# Gradle: `Outer > Inner > test(int) > [1] 5 PASSED`, the first name with its package before version 6.
_GRADLE = re.compile(r"^(?P<name>[^\s>].*? > .+) (?P<said>PASSED|FAILED|SKIPPED)$")
# JUnit's console launcher: a tree with the outcome after each name, or in a line of its own below it.
_TREE = re.compile(r"^(?P<before>[|│ ]*)(?:(?P<ascii>[+']--)|[├└]─) (?P<rest>.*)$")
# With and without the theme of plain letters.
_MARKED = {
    True: re.compile(r"(?P<name>.*?) (?P<mark>\[(?:OK|X|A|S)\])(?: .*)?"),
    False: re.compile(r"(?P<name>.*?) (?P<mark>[✔✘■↷])(?: .*)?"),
}
_BAD = {True: re.compile(r" \[X\](?= |$)"), False: re.compile(r" ✘(?= |$)")}
_STATUS = re.compile(r"^[|│ ]* status: (?P<mark>\[\w+\]|\S) ")
_REASON = re.compile(r"^[|│ ]* reason: ")
_MARKS = {**dict.fromkeys(("[OK]", "✔"), PASSED), **dict.fromkeys(("[X]", "✘"), FAILED)}  # others are skipped
_INVOCATION = re.compile(r"\[(\d+)\] .*", re.DOTALL)

_MAY_TEST = re.compile(r"test|(?:^|/)\w*IT\.java$|spec", re.IGNORECASE)


class Java:
    """The language Java."""

    endings = (".java",)

    def may_hold_tests(self, path: str) -> bool:
        return _MAY_TEST.search(path) is not None

    def tests(self, source: bytes) -> list[DeclaredTest]:
        file = JavaFile(source)
        return [DeclaredTest(test.name, tuple(dict.fromkeys(test.keys))) for test in file.tests()]

    def forms(self, name: str) -> list[Form]:
        if " > " in name:
            parts = [part.strip() for part in name.split(" > ")]
            package, _, parts[0] = (
                parts[0].rpartition(".") if re.fullmatch(r"[\w.$]+", parts[0]) else ("", "", parts[0])
            )
            place = "/".join((*package.split("."), parts[0]))
        else:
            older = re.fullmatch(r"(?P<method>[^(\[]+(?:\[.*\])?)\((?P<type>[\w.$]+)\)", name)
            name = f"{older['type']}.{older['method']}" if older else name.replace("#", ".")
            types, _, method = re.split(r"[(\[{]", name, maxsplit=1)[0].strip().rpartition(".")
            package, _, type_ = types.rpartition(".")
            parts = [*type_.split("$"), method]
            place = "/".join((*package.split("."), parts[0]))
        parts = [part for part in parts if not part.startswith("[")]  # invocations
        plain = [parts[:number] for number in range(len(parts), 1, -1)]
        found = [
            Form(" > ".join((*one[:-1], last)), place) for one in plain for last in (one[-1], _bare(one[-1]))
        ]
        inherited = [Form(f" > {_bare(one[-1])}", place) for one in plain]
        return list(dict.fromkeys((*found, *inherited)))

    def outcomes(self, log: str) -> dict[str, str]:
        plain = _ANSI.sub("", log)
        return joined([*_of_lines(plain), *_of_tree(plain)])

    def candidates(self, source: bytes, chance: random.Random) -> list[Candidate]:
        file = JavaFile(source)
        return candidates_at({test.name: list(_places(file, test, chance)) for test in file.tests()}, chance)


LANGUAGE = Java()


def _bare(name: str) -> str:
    """The name of a method without its parameters and the number of the invocation."""
    return re.split(r"[(\[{]", name, maxsplit=1)[0].strip() or name


def _of_lines(log: str) -> Iterator[tuple[str, str]]:
    """The outcomes in the logs of Maven and Gradle, which name a test in a line."""
    for line in log.splitlines():
        if ("Time elapsed" in line or line.endswith("skipped")) and (found := _SUREFIRE.match(line)):
            # A class without the name of a method is a failure outside of its tests.
            yield found["name"], FAILED if found["bad"] else SKIPPED if found["skipped"] else PASSED
        elif line.endswith(("PASSED", "FAILED", "SKIPPED")) and (found := _GRADLE.match(line)):
            yield _named(found["name"].split(" > ")), found["said"]


def _of_tree(log: str) -> Iterator[tuple[str, str]]:
    """The outcomes in the tree of JUnit's console launcher. What is below a test engine and has nothing below it is a test."""
    above: list[tuple[int, str]] = []
    waiting: tuple[str, str] | None = None
    for line in log.splitlines():
        if found := _TREE.match(line):
            depth, rest, is_ascii = len(found["before"]), found["rest"], bool(found["ascii"])
            marked = _MARKED[is_ascii].fullmatch(rest)
            if waiting and (above[-1][0] >= depth or waiting[1] == FAILED):
                yield waiting
            above = [one for one in above if one[0] < depth]
            above.append((depth, marked["name"] if marked else rest.removesuffix(" [OK]")))
            name = _named([part for _, part in above[1:]])
            # The text of a name may look like a mark, too.
            is_bad = _BAD[is_ascii].search(rest) is not None
            said = FAILED if is_bad else _MARKS.get(marked["mark"] if marked else "", SKIPPED)
            waiting = (name, said) if marked and name else None
        elif above and (found := _STATUS.match(line)):
            yield _named([part for _, part in above[1:]]), _MARKS.get(found["mark"], SKIPPED)
        elif above and _REASON.match(line):
            yield _named([part for _, part in above[1:]]), SKIPPED
        elif waiting and not line.startswith(("|", "│", " ")):
            yield waiting
            waiting = None
    if waiting:
        yield waiting


def _named(parts: Iterable[str]) -> str:
    """The name of a test. That of an invocation is its number, because its text may have expected values."""
    return " > ".join(_INVOCATION.sub(r"[\1]", part) for part in parts)


def _places(file: JavaFile, test: JavaTest, chance: random.Random) -> Iterator[ExpectedPlace]:
    """The places where something can be changed that a test expects."""
    reached = file.reached(test.method)
    values = JavaValues(file, reached)
    literals = {text_of(node) for method in reached for node in method.of(*LITERALS)}
    for check in (one for method in reached for one in checks(file, method)):
        checked = check.root.start_byte, check.root.end_byte
        for leaf in values.leaves(check.expected, check.owner):
            write: Callable[[], str | None] = partial(other, leaf, literals, chance, is_near=check.is_near)
            yield ExpectedPlace(leaf.span, "value", checked, write)
        for span, kind, becomes in check.others:
            yield ExpectedPlace(span, kind, checked, partial(str, becomes))
