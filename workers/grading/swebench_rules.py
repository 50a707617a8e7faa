"""The only module that knows the swebench package (5.x): its log parsers and its rule for "resolved".

The parsers of two other packages of data sets are registered as its own when a task names one.
"""

import functools
import importlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import TaskBroken
from pipeline.task import SwebenchLog
from pipeline.trajectory import Tally
from workers.grading import multi_swe_bench, swe_smith
from workers.grading.packages import root_of, stand_in

stand_in("swebench.harness", root_of("swebench", "swebench>=5,<6") / "harness")
_constants: Any = importlib.import_module("swebench.harness.constants")
_grading: Any = importlib.import_module("swebench.harness.grading")
_types: Any = importlib.import_module("swebench.types")

MOST_CHARS = 200  # length of a parser's own message about a log
LOG_PARSERS = frozenset(_grading.PARSER_REGISTRY)
_EXIT_CODE_VARIABLE = _constants.TEST_EXIT_CODE_VAR
_MARKS: tuple[str, ...] = (
    _constants.START_TEST_OUTPUT,
    _constants.END_TEST_OUTPUT,
    _constants.TEST_EXIT_CODE,
    _constants.APPLY_PATCH_FAIL,
    _constants.RESET_FAILED,
    _constants.TESTS_ERROR,
    _constants.TESTS_TIMEOUT,
)


class UnreadableLog(Exception):
    """The parser failed. It succeeded in the task's verification, so this log is not like those of the task's tests."""


@dataclass(frozen=True, slots=True)
class SwebenchReport:
    """`status` is swebench's status: RESOLVED_FULL, RESOLVED_PARTIAL or RESOLVED_NO; "log rejected" if swebench did not accept the log."""

    status: str
    fail_to_pass: Tally
    pass_to_pass: Tally
    tests: dict[str, str]  # status by name, of the tests in both lists

    @property
    def resolved(self) -> bool:
        return self.status == _constants.ResolvedStatus.FULL.value


def check(verdict: SwebenchLog) -> None:
    """Raises TaskBroken for a verdict that no patch or every patch would reach."""
    if not _register(verdict.log_parser):
        raise TaskBroken(
            f"log_parser {verdict.log_parser!r} is not one of swebench's, multi-swe-bench's or swesmith's"
        )
    if not verdict.fail_to_pass and not verdict.pass_to_pass:
        raise TaskBroken("fail_to_pass and pass_to_pass are both empty: any patch would do")
    if _constants.END_TEST_OUTPUT not in verdict.eval_script:
        raise TaskBroken(
            f"eval_script does not print {_constants.END_TEST_OUTPUT!r}: swebench would reject every log"
        )


def _register(log_parser: str) -> bool:
    """Registers a parser of another package as one of swebench's. Returns whether there is a parser of this name."""
    if log_parser in LOG_PARSERS:
        return True
    packages = [package for package in (multi_swe_bench, swe_smith) if log_parser.startswith(package.PREFIX)]
    if not packages or not packages[0].is_parser(log_parser):
        return False

    def parse(log: str, spec: Any) -> dict[str, str]:
        # swebench takes a missing name with an open bracket for a cut one, and a longer name for its test. These packages cut no names.
        open_names = (
            name for name in (*spec.FAIL_TO_PASS, *spec.PASS_TO_PASS) if name.count("[") > name.count("]")
        )
        return dict.fromkeys(open_names, "FAILED") | packages[0].parsed(log_parser, spec.version, log)

    _grading.PARSER_REGISTRY[log_parser] = parse
    return True


