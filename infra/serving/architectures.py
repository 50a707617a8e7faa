"""Which model architectures SGLang serves, read from its source files in a twentieth of a second.

SGLang itself finds out some ten seconds into its start, by importing all of its models, and then falls back to Hugging
Face's implementation, which ends in a traceback. On a CPU some of its model files cannot be imported; they are listed
here for the release in constraints.txt, and a test compares the list with what SGLang imports.
"""

import difflib
import importlib.util
import json
import re
from pathlib import Path

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
"""Model files of SGLang that need packages or compiled kernels that are not there on a CPU."""


def check(model: Path, *, device: str) -> None:
    """Raises ValueError if SGLang cannot serve the checkpoint in `model` on this device. A release that keeps its models in
    another way is not checked.
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
    if device == "cpu" and all(files.get(name, "") in NOT_ON_CPU for name in named if name in files):
        raise ValueError(
            f"{model}: SGLang does not serve {named[0]} on a CPU: its kernels are for GPUs; "
            "give another checkpoint, or --device cuda on a machine with a GPU"
        )


def architectures(model: Path) -> list[str]:
    """Those in config.json. Raises ValueError if there are none."""
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
    """The file of SGLang, without its suffix, that each architecture is in. Raises ModuleNotFoundError if SGLang is not installed."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'sglang'", name="sglang")
    directory = Path(package.submodule_search_locations[0], "srt/models")
    return {name: file.stem for file in sorted(directory.glob("*.py")) for name in _entry_classes(file)}


def _entry_classes(file: Path) -> list[str]:
    """The classes that SGLang registers from this file."""
    entries = ENTRY.findall(file.read_text())
    return [name for entry in entries for name in re.findall(r"[A-Za-z_]\w*", COMMENT.sub("", entry))]
