"""Adds adapters to the weights that they belong to, file by file, without Megatron and without a layout."""

import shutil
from pathlib import Path

import msgspec
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.learner import directories
from trainer.learner.export import COPIED_SUFFIXES

PREFIX = "base_model.model."
"""PEFT's names are the model's with this before them, and a suffix for each of the two matrices."""


class _AdapterConfig(msgspec.Struct, frozen=True):
    """The fields of adapter_config.json that are read."""

    r: int
    lora_alpha: float


def merge(source: Path, model: Path, target: Path) -> None:
    """Writes the weights in `model` with the adapters in `source` added, in fp32 and then rounded to the weights' type.

    Raises ValueError if the adapters belong to another model.
    """
    config = msgspec.json.decode((source / "adapter_config.json").read_bytes(), type=_AdapterConfig)
    scale, deltas = config.lora_alpha / config.r, load_file(source / "adapter_model.safetensors")
    with directories.discarded_if_failed(target):
        partial = directories.begin(target)
        for path in sorted(path for path in model.iterdir() if path.is_file()):
            if path.suffix == ".safetensors":
                tensors = {
                    name: _merged(name, tensor, deltas, scale) for name, tensor in load_file(path).items()
                }
                save_file(tensors, partial / path.name, metadata={"format": "pt"})
            elif path.suffix in COPIED_SUFFIXES:
                shutil.copyfile(path, partial / path.name)
        for name in sorted(deltas):
            raise ValueError(
                f"{source} holds {name}, and {model} has no such weight: give --model the directory that was trained"
            )
        directories.commit(target)


def _merged(name: str, weight: Tensor, deltas: dict[str, Tensor], scale: float) -> Tensor:
    """The weight with its adapter, whose two matrices are taken out of `deltas`."""
    prefix = f"{PREFIX}{name.removesuffix('.weight')}.lora"
    down, up = deltas.pop(f"{prefix}_A.weight", None), deltas.pop(f"{prefix}_B.weight", None)
    if down is None or up is None:
        return weight
    if (up.shape[0], down.shape[1]) != weight.shape:
        raise ValueError(
            f"the adapter of {name} is of a matrix {up.shape[0]} x {down.shape[1]}, and --model has it {tuple(weight.shape)}"
        )
    return (weight.float() + scale * up.float() @ down.float()).to(weight.dtype)