@dataclass(frozen=True, slots=True)
class Marks:
    """Makes the script's markers unforgeable: each contains a nonce that only the script knows, instead of text that any test can print."""

    nonce: str = field(default_factory=functools.partial(secrets.token_hex, 8))

    def in_script(self, script: str) -> str:
        """`script` with its own markers, which also records the test command's exit status, like the official harness."""
        lines: list[str] = []
        # The text is split at newlines only: other line ends belong to a patch within the script.
        for line in script.removesuffix("\n").split("\n"):
            ends = _constants.END_TEST_OUTPUT in line and _EXIT_CODE_VARIABLE not in script
            lines += [f"{_EXIT_CODE_VARIABLE}=$?"] if ends else []
            lines += [line]
            lines += [f'echo "{_constants.TEST_EXIT_CODE}: ${_EXIT_CODE_VARIABLE}"'] if ends else []
        text = "\n".join(lines) + "\n"
        for mark in _MARKS:
            text = text.replace(mark, self._secret(mark))
        return text

    def in_log(self, log: str) -> str:
        """`log` as the official script would have printed it. Markers that the script did not print are made unreadable."""
        for mark in _MARKS:
            log = log.replace(mark, f"(printed by a test) {mark[3:]}").replace(self._secret(mark), mark)
        return log

    def _secret(self, mark: str) -> str:
        return f"<{self.nonce}>{mark[5:]}"


def report(verdict: SwebenchLog, instance_id: str, log: str) -> SwebenchReport:
    """swebench's verdict on the log of `verdict`'s eval script, with the original markers. It takes seconds for a large log."""
    spec = _spec(verdict, instance_id)
    gold = {_constants.FAIL_TO_PASS: spec.FAIL_TO_PASS, _constants.PASS_TO_PASS: spec.PASS_TO_PASS}
    statuses, accepted = _read(spec, log)
    if not accepted:
        return SwebenchReport(
            "log rejected",
            Tally(passed=0, total=len(spec.FAIL_TO_PASS)),
            Tally(passed=0, total=len(spec.PASS_TO_PASS)),
            dict.fromkeys((*verdict.fail_to_pass, *verdict.pass_to_pass), ""),
        )
    tests = _grading.get_eval_tests_report(statuses, gold, eval_type=_constants.EvalType(verdict.eval_type))
    return SwebenchReport(
        status=_grading.get_resolution_status(tests),
        fail_to_pass=_tally(tests[_constants.FAIL_TO_PASS], spec.FAIL_TO_PASS),
        pass_to_pass=_tally(tests[_constants.PASS_TO_PASS], spec.PASS_TO_PASS),
        tests={name: status_of(name, statuses) for name in (*verdict.fail_to_pass, *verdict.pass_to_pass)},
    )


def parsed(verdict: SwebenchLog, instance_id: str, lines: str) -> dict[str, str]:
    """Status by name, as `verdict`'s parser reads `lines`."""
    spec = _spec(verdict, instance_id)
    try:
        statuses: dict[str, str] = _grading.PARSER_REGISTRY[verdict.log_parser](lines, spec)
    except Exception as error:
        raise UnreadableLog(_failure(error)) from error
    return statuses


def _read(spec: Any, log: str) -> tuple[dict[str, str], bool]:
    """Status by name, and whether swebench accepts the log. swebench reads the log from a file, which has no name on disk here."""
    with os.fdopen(os.memfd_create("log"), "wb") as file:
        file.write(log.encode("utf-8", "replace"))
        file.flush()
        try:
            return _grading.get_logs_eval(spec, f"/proc/self/fd/{file.fileno()}")
        except Exception as error:
            raise UnreadableLog(_failure(error)) from error


def _failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_CHARS]


def status_of(name: str, statuses: Mapping[str, str]) -> str:
    """The status of the test `name`, "" if it is absent. A name cut within its parameters means every test that begins with it."""
    if name in statuses or name.count("[") <= name.count("]"):
        return statuses.get(name, "")
    found = {status for other, status in statuses.items() if other.startswith(name)}
    return found.pop() if len(found) == 1 else ", ".join(sorted(found))


def _spec(verdict: SwebenchLog, instance_id: str) -> Any:
    _register(verdict.log_parser)
    return _types.TestSpec(
        instance_id=instance_id,
        image="",
        eval_script_list=[],
        repo=verdict.repo,
        version=verdict.version,
        FAIL_TO_PASS=list(verdict.fail_to_pass),
        PASS_TO_PASS=list(verdict.pass_to_pass),
        log_parser=verdict.log_parser,
        eval_type=verdict.eval_type,
    )


def _tally(tests: dict[str, list[str]], expected: list[str]) -> Tally:
    return Tally(passed=len(tests["success"]), total=len(expected))
