"""Names and outcomes of tests in the logs of JavaScript's runners: node, mocha, jest, vitest, and all that write TAP.

A log is read line by line. A name has the titles from the outermost one to the test with " > " between, and the file in front if the log
says it.
"""

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

from workers.grading.languages.language import FAILED, PASSED, SKIPPED, Form, joined

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FILE = re.compile(r"(?:[^\s|>]|(?<=\w) (?=\w))+\.[cm]?[jt]sx?")
_SEPARATOR = re.compile(r"\s(?:>|\u203a|»|\|)\s")
_DURATION = re.compile(
    r"\s+(?:\(\d+(?:\.\d+)?\s?m?s\)|\[\d+(?:\.\d+)?\s?m?s\]|\d+(?:\.\d+)?m?s|# time=[\d.]+m?s(?: \{)?)$"
)
_AGAIN = re.compile(r" \((?:retry|repeat) x\d+\)")  # what vitest adds to a test that ran more than once
_JOINT = " \u203a "  # between titles, in ava and the failures of jest
_LONGEST = 2000  # longest line that may name a test
_GLYPHS = {
    **dict.fromkeys("✓✔√", PASSED),
    **dict.fromkeys("✕✖\u00d7✗✘", FAILED),
    **dict.fromkeys("○﹣↓✎-", SKIPPED),
}
_TREE = re.compile(rf"([{''.join(_GLYPHS)}]|\d+\)) +(\S.*)")
_TAP = re.compile(r"(not )?ok\b(?: +\d+)?( +-)?(?: +(.*))?")
_DIRECTIVE = re.compile(r"(?:^|\s)# *(SKIP|TODO)\b.*$", re.IGNORECASE)
_HEADING = re.compile(r"(?:PASS|FAIL) +(\S.*)")
_SUMMARY = re.compile(r"\d+ (?:passing|failing)\b|✖ failing tests:")
_NUM_TESTS = re.compile(r"(.*?\S) \((?:\d+ tests?|\d+)(?: \| [^()]*)?\)(?: +[\d.]+ ?m?s)?")
# The outcome in words between glyph and title: in ava after `✘`, `✔` and `-`, in jest after `○` and `✎`.
_WORDED = re.compile(r"(?<=[✘✔-] )\[(?:fail|skip|todo|expected fail)\]:? +|(?<=[○✎] )(?:skipped|todo) (?=\S)")
_HOOK = re.compile(r'"(?:before|after) each" hook.*? (?:for|in) "(.+)"')
_REPORT = re.compile(r'^\{\s*"(?:num[A-Z]\w+|stats)"', re.MULTILINE)
_MOST_REPORTS = 20
_MOST_READINGS = 10
_STATUS = {"passed": PASSED, "failed": FAILED}


def forms(name: str) -> list[Form]:
    """The readings of a test's name, the most specific one first."""
    whole = " ".join(_ANSI.sub("", name).split())
    readings: dict[Form, None] = {}
    for text in dict.fromkeys((whole, _DURATION.sub("", whole))):
        place = ""
        pieces = _SEPARATOR.split(text)
        if len(pieces) > 1 and _FILE.fullmatch(pieces[0]) is not None:
            # An absolute path is one of the container. What of it is the path of the repository is not known.
            place = (
                pieces[0].rsplit("/", 1)[-1] if pieces[0].startswith("/") else pieces[0].removeprefix("./")
            )
            pieces = pieces[1:]
            text = _SEPARATOR.split(text, maxsplit=1)[1]
        readings[Form(text, place)] = None
        for first in range(len(pieces))[-_MOST_READINGS:]:
            readings[Form(" > ".join(pieces[first:]), place)] = None
    readings[Form(whole)] = None
    return [*readings]


def outcomes(log: str) -> dict[str, str]:
    """The outcome of each test in a log, by its name there."""
    plain = _AGAIN.sub("", _ANSI.sub("", log))
    found = [*_LogReader().read(plain), *_reported(plain)]
    return joined((" ".join(name.split()), outcome) for name, outcome in found if name)


