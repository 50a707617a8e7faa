"""All families by their `model_type`, and the reading of a model's architecture. Nothing here imports torch, so a recipe can be checked on
a machine without it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pipeline.model_config import language_keys
from trainer.learner.architecture import Architecture
from trainer.learner.families.family import Family, engine_keys
from trainer.learner.families.glm import Glm4Mixture
from trainer.learner.families.gpt_oss import GptOss
from trainer.learner.families.llama import Llama
from trainer.learner.families.minimax import MiniMaxM2
from trainer.learner.families.mistral import Ministral3, Mistral
from trainer.learner.families.qwen import Qwen2, Qwen3, Qwen3Mixture
from trainer.learner.families.qwen_next import Qwen3Next, Qwen35, Qwen35Mixture, Qwen35Text
from trainer.learner.families.seed_oss import SeedOss
from trainer.learner.families.smollm3 import SmolLM3

FAMILIES: Mapping[str, type[Family]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Mixture,
    "mistral": Mistral,
    "ministral3": Ministral3,
    "seed_oss": SeedOss,
    "smollm3": SmolLM3,
    "glm4_moe": Glm4Mixture,
    "gpt_oss": GptOss,
    "minimax_m2": MiniMaxM2,
    "qwen3_next": Qwen3Next,
    "qwen3_5": Qwen35,
    "qwen3_5_text": Qwen35Text,
    "qwen3_5_moe": Qwen35Mixture,
}

TRAINED = "; ".join(family.models for family in FAMILIES.values())


def read_architecture(directory: Path) -> Architecture:
    """Read `config.json`. Raises ValueError if it is missing, malformed, or describes a model that is not supported."""
    path = directory / "config.json"
    keys = _read_keys(path)
    family = _read_family(path, keys)
    quantised = directory / "hf_quant_config.json"
    features = {
        **family.unsupported(),
        **engine_keys(keys, type(family)),
        f"{quantised.name} beside it": quantised.exists(),
        f"architectures {keys.get('architectures')}": not _is_language_model(
            keys.get("architectures"), family.class_endings
        ),
    }
    for feature, is_present in features.items():
        if is_present:
            raise ValueError(
                f"{path} has {feature}, which the learner does not compute: choose a model without it. The learner trains {TRAINED}"
            )
    try:
        return family.architecture()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def has_packed_weights(directory: Path) -> bool:
    """Whether the weights have a type of eight or four bits that is read, and that exports do not have. Raises ValueError without a
    readable `config.json`.
    """
    return bool(quantization_of(directory))


def quantization_of(directory: Path) -> dict[str, Any]:
    """What `config.json` says of packed weights; empty if they are not. Raises ValueError as `has_packed_weights` does."""
    return _read_keys(directory / "config.json").get("quantization_config") or {}


def _read_keys(path: Path) -> dict[str, Any]:
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; `model` must be a Hugging Face directory with config.json and weights"
        ) from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}; take the file that came with the weights") from error
    return language_keys(keys)


def _read_family(path: Path, keys: Mapping[str, Any]) -> Family:
    model_type = keys.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ValueError(
            f"the learner trains {TRAINED} (model_type {', '.join(FAMILIES)}), and model_type {model_type!r} of "
            f"{path} is not one of them: choose such a model"
        )
    try:
        return msgspec.convert(keys, family)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}; take the file that came with the weights") from error


def _is_language_model(architectures: object, class_endings: tuple[str, ...]) -> bool:
    """Whether the class that engines build has an output for every token of the vocabulary; a classifier has the same `model_type`."""
    if not isinstance(architectures, list) or not architectures:
        return True
    return any(str(name).endswith(class_endings) for name in architectures)
