"""The outcomes in the logs of programs that test C and C++.

Seen in runs: GoogleTest 1.12, cmocka 1.1.5, Unity, Catch2 2.13 (`-s`, `-r xml`, `-r junit`), doctest 2.4.9 (`-s`, `-r=xml`, `-r=junit`),
and ctest of CMake 3.25 with and without `-V`. Known from documentation: automake's lines `PASS: name`, meson's table.
"""

import html
import re
from collections.abc import Iterator

from workers.grading.languages.language import FAILED, PASSED, SKIPPED, joined

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# ctest -V puts the number of the test before each line of its output.
_PREFIX = re.compile(r"^(\d+): ", re.MULTILINE)
_GTEST = re.compile(
    r"\[ +(?P<said>RUN|OK|FAILED|SKIPPED) +\] (?P<name>(?!\d+ test)[\w./]+)(?:, where [^\n]*)?(?: \(\d+ ms\)[^\n]*)?\r?$",
    re.MULTILINE,
)
_CTEST = re.compile(
    r"^ *\d+/\d+ Test +#(?P<number>\d+): (?P<name>.+?) \.*\.(?P<said>[\w ]{0,30}\*\*\*[^\n]{3,40}?|   Passed) +[\d.]+ sec",
    re.MULTILINE,
)
_LINE = re.compile(
    r"^(?:(?P<automake>PASS|FAIL|XFAIL|XPASS|SKIP|ERROR): (?P<script>\S+)(?: .*)?"
    r"|[^\s:]+:\d+:(?P<function>\w+):(?P<unity>PASS|FAIL|IGNORE)\b.*"
    r"| *\d+/\d+ (?P<program>\S[^\n]*?) +(?P<meson>OK|FAIL|SKIP|TIMEOUT|ERROR|EXPECTEDFAIL|UNEXPECTEDPASS) +[\d.]+ ?s\b.*)\r?$",
    re.MULTILINE,
)
_GOOD = frozenset(("OK", "PASS", "XFAIL", "EXPECTEDFAIL", "Passed"))
_SKIPS = ("SKIP", "IGNORE", "***Skipped", "***Not Run (Disabled)")
_XML = re.compile(
    r'<TestCase name="(?P<name>[^"]*)"[^>]*?(?P<skipped> skipped="true"/)?>'
    r'|<(?:OverallResult success|OverallResultsAsserts [^>]*test_case_success)="(?P<success>true|false)"'
    r'|<testcase (?:classname="[^"]*" )?name="(?P<junit>[^"]*)"[^>]*?(?P<empty>/?)>|<(?P<bad>failure|error|skipped)\b|</testcase>'
)
_DASHES = "-" * 79
_RULES = (_DASHES, "=" * 79)


def outcomes(log: str) -> dict[str, str]:
    """The outcome of each test, by the name that the log gives to it. A program of ctest whose output names its tests has none itself."""
    plain = _ANSI.sub("", log).replace("\r\n", "\n")
    own = {
        prefix[1]
        for line in plain.splitlines()
        if (prefix := _PREFIX.match(line)) and _names_tests(line[prefix.end() :])
    }
    of_ctest = [
        (one["name"].strip(), _outcome(one["said"].strip()))
        for one in _CTEST.finditer(plain)
        if one["number"] not in own
    ]
    plain = _PREFIX.sub("", plain)
    return joined((*of_ctest, *_of_gtest(plain), *_of_lines(plain), *_of_xml(plain), *_of_sections(plain)))


def _names_tests(line: str) -> bool:
    """Whether a line of a program's output names a test, whether or not it passed."""
    return any(pattern.search(line) for pattern in (_GTEST, _XML, _LINE))


def _outcome(said: str) -> str:
    return PASSED if said in _GOOD else SKIPPED if said.startswith(_SKIPS) else FAILED


def _of_gtest(log: str) -> Iterator[tuple[str, str]]:
    """The outcomes in GoogleTest's and cmocka's logs. A test that began and did not end has failed."""
    running: set[str] = set()
    for line in _GTEST.finditer(log):
        if line["said"] == "RUN":
            running.add(line["name"])
        else:
            running.discard(line["name"])
            yield line["name"], _outcome(line["said"])
    yield from ((name, FAILED) for name in running)


def _of_lines(log: str) -> Iterator[tuple[str, str]]:
    """The outcomes in the lines of automake, Unity and meson."""
    for line in _LINE.finditer(log):
        name = line["script"] or line["function"] or line["program"]
        yield name, _outcome(line["automake"] or line["unity"] or line["meson"])


def _of_xml(log: str) -> Iterator[tuple[str, str]]:
    """The outcomes in Catch2's and doctest's reports `xml` and `junit`. A test that began and did not end has failed."""
    name, outcome = "", PASSED
    for found in _XML.finditer(log):
        if found["success"]:
            if name:
                yield name, PASSED if found["success"] == "true" else FAILED
            name = ""
        elif found["bad"]:
            outcome = SKIPPED if found["bad"] == "skipped" else FAILED
        elif found["name"] is not None or found["junit"] is not None:
            if found["junit"] is not None and found["empty"]:
                yield html.unescape(found["junit"]), PASSED
                name = ""
            else:
                name = "" if found["skipped"] else html.unescape(found["name"] or found["junit"] or "")
                outcome = FAILED if found["name"] is not None else PASSED
        elif name:
            yield name, outcome
            name = ""
    if name:
        yield name, FAILED


def _of_sections(log: str) -> Iterator[tuple[str, str]]:
    """The outcomes in the plain reports of Catch2 and doctest, which name passing tests only with `-s`."""
    lines = log.splitlines()
    name = ""
    for place, line in enumerate(lines):
        if line == _DASHES and lines[place - 1 : place] not in ([_DASHES],) and _opens_catch(lines, place):
            name = lines[place + 1].strip()
        elif line.startswith("TEST CASE:  "):
            name = line.removeprefix("TEST CASE:").strip()
        elif name and (said := re.search(r":\d+: (PASSED|SUCCESS|FAILED|ERROR|FATAL ERROR):", line)):
            yield name, PASSED if said[1] in ("PASSED", "SUCCESS") else FAILED


def _opens_catch(lines: list[str], place: int) -> bool:
    """Whether the dashes at `place` are before the name of a test, and not after it."""
    following = lines[place + 1 : place + 2]
    return bool(following and following[0].strip() and not re.search(r":\d+$", following[0]))
