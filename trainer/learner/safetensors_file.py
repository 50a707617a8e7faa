"""Writes a safetensors file tensor by tensor, so that the host never holds more than one of them."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_HEADER_ALIGNMENT = 8


def write_safetensors(path: Path, announced: Mapping[str, Tensor], tensors: Iterable[Tensor]) -> None:
    """Write `tensors`, which are on the host, and force the file to disk.

    `announced` gives their names, in the same order, with tensors of the same shapes and types, which may lie on the meta
    device. Larger types come first, so that each tensor is aligned.
    """
    with path.open("wb") as file:
        file.write(_header(announced))
        for (name, like), tensor in zip(announced.items(), tensors, strict=True):
            assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype), name
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _header(announced: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in announced.items():
        assert end % tensor.itemsize == 0, name
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = msgspec.json.encode(entries)
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
    return len(encoded).to_bytes(8, "little") + encoded
