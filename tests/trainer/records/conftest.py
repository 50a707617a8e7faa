"""What sinks keep for the whole process, or do only for so long, is not what these tests are about."""

import pytest
from tensorboard.summary.writer import event_file_writer

from trainer.records import sinks


@pytest.fixture(autouse=True)
def _event_files_are_numbered_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads the files of one second in the order of their names, in which a process's 10th comes before its 9th. A
    trainer writes one file; the tests of a process many.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.fixture(autouse=True)
def _sinks_may_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other tests may need more than a minute for the database of MLflow."""
    monkeypatch.setattr(sinks, "CLOSE_S", 3600.0)
