"""Judges what a test run left behind. Code under test wrote all of it, so the grader calls these functions in a process of their own
(`workers/isolation`). What only such functions read of a result stays encoded in between.
"""

from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from pipeline.calibration import Calibration
from pipeline.task import Task
from pipeline.trajectory import Reward
from workers.grading import witness
from workers.grading.controls.outcomes import Outcomes, outcomes, shortfall, survivors
from workers.grading.swebench_rules import Marks
from workers.grading.verdicts import Evidence, judge

LOG_TAIL_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Remains:
    """What a finished test run left behind."""

    patch: bytes
    exit_code: int
    log: bytes  # as `readable` returns it
    notes: bytes  # what came over the sandbox's side channel
    parsed: bytes | None  # what the parser of a tests_json verdict wrote, None if it failed
    restored: tuple[str, ...] = ()  # see `Evidence.restored`


class Judged(msgspec.Struct, frozen=True):
    """The reward without the cost of grading, and what became of each test, encoded."""

    reward: Reward
    outcomes: msgspec.Raw


def readable(output: bytes, marks: Marks) -> bytes:
    """The eval script's output as UTF-8, with its original marks."""
    return marks.in_log(output.decode("utf-8", "replace")).encode()


def judged(task: Task, remains: Remains) -> Judged:
    """The verdict on one run of the tests."""
    runs, log = witness.testimony(remains.notes), remains.log.decode()
    evidence = Evidence(remains.patch, remains.exit_code, log, runs, remains.parsed, remains.restored)
    reward = judge(task, evidence)
    found = outcomes(runs, reward.tests)
    reward = replace(reward, log_tail=log[-LOG_TAIL_CHARS:])
    return Judged(reward, msgspec.Raw(msgspec.msgpack.encode(found)))


def decoded(encoded: bytes) -> Outcomes:
    """What became of each test."""
    return msgspec.msgpack.decode(encoded, type=Outcomes)


def lacking(encoded: bytes, calibration: Calibration) -> str | None:
    """What a pass lacks of what the known fix has; None if nothing."""
    return shortfall(decoded(encoded), calibration)


def surviving(names: list[str], encoded: bytes, calibration: Calibration) -> list[str]:
    """The controlled tests of these names that did not fail in the control run, in order."""
    return survivors(names, decoded(encoded), calibration)
