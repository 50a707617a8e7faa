"""Decides each kind of verdict from the results of a test run.

A log or an exit status that would make a patch resolved counts only if the witness, if it reported, saw the same. Each verdict names its
deciding reason and contains the outcome of every test that it names.

Code under test wrote everything that is read here, so the grader calls these functions in a process of their own (`workers/isolation`).
Parts of a result that only such functions read stay encoded in between.
"""

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pipeline.errors import TaskBroken
from pipeline.task import ExitCode, R2eExpected, RewardFile, SwebenchLog, Task, TestsJson
from pipeline.trajectory import Reward
from workers.grading import reward_files, swebench_rules
from workers.grading.controls.drawing import Outcomes, outcomes
from workers.grading.defence import after, witness
from workers.grading.defence.after import Evidence
from workers.grading.languages.language import outcomes_in
from workers.grading.swebench_rules import Marks, UnreadableLog

LOG_TAIL_CHARS = 4000
MOST_OUTCOMES = 1000  # number of outcomes kept for a verdict that names no tests
# Limits for texts that code under test may have written, because a reward travels with its trajectory.
NAME_CHARS, STATUS_CHARS, DECIDED_BY_CHARS = 1000, 40, 2000
R2E_STATUSES = ("PASSED", "FAILED", "ERROR")
R2E_SUMMARY = "short test summary info"

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class _ParsedTest(msgspec.Struct):
    name: str
    status: str


class _Parsed(msgspec.Struct):
    tests: list[_ParsedTest]


@dataclass(frozen=True, slots=True)
class Remains:
    """The output of a finished test run."""

    patch: bytes
    exit_code: int
    log: bytes  # the log as `readable` returns it
    notes: bytes  # the text that came over the sandbox's side channel
    parsed: bytes | None  # output of the parser of a tests_json verdict, None if it failed or there is none
    restored: tuple[str, ...] = ()  # see `Evidence.restored`


class Judged(msgspec.Struct, frozen=True):
    """The reward without the cost of grading, and the outcome of each test, encoded."""

    reward: Reward
    outcomes: msgspec.Raw


def check(task: Task) -> None:
    """Raises TaskBroken for a verdict that no patch or every patch would reach."""
    verdict = task.verdict
    if not verdict.eval_script.strip():
        raise TaskBroken("eval_script is empty: any patch would do")
    for path in verdict.protected_paths:
        first = posixpath.normpath(path).split("/")[0]
        if path.startswith("/") or "\0" in path or first in (".", "..", ".git"):
            raise TaskBroken(f"protected_paths: {path!r} is not a path inside the repository")
    match verdict:
        case ExitCode():
            pass
        case SwebenchLog():
            swebench_rules.check(verdict)
        case R2eExpected(expected=expected):
            if "PASSED" not in expected.values():
                raise TaskBroken("expected lets no test pass: a patch that breaks everything would do")
            unknown = sorted(set(expected.values()) - set(R2E_STATUSES))
            if unknown:
                raise TaskBroken(f"expected: status {unknown[0]!r} is never read out of a log")
        case TestsJson():
            if not verdict.tests:
                raise TaskBroken("tests is empty: any patch would do")
            if not verdict.parser.strip():
                raise TaskBroken("parser is empty: no test would ever pass")


def readable(output: bytes, marks: Marks) -> bytes:
    """The eval script's output as UTF-8, with its original markers."""
    return marks.in_log(output.decode("utf-8", "replace")).encode()


def judged(task: Task, remains: Remains) -> Judged:
    """The verdict on one run of the tests. Raises GraderError if the script of a reward_file verdict left no reward."""
    runs, log, parsed = witness.testimony(remains.notes), remains.log.decode(), remains.parsed
    if isinstance(task.verdict, RewardFile) and remains.exit_code == 0:
        parsed = reward_files.reported(remains.notes)
    reported = {}
    if isinstance(task.verdict, ExitCode) and not witness.sessions(runs):
        reported = outcomes_in(task.verdict.eval_script, log)
    evidence = Evidence(
        remains.patch, remains.exit_code, log, runs, parsed, restored=remains.restored, reported=reported
    )
    reward = judge(task, evidence)
    found = outcomes(runs, reported or reward.tests)
    reward = msgspec.structs.replace(reward, log_tail=log[-LOG_TAIL_CHARS:])
    return Judged(reward, msgspec.Raw(msgspec.msgpack.encode(found)))


def decoded(encoded: bytes) -> Outcomes:
    """The decoded outcome of each test."""
    return msgspec.msgpack.decode(encoded, type=Outcomes)


def judge(task: Task, evidence: Evidence) -> Reward:
    """The reward, without the cost of grading. It may take seconds for a large log. Raises the error of `judged`."""
    match task.verdict:
        case RewardFile() as verdict:
            return _by_reward_file(verdict, evidence)
        case ExitCode() as verdict:
            return _by_exit_code(verdict, evidence)
        case SwebenchLog() as verdict:
            return _by_swebench(verdict, task.id, evidence)
        case R2eExpected() as verdict:
            return _by_r2e(verdict, evidence)
        case TestsJson() as verdict:
            return _by_tests_json(verdict, evidence)


def _by_exit_code(verdict: ExitCode, evidence: Evidence) -> Reward:
    refuted_by = None
    if evidence.exit_code == 0:
        refuted_by = after.refuted_status(evidence, verdict)
    seen = witness.outcomes(evidence.runs) or evidence.reported
    return _reward(
        f"exit status {evidence.exit_code}",
        resolved=evidence.exit_code == 0,
        refuted_by=refuted_by,
        tests={name[:NAME_CHARS]: outcome for name, outcome in list(seen.items())[:MOST_OUTCOMES]},
    )


