"""A sink that shows the numbers of a run in TensorBoard. Nothing is ever read back from here."""

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from trainer.records.points import points
from trainer.records.row import Row


class Board(AbstractContextManager["Board", None]):
    """One event file.

    After a resume, TensorBoard discards the points from `resumed_at` on, because those steps are taken again.
    """

    def __init__(self, directory: Path, *, resumed_at: int | None = None) -> None:
        self._writer = EventFileWriter(str(directory))
        if resumed_at is not None:
            self._writer.add_event(Event(step=resumed_at, session_log=SessionLog(status=SessionLog.START)))

    def show(self, row: Row) -> None:
        """Every number of the row, at its step."""
        for point in points(row):
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._writer.add_event(Event(wall_time=point.at, step=point.step, summary=Summary(value=values)))
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
