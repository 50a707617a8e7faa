"""Small random models in Hugging Face directories, of every family that the learner trains: for its tests, and for the check on a GPU."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large enough for wrong weights to show
}
EXPERTS = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
"""What turns the shape of a dense model into that of a mixture of experts."""
MINISTRAL3 = {
    "head_dim": 32,
    "pad_token_id": None,  # transformers gives a pad token's embedding no gradient
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 8,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
GLM4_MOE = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "attention_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
MINIMAX_M2 = {
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "rotary_dim": 16,
    "use_qk_norm": True,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
}
GPT_OSS = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "sliding_window": 6,
    "pad_token_id": None,
    "initializer_range": 0.1,  # with more, small differences of rounding grow within five steps
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 8,
    },
}
DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "initializer_range": 0.05,  # with 0.2, fp32 and fp64 differ by 7e-5
    "pad_token_id": None,
}
QWEN3_NEXT = DELTA_NET | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
SEEING = DELTA_NET | {
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    },
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
    "mistral": {"head_dim": 32, "sliding_window": None},
    "ministral3": MINISTRAL3,
    "seed_oss": {"head_dim": 32, "pad_token_id": None},
    "smollm3": {"num_hidden_layers": 5, "pad_token_id": None},
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
    "minimax_m2": MINIMAX_M2,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": SEEING,
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe": QWEN3_NEXT | SEEING,
}
"""What changes SHAPE to one model of each family that the learner trains."""


def write_model(directory: Path, family: str, **changes: Any) -> Path:
    """A random model of one family, its norms and biases random too, as Hugging Face saves it; with a vision tower if `changes` describe
    one.
    """
    torch.manual_seed(11)
    if "vision_config" in changes:
        tower = changes.pop("vision_config")
        described = AutoConfig.for_model(family, text_config=SHAPE | changes, vision_config=tower)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(described).float()
    else:
        described = AutoConfig.for_model(family, **(SHAPE | changes))
        model = AutoModelForCausalLM.from_config(described).float()
    # Norms whose factor is their weight plus 1
    centred = family.startswith(("qwen3_next", "qwen3_5"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                around_0 = name.endswith("bias") or (centred and "linear_attn" not in name)
                parameter.copy_(torch.randn_like(parameter) * 0.1 + (0.0 if around_0 else 1.0))
            if name.endswith("A_log"):  # from a memory of a hundred positions to none
                parameter.copy_(torch.linspace(-4, 1, len(parameter)))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(directory)
    if family == "qwen3_5_moe":
        _join_experts(directory / "model.safetensors")
    return directory


def _join_experts(path: Path) -> None:
    """The form in which Qwen3.5 is published, one tensor for all experts of a layer; transformers reads it, and saves one for each."""
    tensors = load_file(path)
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        gates, ups, downs = (
            [tensors.pop(name) for name in _of_each(layer, part, tensors)] for part in ("gate", "up", "down")
        )
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)
        tensors[f"{layer}.experts.down_proj"] = torch.stack(downs)
    save_file(tensors, path, metadata={"format": "pt"})


def _of_each(layer: str, part: str, names: Collection[str]) -> list[str]:
    found = (f"{layer}.experts.{expert}.{part}_proj.weight" for expert in range(len(names)))
    return [name for name in found if name in names]
