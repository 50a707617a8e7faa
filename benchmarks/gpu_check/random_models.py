"""Random weights for the shape of a published model, cut to what one GPU holds."""

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.small_models import FAMILIES, SHAPE
from trainer.learner import backend
from trainer.learner.config import LearnerConfig

VOCAB_SIZE = 32_768
NUM_EXPERTS_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


def cut(published: Mapping[str, Any], learner: LearnerConfig) -> dict[str, Any]:
    """The keys of a `config.json` for a few layers of the language model, at least one of each kind, at full width; with as many experts as
    one GPU of the recipe holds, and a part of the vocabulary.
    """
    keys: dict[str, Any] = dict(published.get("text_config") or published)
    keys.pop("quantization_config", None)
    has_delta_net = "linear_num_key_heads" in keys
    num_layers = 4 if has_delta_net else max(2, keys.get("first_k_dense_replace", 0) + 1)
    keys |= {"num_hidden_layers": num_layers, "vocab_size": VOCAB_SIZE, "pad_token_id": None}
    if isinstance(keys.get("layer_types"), list):
        keys["layer_types"] = keys["layer_types"][:num_layers]
    for name in NUM_EXPERTS_KEYS:
        if name in keys:
            keys[name] = max(keys[name] // learner.expert_parallel, keys["num_experts_per_tok"])
    return keys


def tiny(published: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the smallest model of the same family."""
    family = (published.get("text_config") or published)["model_type"]
    return {"model_type": family, **SHAPE, **FAMILIES[family]}


def write_random(directory: Path, keys: Mapping[str, Any]) -> None:
    """A Hugging Face directory with weights in bf16, which are drawn on the learner's device: on a CPU that takes minutes."""
    torch.manual_seed(0)
    model_type = keys["model_type"]
    config = AutoConfig.for_model(model_type, **{k: v for k, v in keys.items() if k != "model_type"})
    with torch.device(backend.device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    del model
    gc.collect()
    if backend.has_cuda():
        torch.cuda.empty_cache()


def published_config(directory: Path) -> dict[str, Any]:
    return msgspec.json.decode((directory / "config.json").read_bytes())
