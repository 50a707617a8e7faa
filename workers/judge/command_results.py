"""What a command of a rollout came to: whether it failed, and whether it ran tests that passed or failed. Rules are made of this."""

import re
from typing import Literal

from pipeline.trajectory import Action, Observation
from workers.judge.shell import SimpleCommand, simple_commands

Verdict = Literal["passed", "failed"]

TAIL_CHARS = 1000  # of an output, in which the result of a test run stands
# Exit status 1 of these is a finding ("nothing matches", "they differ"), not an error.
_FINDERS = re.compile(
    r"(?:\S*/)?(?:grep|egrep|fgrep|rg|ag|diff|cmp|test|\[|\[\[|git\s+(?:diff|grep))(?:\s|$)"
)
_TEST_RUNS = re.compile(
    r"(?:\S*/)?(?:pytest|py\.test|tox|nox|ctest|rspec|phpunit|jest|vitest)(?:\s|$)"
    r"|(?:\S*/)?python[\d.]*\s+(?:-\w\s+)*-m\s+(?:pytest|unittest)(?:\s|$)"
    r"|(?:go|cargo|npm|yarn|pnpm|mvn|gradle|\./gradlew|bazel|dotnet|make)\s+(?:run\s+)?(?:test|check)(?:[\s:]|$)"
    r"|(?:\S*/)?python[\d.]*\s+\S*(?:manage\.py\s+test|runtests\.py|setup\.py\s+test)(?:\s|$)"
)
# A check by hand: an expression about imported code that is printed.
_PRINTED_CHECK = re.compile(r"(?:\S*/)?python[\d.]*\s+-c\s(?=.*\bimport )(?=.*\bprint\()", re.DOTALL)
_SOME_PASSED = re.compile(r"\b[1-9]\d* passed\b")
_SOME_FAILED = re.compile(r"\b[1-9]\d* (?:failed|errors?)\b")
_UNITTEST_OK = re.compile(r"\bRan [1-9]\d* tests?\b[^\n]*\n+OK\b")
_UNITTEST_FAILED = re.compile(r"^FAILED \(", re.MULTILINE)
_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Exit)\b")


def failed(action: Action) -> bool:
    """Whether the command failed or was stopped at its time limit. A test run that fails shows a fault, and a search that finds nothing
    is a finding: neither is a failure.
    """
    seen = action.observation
    if seen is None:
        return False
    if seen.exit_code is None:
        return True
    commands = simple_commands(action.command)
    if seen.exit_code == 0 or _matching(commands, _TEST_RUNS):
        return False
    return not (seen.exit_code == 1 and _decides(commands, _FINDERS))


def verdict_of_tests(action: Action) -> Verdict | None:
    """How the tests that the command ran ended, by the evidence: what pytest, unittest or a check by hand printed, otherwise the exit
    status. None: it ran none, or what came of them is not known.
    """
    seen, commands = action.observation, simple_commands(action.command)
    if seen is None or seen.exit_code is None:
        return None
    tail = seen.output[-TAIL_CHARS:]
    runs = [command.line for command in _matching(commands, _TEST_RUNS)]
    if any("pytest" in run or "py.test" in run for run in runs):
        return _by_evidence(seen, tail, passed=_SOME_PASSED, failed=_SOME_FAILED)
    if any("unittest" in run for run in runs):
        return _by_evidence(seen, tail, passed=_UNITTEST_OK, failed=_UNITTEST_FAILED)
    if runs:
        return ("failed" if seen.exit_code else "passed") if _decides(commands, _TEST_RUNS) else None
    return _verdict_by_hand(tail) if _matching(commands, _PRINTED_CHECK) else None


def _by_evidence(
    seen: Observation, tail: str, *, passed: re.Pattern[str], failed: re.Pattern[str]
) -> Verdict | None:
    if failed.search(tail):
        return "failed"
    return "passed" if seen.exit_code == 0 and passed.search(tail) else None


def _verdict_by_hand(tail: str) -> Verdict | None:
    last = tail.strip().rpartition("\n")[2].strip()
    if last == "True":
        return "passed"
    return "failed" if last == "False" or _EXCEPTION.match(last) else None


def _matching(commands: tuple[SimpleCommand, ...], pattern: re.Pattern[str]) -> list[SimpleCommand]:
    return [command for command in commands if pattern.match(command.line)]


def _decides(commands: tuple[SimpleCommand, ...], pattern: re.Pattern[str]) -> bool:
    """Whether the exit status of the line is that of a command that `pattern` recognises: it is the last one."""
    return bool(commands and pattern.match(commands[-1].line))
