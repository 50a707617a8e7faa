"""Rust: its tests, and the names and outcomes that cargo test and cargo nextest give to them.

How sources are parsed is in `rust_syntax`, what assertions expect in `rust_assertions`, and what makes a value in `rust_values`.
"""

import random
import re

from workers.grading.controls.spans import Candidate
from workers.grading.languages.language import (
    FAILED,
    PASSED,
    SKIPPED,
    DeclaredTest,
    Form,
    joined,
    text_of,
)
from workers.grading.languages.rust_assertions import contradictions
from workers.grading.languages.rust_syntax import RustItem, attribute_name, items, parsed

# Attributes that run a test once for each of several cases, whose names the log has.
_WITH_CASES = frozenset(("rstest", "test_case", "test_matrix"))
_OUTCOMES = {"ok": PASSED, "FAILED": FAILED, "ignored": SKIPPED}
_OUTCOMES_OF_NEXTEST = {"PASS": PASSED, "LEAK": PASSED, "FLAKY": PASSED, "SKIP": SKIPPED}
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# The lines of a log that say something about tests. Each alternative reads its line a bounded number of times.
_LINE = re.compile(
    r"^(?:"
    r"test (?P<name>\S+(?: - [^\n]*?\(line \d+\))?)(?: - (?:should panic|compile|compile fail))? \.\.\. (?P<said>[^\n]*)"
    r"|(?P<late>ok|FAILED|ignored)(?: <[\d.]+s>)?\r?"
    r"|(?P<running>running \d+ tests?)\r?"
    r"|test result: (?P<result>[^\n]*)"
    r"| +(?:Running (?P<binary>[^\n(]*?) ?\((?P<program>[^\n)]*)\)|(?P<doctests>Doc-tests \S+))\r?"
    r"|(?P<failures>failures:)\r?"
    r"|    (?P<failure>\S+)\r?"
    r"| *(?:TRY \d+ )?(?P<next>PASS|LEAK|FLAKY|FAIL|TIMEOUT|ABORT|SIG[A-Z]+|SKIP)[^\n\[]{0,20}\[[^\n\]]*\] +(?:\( *\d+/\d+\) +)?"
    r"(?P<crate>\S+) +(?P<test>\S+)\r?"
    r")$",
    re.MULTILINE,
)
_SAID = re.compile(r"(ok|FAILED|ignored)(?:(?<=ignored), [^\n]*| <[\d.]+s>)?\r?")
_LONGEST_GAP = 10  # characters between the line that names a program and its first line
_HEAD = re.compile(
    r"(?:Doc-tests \S+ > )?(?:unittests )?([^\s(>]+?)\.rs(?: \([^)]*\))?(?: > |: | - )(.+)", re.DOTALL
)
_EXAMPLE_LINE = re.compile(r" \(line \d+\)$")
_HASH = re.compile(r"-[0-9a-f]+(?:\.exe)?$")


class Rust:
    """The language Rust; see `LanguageModule`."""

    endings = (".rs",)

    def may_hold_tests(self, path: str) -> bool:
        return path.endswith(".rs") and "target" not in path.split("/")[:-1]

    def tests(self, source: bytes) -> list[DeclaredTest]:
        return [_declared(item) for item in items(parsed(source)) if item.is_test]

    def forms(self, name: str) -> list[Form]:
        """Modules are folders and files, so the place of a name without its first modules is made of these. It has no ending: the caller
        leaves the endings of paths out as it compares them.
        """
        head = _HEAD.fullmatch(name)
        if head is not None and " - " in name:
            return []  # an example in the documentation
        before, _, path = (head[2] if head else name).rpartition(" ")
        crate, _, program = before.partition("::")
        place = head[1] if head else f"src/{program}" if program.startswith("bin/") else ""
        place = f"tests/{program}" if crate and program and not place else place
        *modules, function = path.split("::")
        found: list[Form] = []
        for left_out in range(len(modules) + 1):
            folders = "/".join(modules[:left_out])
            places = [f"{root}/{folders}".strip("/") for root in _roots(place)] if folders else [place]
            key = "::".join((*modules[left_out:], function))
            found += [Form(key, one) for one in dict.fromkeys(places)]
        return found

    def outcomes(self, log: str) -> dict[str, str]:
        """A test is named with its program where the log names that, as in "tests/it.rs > adds": a patch may add a test of the same name
        in another program. All examples in the documentation of an item have one name, because a patch may move their lines.
        """
        return _CargoLog(_ANSI.sub("", log)).outcomes()

    def candidates(self, source: bytes, chance: random.Random) -> list[Candidate]:
        return contradictions(source, chance)