def _by_reward_file(verdict: RewardFile, evidence: Evidence) -> Reward:
    """The reward in the file. Evidence against a pass also counts against a fraction, as far as it shows that the patch interfered."""
    value, decided_by = reward_files.read(evidence.parsed, verdict.reward)
    refuted_by = None
    if value == 1:
        refuted_by = after.refuted_status(evidence, verdict)
    elif value and verdict.fractions:
        refuted_by = after.tampering(evidence, verdict)
    seen = witness.outcomes(evidence.runs) or evidence.reported
    reward = _reward(
        decided_by,
        resolved=value == 1,
        refuted_by=refuted_by,
        tests={name[:NAME_CHARS]: outcome for name, outcome in list(seen.items())[:MOST_OUTCOMES]},
    )
    is_fraction = verdict.fractions and refuted_by is None
    return msgspec.structs.replace(reward, value=value) if is_fraction else reward


def _by_swebench(verdict: SwebenchLog, task_id: str, evidence: Evidence) -> Reward:
    try:
        return _by_swebench_report(verdict, task_id, evidence)
    except UnreadableLog as error:
        names = (*verdict.fail_to_pass, *verdict.pass_to_pass)
        tests = dict.fromkeys(names, "")
        return _reward(
            f"swebench: the parser broke off: {error}", resolved=False, refuted_by=None, tests=tests
        )


def _by_swebench_report(verdict: SwebenchLog, task_id: str, evidence: Evidence) -> Reward:
    """The reward by swebench's report. Raises UnreadableLog."""
    report = swebench_rules.report(verdict, task_id, evidence.log)
    refuted_by = None
    if report.resolved:

        def read(lines: str) -> Mapping[str, str]:
            return swebench_rules.parsed(verdict, task_id, lines)

        names = (*verdict.fail_to_pass, *verdict.pass_to_pass)

        def matters(test: str) -> bool:
            return any(test.startswith(name) or name.startswith(f"{test}::") for name in names)

        refuted_by = after.refuted_outcomes(evidence, verdict, report.tests, read, matters)
    reward = _reward(
        f"swebench: {report.status}", resolved=report.resolved, refuted_by=refuted_by, tests=report.tests
    )
    return msgspec.structs.replace(reward, fail_to_pass=report.fail_to_pass, pass_to_pass=report.pass_to_pass)


def _by_r2e(verdict: R2eExpected, evidence: Evidence) -> Reward:
    expected = {_r2e_name(name): status for name, status in verdict.expected.items()}
    found = r2e_statuses(evidence.log)
    others = {name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)}
    others -= {""} if "" in expected and "" in found else set()
    refuted_by = None
    if not others:
        refuted_by = after.refuted_outcomes(
            evidence,
            verdict,
            found,
            read=lambda lines: r2e_statuses(f"{R2E_SUMMARY}\n{lines}"),
            matters=lambda test: _r2e_name(_inside(test)) in expected.keys() - {""},
            all_seen=True,
        )
    return _reward(
        f"r2e: {len(others)} tests otherwise than the {len(expected)} expected"
        if others
        else f"r2e: {len(expected)} tests as expected",
        resolved=not others,
        refuted_by=refuted_by,
        tests={name: found.get(_r2e_name(name), "") for name in verdict.expected},
    )


def _by_tests_json(verdict: TestsJson, evidence: Evidence) -> Reward:
    statuses: dict[str, str] = {}
    try:
        parsed = msgspec.json.decode(evidence.parsed or b"", type=_Parsed)
        # A name means all tests that share it, and one pass is enough: this is SWE-bench Pro's rule.
        for test in parsed.tests:
            if statuses.get(test.name) != "PASSED":
                statuses[test.name] = test.status
        passed = sum(statuses.get(name) == "PASSED" for name in verdict.tests)
        decided_by = f"tests_json: {passed} of {len(verdict.tests)} tests passed"
    except (msgspec.DecodeError, UnicodeDecodeError):
        passed, decided_by = 0, "tests_json: the parser made nothing of the log"
    resolved = passed == len(verdict.tests)
    refuted_by = None
    if resolved:
        refuted_by = after.refuted_passes(evidence, verdict, verdict.tests)
    return _reward(
        decided_by,
        resolved=resolved,
        refuted_by=refuted_by,
        tests={name: statuses.get(name, "") for name in verdict.tests},
    )


def _reward(decided_by: str, *, resolved: bool, refuted_by: str | None, tests: dict[str, str]) -> Reward:
    resolved = resolved and refuted_by is None
    if refuted_by is not None:
        decided_by = f"{decided_by}, but {refuted_by}"
    tests = {name: status[:STATUS_CHARS] for name, status in tests.items()}
    return Reward(
        value=float(resolved), resolved=resolved, decided_by=decided_by[:DECIDED_BY_CHARS], tests=tests
    )


def r2e_statuses(log: str) -> dict[str, str]:
    """Status by name of every test in pytest's short summary, with names as R2E-Gym shortens them.

    A line without a test, for a file that cannot be collected, has the name "". The status is the line's first word; the rest may be any
    text from code under test.
    """
    _, _, summary = _ANSI.sub("", log).replace("\r", "").partition(R2E_SUMMARY)
    summary = summary.partition(R2E_SUMMARY)[0]
    statuses: dict[str, str] = {}
    for line in summary.splitlines():
        status, _, test = line.partition(" ")
        if status in R2E_STATUSES:
            statuses[_r2e_name(_inside(test))] = status
    return statuses


def _inside(test: str) -> str:
    return ".".join(test.split("::")[1:])


def _r2e_name(name: str) -> str:
    return _ANSI.sub("", name).split(" - ")[0]