class _LogReader:
    """Reads the lines of a log."""

    def __init__(self) -> None:
        self._titles: list[tuple[int, str]] = []  # the suites around the current line, with their indentation
        self._file = ""
        self._heading = ""  # of tape, whose results are those of assertions
        self._is_summary = False  # the failures are listed once more

    def read(self, log: str) -> Iterator[tuple[str, str]]:
        """Yields the names and outcomes of tests."""
        details: int | None = None  # the indentation of the details of a failure, in TAP
        was_result = False
        for line in log.split("\n"):
            text = line.strip()
            indent = len(line) - len(line.lstrip())
            if details is not None:
                details = None if text == "..." and indent == details else details
                continue
            if was_result and text == "---":
                details = indent
                continue
            was_result = False
            if not text or len(text) > _LONGEST:
                continue
            if (result := _TAP.fullmatch(text)) is not None:
                was_result = True
                yield from self._of_tap(result, indent)
            elif (entry := _TREE.fullmatch(text)) is not None and not text.startswith("✖ failing tests:"):
                yield from self._of_tree(entry, indent)
            else:
                yield from self._of_text(text, indent)

    def _of_text(self, text: str, indent: int) -> Iterator[tuple[str, str]]:
        """Reads a line that is no result: a title, a file, or a failure that is listed once more."""
        heading = _HEADING.fullmatch(text)
        if heading is not None and indent <= 1:
            self._titles, self._is_summary = [], False
            name = re.sub(r"^\|[^|]*\| +", "", heading[1])
            if " > " in name:
                yield name, FAILED
            else:
                self._file = _DURATION.sub("", name)
        elif _SUMMARY.match(text):
            self._is_summary = True
        elif text.startswith("# Subtest: "):
            self._open(indent, _unescaped(text.removeprefix("# Subtest: ")))
        elif text.startswith("# ") and indent == 0:
            self._heading = text[2:]
            skipped = re.match(r"(?:SKIP|TODO) +(\S.*)", self._heading)
            if skipped is not None:
                self._heading = skipped[1]
                yield self._heading, SKIPPED
        elif text.startswith("● ") and self._file and _JOINT in text:
            yield self._named(text[2:].replace(_JOINT, " > ")), FAILED
        elif text[0] in "▶\u276f":
            self._is_summary = False
            counted = _NUM_TESTS.fullmatch(text[1:].strip())
            if counted is not None and _FILE.fullmatch(counted[1]):
                self._file, self._titles = counted[1], []
            else:
                self._open(indent, counted[1] if counted else _DURATION.sub("", text[1:].strip()))
        elif indent >= 2:
            self._open(indent, text)

    def _of_tap(self, result: re.Match[str], indent: int) -> Iterator[tuple[str, str]]:
        failed, dash, rest = result[1], result[2], result[3] or ""
        directive = _DIRECTIVE.search(rest)
        outcome = SKIPPED if directive else FAILED if failed else PASSED
        if dash is None and self._heading:
            yield self._heading, outcome
            return
        name = _DURATION.sub("", _unescaped(rest[: directive.start()] if directive else rest))
        yield " > ".join([*self._around(indent), name.replace(_JOINT, " > ")]), outcome

    def _of_tree(self, entry: re.Match[str], indent: int) -> Iterator[tuple[str, str]]:
        glyph, name = entry[1], _WORDED.sub("", entry[0], count=1)[len(entry[1]) :].strip()
        outcome = _GLYPHS.get(glyph, FAILED)
        if (self._is_summary and (outcome == FAILED or glyph == "-")) or (
            glyph == "-" and (self._file or indent < 2)
        ):
            return
        self._is_summary &= outcome == FAILED
        counted = _NUM_TESTS.fullmatch(name)
        if counted is not None and _FILE.fullmatch(re.sub(r"^\|[^|]*\| +", "", counted[1])):
            self._file, self._titles = counted[1], []
            return
        name = re.sub(r"^\|[^|]*\| +", "", name)
        directive = re.search(r"\)( # .*)$", name)  # after the duration
        if directive is not None:
            name = name[: directive.start(1)]
            outcome = SKIPPED if _DIRECTIVE.search(directive[1]) else outcome
        hook = _HOOK.fullmatch(name)
        name = _DURATION.sub("", hook[1] if hook else name).replace(_JOINT, " > ")
        yield self._named(" > ".join([*self._around(indent), name])), outcome

    def _named(self, name: str) -> str:
        """Returns the name with the file in front, unless the name begins with one."""
        first = name.split(" > ", 1)[0]
        return f"{self._file} > {name}" if self._file and _FILE.fullmatch(first) is None else name

    def _open(self, indent: int, title: str) -> None:
        self._titles = [one for one in self._titles if one[0] < indent][-50:]
        self._titles.append((indent, title))

    def _around(self, indent: int) -> list[str]:
        return [title for column, title in self._titles if column < indent]


def _unescaped(name: str) -> str:
    """A name in TAP without the backslashes before # and backslashes."""
    return re.sub(r"\\([\\#])", r"\1", name)


def _reported(log: str) -> Iterator[tuple[str, str]]:
    """The outcomes in reports in JSON of jest, vitest and mocha."""
    decoder = json.JSONDecoder()
    for found in islice(_REPORT.finditer(log), _MOST_REPORTS):
        try:
            report = cast(dict[str, Any], decoder.raw_decode(log, found.start())[0])
            results = [*_of_jest(report), *_of_mocha(report)]
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            continue  # it is no report of these runners
        yield from results


def _of_jest(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for file in report.get("testResults", ()):
        for one in file["assertionResults"]:
            titles = [file["name"], *one["ancestorTitles"], one["title"]]
            yield " > ".join(titles), _STATUS.get(one["status"], SKIPPED)


def _of_mocha(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, outcome in (("passes", PASSED), ("pending", SKIPPED), ("failures", FAILED)):
        for one in report.get(key, ()):
            hook = _HOOK.search(one["fullTitle"])
            yield (
                " > ".join(
                    [*([one["file"]] if one.get("file") else []), hook[1] if hook else one["fullTitle"]]
                ),
                outcome,
            )