LANGUAGE = Rust()


def _roots(place: str) -> list[str]:
    """The folders in which the modules of the crate's root file at `place` may be."""
    folder, _, file = place.rpartition("/")
    return [folder] if file in ("lib", "main", "mod") else [place, folder]


class _CargoLog:
    """The outcomes in the log of cargo test or cargo nextest."""

    def __init__(self, log: str) -> None:
        self._log = log
        self._found: list[tuple[str, str, str]] = []  # program, name, outcome
        self._of_nextest: list[tuple[str, str]] = []
        self._program = self._head = ""
        self._head_end = 0
        self._waiting = ""  # the test whose outcome follows its own output

    def outcomes(self) -> dict[str, str]:
        announced: set[str] = set()
        in_failures = False
        for line in _LINE.finditer(self._log):
            kind = line.lastgroup
            in_failures = kind == "failures" or (in_failures and kind == "failure")
            if kind in ("said", "failures", "result", "running"):
                self._end_of_output(line.start())
            if kind == "said":
                announced.add(line["name"])
                said = _SAID.fullmatch(line["said"])
                self._waiting = "" if said else line["name"]
                if said:
                    self._add(line["name"], said[1])
            elif kind == "late" and self._waiting:
                self._add(self._waiting, line["late"])
                self._waiting = ""
            elif kind == "failure" and in_failures and line["failure"] in announced:
                self._add(line["failure"], "FAILED")
            elif kind in ("program", "doctests"):
                self._head, self._head_end = _program(line), line.end()
            elif kind == "running":
                is_next = line.start() - self._head_end < _LONGEST_GAP
                is_next = is_next and not self._log[self._head_end : line.start()].strip()
                self._program, self._head = self._head if is_next else "", ""
            elif kind == "test":
                name = f"{line['crate']} {line['test']}"
                self._of_nextest.append((name, _OUTCOMES_OF_NEXTEST.get(line["next"], FAILED)))
        self._end_of_output(len(self._log))
        return self._named()

    def _add(self, name: str, said: str) -> None:
        self._found.append((self._program, _EXAMPLE_LINE.sub("", name), _OUTCOMES[said]))

    def _end_of_output(self, end: int) -> None:
        """Reads the outcome that follows the output of a test in the same line."""
        ends = ("\n", "\r\n", "\n\n", "\r\n\r\n")
        endings = {said: tuple(f"{said}{one}" for one in ends) for said in _OUTCOMES}
        said = next((one for one in endings if self._log.endswith(endings[one], 0, end)), None)
        if self._waiting and said is not None:
            self._add(self._waiting, said)
        self._waiting = ""

    def _named(self) -> dict[str, str]:
        # cargo nextest repeats what the tests print: the report of a libtest that ran one test.
        repeated = {name.rpartition(" ")[2] for name, _ in self._of_nextest}
        named = [
            (f"{program} > {name}" if program else name, outcome)
            for program, name, outcome in self._found
            if name not in repeated
        ]
        return joined([*self._of_nextest, *named])


def _program(line: re.Match[str]) -> str:
    """The name of a test program by its line: its file, and for unit tests the crate as well, because each crate has a src/lib.rs."""
    if line["doctests"]:
        return line["doctests"]
    crate = _HASH.sub("", line["program"].rpartition("/")[2])
    return f"{line['binary']} ({crate})" if line["binary"].startswith("unittests") else line["binary"]


def _declared(item: RustItem) -> DeclaredTest:
    name, function = item.name, text_of(item.node.child_by_field_name("name"))
    pattern = None
    if any(attribute_name(one) in _WITH_CASES for one in item.attributes):
        modules = f"(?:{re.escape('::'.join(item.modules))}::)?" if item.modules else ""
        pattern = re.compile(rf"{modules}{re.escape(function)}(?:::[\w:]+)?")
    return DeclaredTest(name, tuple(dict.fromkeys((name, function))), pattern)
