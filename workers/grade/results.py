"""The result for each prediction, as --json has it, and the journal that lets an interrupted command go on where it was.

The journal is a file beside the results: one finished verdict a line, under a key of all that the verdict depends on. An
infrastructure failure is no verdict and is not kept, so that the next call tries again.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from pipeline.request import Limits
from pipeline.taskfile import fingerprint
from pipeline.trajectory import Control, Reward
from workers.grade.predictions import Prediction
from workers.unqueued.outputs import Unwritable, must_be_writable, writing

SUFFIX = ".unfinished.jsonl"


class PredictionResult(msgspec.Struct, frozen=True, kw_only=True):
    """One element of --json's list. `value` is None for an infrastructure failure, and `error` says what failed."""

    task: str
    value: float | None
    decided_by: str = ""
    applied_by: str = ""
    tests: dict[str, str] = msgspec.field(default_factory=dict[str, str])  # outcome by name
    control: Control = ""
    seconds: float
    error: str = ""


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the journal."""

    key: str
    result: PredictionResult


def result_of(task_id: str, reward: Reward, *, seconds: float) -> PredictionResult:
    """A verdict as a result."""
    return PredictionResult(
        task=task_id,
        value=reward.value,
        decided_by=reward.decided_by,
        applied_by=reward.applied_by,
        tests=reward.tests,
        control=reward.control,
        seconds=round(seconds, 2),
    )


def key_of(prediction: Prediction, limits: Limits) -> str:
    """The same for the same patch, task, calibration and limits only."""
    task = prediction.task
    said = (fingerprint(task), task.calibration, prediction.patch, limits.grade_cpu_s, limits.grade_wall_s)
    return hashlib.sha256(msgspec.msgpack.encode(said)).hexdigest()


@dataclass(slots=True)
class VerdictJournal:
    """Finished verdicts by key, in a file that is removed when there is nothing left to go on with."""

    path: Path | None  # None: they are kept nowhere
    known: dict[str, PredictionResult] = field(default_factory=dict[str, PredictionResult])

    @classmethod
    def beside(cls, path: Path, *, option: str) -> Self:
        """The journal beside `path`, which `option` names. Raises Unwritable if none can be kept there."""
        journal = path.with_name(f"{path.name}{SUFFIX}")
        try:
            must_be_writable(journal, option)
        except Unwritable as error:
            raise Unwritable(f"{error}; --json OUT keeps this file beside OUT") from error
        entries = map(_entry, journal.read_bytes().split(b"\n")) if journal.exists() else ()
        return cls(journal, {one.key: one.result for one in entries if one})

    def enter(self, key: str, result: PredictionResult) -> None:
        """Keeps the verdict. Raises Unwritable."""
        # What a killed process left of its last line ends here.
        line = b"\n" + msgspec.json.encode(_Entry(key=key, result=result)) + b"\n"
        if self.path:
            with writing("journal", self.path), self.path.open("ab") as file:
                file.write(line)
        self.known[key] = result

    def remove(self) -> None:
        """Everything is graded. Raises Unwritable."""
        if self.path:
            with writing("journal", self.path):
                self.path.unlink(missing_ok=True)


def _entry(line: bytes) -> _Entry | None:
    """None for a line that was cut short."""
    try:
        return msgspec.json.decode(line, type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
