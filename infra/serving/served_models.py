"""Checks whether SGLang can serve a model before a server that takes minutes to start: whether it knows the architecture, and whether the
weight files are complete.

SGLang's own source files are read for the architectures, in a twentieth of a second. SGLang itself finds out some ten seconds into its
start, by importing all of its models, and then falls back to Hugging Face's implementation, which ends in a traceback. On a CPU some of
its model files cannot be imported; they are listed here for the release in constraints.txt, and a test compares the list with what
SGLang imports.

Only the headers of weight files are read, so 140 GB take milliseconds. The check finds files that are missing, truncated, too long, or not
weights at all (a Git LFS pointer, a page of HTML), and headers that contradict themselves. It does not find wrong numbers.
"""

import difflib
import importlib.util
import json
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

ENTRY = re.compile(r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)
COMMENT = re.compile(r"#.*")

NOT_ON_CPU = frozenset(
    {
        *(
            "bailing_moe_linear",
            "bailing_moe_nextn",
            "deepseek_v4",
            "deepseek_v4_dspark",
            "deepseek_v4_nextn",
        ),
        *(
            "falcon_mamba",
            "inkling",
            "interns2_mobius",
            "interns2preview",
            "jet_nemotron",
            "jet_vlm",
            "mamba",
        ),
        *("midashenglm", "minicpmo", "minicpmv", "minimax_m2", "minimax_m3", "minimax_m3_vl", "muse_glimmer"),
        *("qwen3_5", "qwen3_5_mtp", "qwen3_5_text", "qwen4_exp", "qwen4_exp_mtp"),
    }
)
"""Model files of SGLang that need packages or compiled kernels which do not exist on a CPU."""


def check_architecture(model: Path, *, device: str) -> None:
    """Raises ValueError if SGLang cannot serve the checkpoint in `model` on this device.

    A release of SGLang that stores its models differently is not checked.
    """
    named = architectures(model)
    files = model_files()
    if not files:
        return
    if not any(name in files for name in named):
        near = difflib.get_close_matches(named[0], files, n=1)
        hint = f"the nearest is {near[0]}; " if near else ""
        raise ValueError(
            f"{model}: SGLang has no architecture {named[0]}; {hint}give another checkpoint, or add "
            "`-- --model-impl transformers` to try Hugging Face's implementation"
        )
    if device == "cpu" and is_fp8(model):
        raise ValueError(
            f"{model}: its weights are in FP8, for which SGLang needs compiled kernels on a CPU, and a CPU with AMX; give --device cuda, "
            "or weights in bf16 (docs/checkpoints.md, Conversion)"
        )
    if device == "cpu" and all(files.get(name, "") in NOT_ON_CPU for name in named if name in files):
        raise ValueError(
            f"{model}: SGLang does not serve {named[0]} on a CPU: its kernels are for GPUs; "
            "give another checkpoint, or --device cuda on a machine with a GPU"
        )


def is_fp8(model: Path) -> bool:
    """Whether the weights are in FP8, by config.json."""
    file = model / "config.json"
    try:
        return json.loads(file.read_bytes())["quantization_config"]["quant_method"] == "fp8"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def architectures(model: Path) -> list[str]:
    """The architectures in config.json. Raises ValueError if there are none."""
    file = model / "config.json"
    try:
        named = json.loads(file.read_bytes()).get("architectures")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: it is not a model's configuration: {error}") from error
    if not isinstance(named, list) or not named:
        raise ValueError(
            f'{file}: it names no architecture; add "architectures": ["LlamaForCausalLM"] or such'
        )
    return [str(name) for name in named]


def model_files() -> dict[str, str]:
    """The SGLang file, without its suffix, that defines each architecture. Raises ModuleNotFoundError if SGLang is not installed."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'sglang'", name="sglang")
    directory = Path(package.submodule_search_locations[0], "srt/models")
    return {name: file.stem for file in sorted(directory.glob("*.py")) for name in _entry_classes(file)}


def _entry_classes(file: Path) -> list[str]:
    """The classes that SGLang registers from this file."""
    entries = ENTRY.findall(file.read_text())
    return [name for entry in entries for name in re.findall(r"[A-Za-z_]\w*", COMMENT.sub("", entry))]


INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
LFS_POINTER = b"version https://git-lfs"
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
BITS |= {"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
BITS |= {"I64": 64, "U64": 64, "F64": 64, "C64": 64}


def check_weights(directory: Path) -> None:
    """Raises ValueError naming the file, what is wrong with it, and the fix."""
    if not directory.is_dir():
        raise ValueError(f"{directory}: there is no such directory; give the directory of a checkpoint")
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory}: no config.json in it; give the directory of a checkpoint")
    found = {path.name: _tensors(path) for path in sorted(directory.glob("*.safetensors"))}
    index = directory / INDEX
    if not index.is_file():
        return
    for tensor, name in _weight_map(index).items():
        if name not in found:
            raise ValueError(f"{index} names {name}, which is not there; copy or download it")
        if tensor not in found[name]:
            raise ValueError(
                f"{index} looks for {tensor} in {name}, which does not hold it; they are of different checkpoints"
            )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{index}: it is not an index of weights ({error!r}); copy or download it again"
        ) from error


def _tensors(path: Path) -> set[str]:
    """The names of the tensors in one file. Raises ValueError if it is not complete."""
    try:
        header, size = _header(path)
        extents = sorted(_extents(header))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: its header is damaged ({error!r}); copy or download it again") from error
    end = 0
    for begin, stop, name in extents:
        if begin != end:
            raise ValueError(
                f"{path}: {name} begins at byte {begin} and not at {end}; copy or download it again"
            )
        end = stop
    if end != size:
        change = "cut short" if size < end else "longer than it says"
        raise ValueError(
            f"{path}: it is {change}: {size:,} of {end:,} bytes of tensors; copy or download it again"
        )
    return {name for _, _, name in extents}


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and the number of bytes that follow it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if length <= min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
            return json.loads(file.read(length)), size - LENGTH_BYTES - length
        start += file.read(len(LFS_POINTER))
    if start.startswith(LFS_POINTER):
        raise ValueError(
            f"{path}: it is a Git LFS pointer and not the weights; run `git lfs pull` where it came from"
        )
    raise ValueError(
        f"{path}: {size:,} bytes that are not a safetensors file, or only its first bytes; copy or download it again"
    )


def _extents(header: dict[str, Any]) -> Iterator[tuple[int, int, str]]:
    """First byte, byte past the last, and name of each tensor. Raises KeyError or TypeError for an entry that is not a tensor."""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, stop = entry["data_offsets"]
        bits = BITS.get(entry["dtype"])  # a type newer than this list is left to the server
        if bits is not None and stop - begin != (prod(entry["shape"]) * bits + 7) // 8:
            raise TypeError(f"{name} of {entry['dtype']} {entry['shape']} in {stop - begin} bytes")
        yield begin, stop, name
