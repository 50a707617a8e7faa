"""A checkpoint is written while the learner goes on, and holds what the learner was when it was begun."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.learner.tiny import assert_same_run, config, largest_difference, read_export, train
from trainer.learner import checkpoint
from trainer.learner.export import to_hugging_face
from trainer.learner.families.registry import read_architecture
from trainer.learner.megatron import Learner
from trainer.plan.division import Division
from trainer.plan.memory import rank_memory


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No file of a checkpoint is written before this is set."""
    allowed, write = threading.Event(), checkpoint._write_buckets

    def write_when_allowed(writer: Any) -> list[Any]:
        allowed.wait()
        return write(writer)

    monkeypatch.setattr(checkpoint, "_write_buckets", write_when_allowed)
    yield allowed
    allowed.set()


@pytest.mark.slow_but_for("fp32-False", "bf16-False")
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steps_taken_before_it_is_written_are_not_in_it(
    qwen3: Path, tmp_path: Path, may_write: threading.Event, distributed_optimizer: bool, dtype: str
) -> None:
    options = config(distributed_optimizer=distributed_optimizer, dtype=dtype)
    learner = Learner(options, model_directory=qwen3)
    train(learner, 2)
    learner.export(tmp_path / "exported")
    learner.begin_save(tmp_path / "step-2", b"cursor")
    expected = train(learner, 4)
    assert not learner.is_save_written
    assert not (tmp_path / "step-2").exists()
    may_write.set()
    learner.finish_save()

    resumed = Learner(options, model_directory=qwen3)
    assert resumed.restore(tmp_path / "step-2") == b"cursor"
    assert set(resumed.adam_steps()) == {2.0}
    assert_same_run(train(resumed, 4), expected)
    # A resume takes fp32 weights from the optimizer's state; those of the model count too.
    to_hugging_face(tmp_path / "step-2", tmp_path / "converted", options, model_directory=qwen3)
    apart = largest_difference(read_export(tmp_path / "converted"), read_export(tmp_path / "exported"))
    assert apart == 0


@pytest.mark.slow_but_for("fp32-False", "bf16-False")
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_tensor_that_is_written_is_one_of_the_copies(
    qwen3: Path, tmp_path: Path, may_write: threading.Event, distributed_optimizer: bool, dtype: str
) -> None:
    """On a CPU Megatron clones a view, and so covers a copy that is missing; it does not on a GPU."""
    learner = Learner(config(distributed_optimizer=distributed_optimizer, dtype=dtype), model_directory=qwen3)
    train(learner, 1)
    learner.begin_save(tmp_path / "step-1", b"")
    saving = learner._saving
    assert saving is not None
    written = [
        tensor.data_ptr()
        for _, _, (_, tensors) in saving._planned.writer.write_buckets or ()
        for _, tensor in tensors
    ]
    assert sorted(written) == sorted(copy.data_ptr() for copy in saving._copies.tensors)
    may_write.set()
    learner.finish_save()


class BytesMade(TorchDispatchMode):
    """Counts the bytes that operations fill, views left out."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        for one in returned if isinstance(returned, tuple | list) else [returned]:
            if isinstance(one, Tensor) and not func.is_view:
                self.num_bytes += one.nbytes
        return returned


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_beginning_a_checkpoint_fills_no_more_than_the_bytes_that_it_saves(
    qwen3: Path, tmp_path: Path, distributed_optimizer: bool
) -> None:
    """Steps wait for this. Joining the optimizer's parts in one array and copying them out of it would fill several times as many."""
    options = config(distributed_optimizer=distributed_optimizer, dtype="bf16")
    learner = Learner(options, model_directory=qwen3)
    train(learner, 1)
    learner.save(tmp_path / "first", b"")
    with BytesMade() as made:
        learner.begin_save(tmp_path / "second", b"")
    assert learner._saving is not None
    num_saved = sum(copy.nbytes for copy in learner._saving._copies.tensors)
    learner.finish_save()
    architecture = read_architecture(qwen3)
    planned = rank_memory(architecture, options, Division.of(options, architecture, 1), 0).host_checkpoint
    assert num_saved == pytest.approx(planned, rel=0.01)
    assert num_saved <= made.num_bytes < 1.2 * num_saved


def test_what_cannot_be_written_is_an_error_when_it_is_finished_and_leaves_the_older_one(
    qwen3: Path, tmp_path: Path, may_write: threading.Event
) -> None:
    learner = Learner(config(), model_directory=qwen3)
    learner.begin_save(tmp_path / "latest", b"first")
    may_write.set()
    learner.finish_save()

    may_write.clear()
    train(learner, 1)
    learner.begin_save(tmp_path / "latest", b"second")
    shutil.rmtree(tmp_path / ".latest.partial")
    may_write.set()
    with pytest.raises(OSError, match=r"rank 0.*No such file"):
        learner.finish_save()
    assert Learner(config(), model_directory=qwen3).restore(tmp_path / "latest") == b"first"
    learner.save(tmp_path / "latest", b"third")
    assert learner.restore(tmp_path / "latest") == b"third"
