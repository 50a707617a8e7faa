"""Which rank writes what, one safetensors file, and what becomes of an export that fails."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.learner.tiny import config, largest_difference, read_export
from tests.trainer.small_disk import small_disk
from trainer.learner.directories import DiskFull
from trainer.learner.export import Exporter, weight_parts, write_safetensors, writers_of
from trainer.learner.megatron import Learner


def test_a_file_written_tensor_by_tensor_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.randn(3, 5).t(),
        "empty": torch.zeros(0, 4),
        "one": torch.randn(7),
        "half": torch.randn(3).bfloat16(),
        "float16": torch.randn(2, 2).half(),
    }
    announced = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    write_safetensors(tmp_path / "file.safetensors", announced, iter(tensors.values()))
    read = load_file(tmp_path / "file.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_a_parameter_is_written_by_a_rank_that_holds_it_and_all_write_about_the_same() -> None:
    everywhere = {("embedding",): 50, ("norm",): 1, **{(f"layer {n}",): 10 for n in range(20)}}
    held_by = {rank: everywhere | {(f"expert of {rank}",): 40} for rank in range(4)}
    writers = writers_of(held_by)
    assert writers.keys() == {names for held in held_by.values() for names in held}
    written = dict.fromkeys(held_by, 0)
    for names, rank in writers.items():
        assert names in held_by[rank]
        written[rank] += held_by[rank][names]
    assert max(written.values()) - min(written.values()) <= 10


def test_an_export_that_fails_leaves_what_was_there_and_can_be_tried_again(
    qwen3: Path, tmp_path: Path
) -> None:
    learner, failure = Learner(config(), model_directory=qwen3), OSError("the disk is full")

    def describe(_: Path) -> None:
        if failure is not None:
            raise failure

    exporter = Exporter(weight_parts(learner._model, learner._architecture), describe=describe)
    with pytest.raises(OSError, match="rank 0: the disk is full"):
        exporter.write(tmp_path / "export")
    assert not (tmp_path / "export").exists()
    failure = None
    exporter.write(tmp_path / "export")
    assert largest_difference(read_export(tmp_path / "export"), read_export(qwen3)) == 0


@pytest.mark.parametrize("num_bytes", [4096, 24576, 122880])
def test_an_export_that_fills_its_disk_names_the_disk_and_leaves_the_space_free(
    qwen3: Path, tmp_path: Path, num_bytes: int
) -> None:
    learner = Learner(config(), model_directory=qwen3)
    with small_disk(tmp_path / "disk", num_bytes) as disk:
        with pytest.raises(
            DiskFull, match=f"the disk at {disk} is full, so {disk}/.*v1.* could not be written"
        ):
            learner.export(disk / "v1")
        assert list(disk.iterdir()) == []
