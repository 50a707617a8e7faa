import msgspec
import numpy as np
import pytest

from tests.trainer.learner.tiny import make_batch, make_samples
from trainer.batching.batch import Batch, Sample
from trainer.feed import (
    BeginSaveCommand,
    ExportCommand,
    FinishSaveCommand,
    LogprobsCommand,
    RestoreCommand,
    SnapshotCommand,
    StepCommand,
    StopCommand,
    decode,
    encode,
)


def assert_same(left: Sample, right: Sample) -> None:
    for name in ("request_id", "group_id", "branch"):
        assert getattr(left, name) == getattr(right, name)
    for name in ("tokens_T", "trained_T", "behaviour_logprobs_T", "advantages_T", "versions_T"):
        assert getattr(left, name).dtype == getattr(right, name).dtype
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


def test_a_batch_reaches_the_other_ranks_as_it_was() -> None:
    batch = make_batch(make_samples(), step=9, temperature=0.7)
    step = decode(encode(StepCommand(batch)))
    assert isinstance(step, StepCommand)
    assert isinstance(step.batch, Batch)
    assert (step.batch.step, step.batch.temperature, step.batch.request_ids) == (9, 0.7, batch.request_ids)
    for sent, heard in zip(batch.samples, step.batch.samples, strict=True):
        assert_same(sent, heard)


@pytest.mark.parametrize(
    "command",
    [
        SnapshotCommand(3),
        ExportCommand("a/b"),
        BeginSaveCommand("c", b"\x00\xff"),
        FinishSaveCommand(),
        RestoreCommand("d"),
        StopCommand(),
    ],
    ids=lambda c: type(c).__name__,
)
def test_commands_are_heard_as_they_were_given(command: object) -> None:
    assert decode(encode(command)) == command


@pytest.mark.parametrize("version", [None, 0, 4])
def test_a_question_about_past_weights_is_not_one_about_the_present(version: int | None) -> None:
    heard = decode(encode(LogprobsCommand(version, make_samples((4,)), 1.0)))
    assert isinstance(heard, LogprobsCommand)
    assert heard.version == version
    assert_same(heard.samples[0], make_samples((4,))[0])


def test_what_is_no_command_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode({"type": "Dance"}))
