"""A sink that shows steps and evaluations in TensorBoard. Nothing is ever read back from here."""

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import msgspec
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from trainer.records.journal import EvaluationRow, Row, StepRow

_NOT_SHOWN = {"step", "at", "greedy"}  # they are the point's place, time and tag
_GAP = {"logprob_gap_max", "logprob_gap_mean"}


class Board(AbstractContextManager["Board", None]):
    """One event file.

    After a resume, TensorBoard discards the points from `resumed_at` on, because those steps are taken again.
    """

    def __init__(self, directory: Path, *, resumed_at: int | None = None) -> None:
        self._writer = EventFileWriter(str(directory))
        if resumed_at is not None:
            self._writer.add_event(Event(step=resumed_at, session_log=SessionLog(status=SessionLog.START)))

    def show(self, row: Row) -> None:
        """Every number of a step or an evaluation, at its step."""
        match row:
            case StepRow():
                self._write(row, "train", without=set() if row.is_gap_measured else _GAP)
            case EvaluationRow():
                self._write_evaluation(row)
            case _:
                pass

    def close(self) -> None:
        self._writer.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_evaluation(self, row: EvaluationRow) -> None:
        """The numbers, and the share of each way in which episodes ended."""
        group = "/".join(
            part for part in ("heldout", row.tasks, "greedy" if row.greedy else "sampled") if part
        )
        num_ended = sum(row.outcomes.values())
        extra = {f"pass_at_{k}": value for k, value in row.pass_at.items()}
        extra |= {
            f"ended_{name.replace(':', '_')}": count / num_ended for name, count in row.outcomes.items()
        }
        self._write(row, group, extra=extra)

    def _write(
        self,
        row: StepRow | EvaluationRow,
        group: str,
        *,
        without: AbstractSet[str] = frozenset(),
        extra: Mapping[str, float] | None = None,
    ) -> None:
        values = [
            Summary.Value(tag=f"{group}/{name}", simple_value=value)
            for name, value in (msgspec.structs.asdict(row) | dict(extra or {})).items()
            if name not in _NOT_SHOWN | without and isinstance(value, int | float) and math.isfinite(value)
        ]
        self._writer.add_event(Event(wall_time=row.at, step=row.step, summary=Summary(value=values)))
        self._writer.flush()
