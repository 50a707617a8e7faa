"""Writes weights in FP8 (E4M3) with one scale for each block of 128 x 128, as DeepSeek and Qwen publish models: `weight`, and beside it
`weight_scale_inv` in fp32, by which the numbers are multiplied when they are read (`hf.from_fp8`).

A version of a run has the types of the directory that the run began with: a tensor is packed if it is packed there. `write_fp8` makes
such a directory of weights in another type, for models that are not published in FP8. `precision.py` says which tensors that packs.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from trainer.learner import directories
from trainer.learner.architecture import Architecture
from trainer.learner.export import COPIED_SUFFIXES, Part
from trainer.learner.families.registry import has_packed_weights, read_architecture
from trainer.learner.hf import INDEX_FILE, SafetensorsDirectory
from trainer.learner.parameters import EXPERT
from trainer.learner.precision import BLOCK, fp8_faults, packed_matrices, scale_name

LARGEST = torch.finfo(torch.float8_e4m3fn).max
STRIP_ROWS = 8 * BLOCK
"""The rows that are packed at a time: a whole matrix in fp32 does not fit beside the weights of a GPU that is nearly full."""


def to_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of a matrix of rows x columns in E4M3, of the same shape, and the scale of each block, fp32: its largest magnitude / 448,
    or 1 for a block of zeros. A number that is scaled is rounded to the nearest of E4M3.
    """
    rows, columns = matrix.shape
    if matrix.is_meta:
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        return matrix.new_empty((rows, columns), dtype=torch.float8_e4m3fn), matrix.new_empty(
            blocks, dtype=torch.float32
        )
    strips = [_strip_to_fp8(strip) for strip in matrix.split(STRIP_ROWS)]
    # torch joins no tensors of this type on every device, but their bytes.
    joined = torch.cat([numbers.view(torch.uint8) for numbers, _ in strips]).view(torch.float8_e4m3fn)
    return joined, torch.cat([scales for _, scales in strips])


def _strip_to_fp8(strip: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = strip.shape
    padded = pad(strip.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax(dim=(1, 3)) / LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    # The quotient of the largest may be rounded to a number above 448, which E4M3 does not have.
    numbers = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return numbers.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales


def packed_names(directory: Path) -> frozenset[str]:
    """The tensors of a directory that are in FP8."""
    tensors = SafetensorsDirectory(directory)
    return frozenset(name for name in tensors if scale_name(name) in tensors)


def packed_parts(parts: Sequence[Part], names: Collection[str]) -> list[Part]:
    """The parts of an export with the tensors of these names in FP8, each with its scales."""
    return [_packed(part, [name in names for name in part.names]) for part in parts]


def _packed(part: Part, is_packed: Sequence[bool]) -> Part:
    """The part with some of its tensors packed. Their scales come first, the packed tensors last, so that each is aligned."""
    if not any(is_packed):
        return part
    packed = [name for name, chosen in zip(part.names, is_packed, strict=True) if chosen]
    kept = [name for name, chosen in zip(part.names, is_packed, strict=True) if not chosen]

    def join(pieces: list[Tensor]) -> list[Tensor]:
        joined = dict(zip(part.names, part.join(pieces), strict=True))
        made = [to_fp8(joined[name]) for name in packed]
        return [*(scales for _, scales in made), *(joined[name] for name in kept), *(one for one, _ in made)]

    return replace(part, names=(*map(scale_name, packed), *kept, *packed), join=join)


def write_fp8(source: Path, target: Path) -> None:
    """Writes the Hugging Face weights in `source` with their projections in FP8, file by file. Raises ValueError for packed weights, and
    for a model that engines cannot serve so.
    """
    architecture = read_architecture(source)
    if has_packed_weights(source):
        raise ValueError(
            f"{source} has packed weights already (quantization_config in config.json): give weights in bf16"
        )
    if faults := list(fp8_faults(architecture)):
        raise ValueError("; ".join(faults))
    wanted = frozenset(_names(architecture))
    weight_map, kept, num_bytes = dict[str, str](), list[str](), 0
    with directories.discarded_if_failed(target):
        partial = directories.begin(target)
        for path in sorted(path for path in source.iterdir() if path.is_file()):
            if path.suffix == ".safetensors":
                tensors = load_file(path)
                kept += [name for name, one in tensors.items() if name not in wanted and one.dim() > 1]
                made = dict(_converted(tensors, wanted))
                save_file(made, partial / path.name, metadata={"format": "pt"})
                weight_map |= dict.fromkeys(made, path.name)
                num_bytes += sum(one.nbytes for one in made.values())
            elif path.suffix in COPIED_SUFFIXES and path.name not in ("config.json", INDEX_FILE):
                shutil.copyfile(path, partial / path.name)
        if missing := sorted(wanted - weight_map.keys()):
            raise ValueError(
                f"{source} has no tensor {missing[0]}: take the files that belong to config.json"
            )
        if (source / INDEX_FILE).exists():
            index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
            (partial / INDEX_FILE).write_bytes(msgspec.json.encode(index))
        config = msgspec.json.decode((source / "config.json").read_bytes(), type=dict[str, Any])
        config["quantization_config"] = _description(kept)
        (partial / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
        directories.sync_files(partial)
        directories.commit(target)


def _names(architecture: Architecture) -> Iterator[str]:
    """The tensors of a model that are packed."""
    for layer in range(architecture.num_layers):
        experts = architecture.experts_of(layer)
        for matrix in packed_matrices(architecture, layer):
            if EXPERT in matrix.name:
                assert experts is not None
                yield from (matrix.name.replace(EXPERT, str(expert)) for expert in range(experts.count))
            else:
                yield matrix.name


def _converted(tensors: Mapping[str, Tensor], wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if name in wanted:
            numbers, scales = to_fp8(tensor)
            yield name, numbers
            yield scale_name(name), scales
        else:
            yield name, tensor


def _description(kept: Sequence[str]) -> dict[str, Any]:
    """What `config.json` says of the packed weights. Embeddings are no projections, and are not among the modules that are left out."""
    modules = {name.removesuffix(".weight") for name in kept if name.endswith(".weight")}
    left_out = sorted({"lm_head", *(one for one in modules if not one.endswith("embed_tokens"))})
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": left_out,
    }
