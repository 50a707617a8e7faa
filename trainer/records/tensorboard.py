"""The journal's steps and evaluations as TensorBoard shows them.

Only a mirror: nothing is ever read back from here.
"""

import math
from pathlib import Path

import msgspec
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from trainer.records.journal import EvaluationRow, StepRow

_NOT_SHOWN = ("step", "at")


class Board:
    """One event file.

    After a resume, TensorBoard forgets what was shown from `resumed_at` on: those steps are taken again.
    """

    def __init__(self, directory: Path, *, resumed_at: int | None = None) -> None:
        self._writer = EventFileWriter(str(directory))
        if resumed_at is not None:
            self._writer.add_event(Event(step=resumed_at, session_log=SessionLog(status=SessionLog.START)))

    def show(self, row: StepRow | EvaluationRow) -> None:
        """Every number of the row, at its step."""
        group = "train" if isinstance(row, StepRow) else row.name
        values = [
            Summary.Value(tag=f"{group}/{name}", simple_value=value)
            for name, value in msgspec.structs.asdict(row).items()
            if name not in _NOT_SHOWN and isinstance(value, int | float) and math.isfinite(value)
        ]
        self._writer.add_event(Event(wall_time=row.at, step=row.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
