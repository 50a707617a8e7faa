"""From a Hugging Face `config.json` to an untrained Megatron GPTModel: dense Llama, Qwen2 and Qwen3.

Whatever a config asks for that this builder does not do is refused by name, never ignored.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig

from trainer.learner.attention import PackedAttention
from trainer.learner.config import LearnerConfig

FAMILIES = ("llama", "qwen2", "qwen3")


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model, as the weights beside its `config.json` have it."""

    family: Literal["llama", "qwen2", "qwen3"]
    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_key_value_heads: int
    head_width: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool  # one matrix for the embedding and the output

    @property
    def biased_qkv(self) -> bool:
        return self.family == "qwen2"

    @property
    def normed_qk(self) -> bool:
        return self.family == "qwen3"


def read_architecture(directory: Path) -> Architecture:
    """Read `config.json`. Raises ValueError for what cannot be trained exactly as it was defined."""
    path = directory / "config.json"
    config: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    if config["model_type"] not in FAMILIES:
        raise ValueError(
            f"{path}: model_type {config['model_type']!r} is not one of {FAMILIES}: choose such a model"
        )
    _refuse_the_unknown(config, path)
    rope = config.get("rope_parameters") or {}  # transformers 5; before, rope_theta stood by itself
    return Architecture(
        family=config["model_type"],
        num_layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        mlp_width=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_width=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        tied=config.get("tie_word_embeddings", False),
    )


def _refuse_the_unknown(config: dict[str, Any], path: Path) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    unsupported = {
        f"rope_type {rope_type!r}": rope_type != "default",
        "attention_bias": bool(config.get("attention_bias")) and config["model_type"] != "qwen2",
        "mlp_bias": bool(config.get("mlp_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": (rope.get("partial_rotary_factor") or 1.0) != 1.0,
        "attention_dropout": bool(config.get("attention_dropout")),
    }
    for name, present in unsupported.items():
        if present:
            raise ValueError(f"{path}: {name} is not supported by the learner: choose a model without it")


def build_model(architecture: Architecture, config: LearnerConfig) -> GPTModel:
    """This rank's part of the model, on the CPU, its weights uninitialised. Call inside
    `backend.device_scope`.
    """
    _check_divisible(architecture, config)
    transformer = transformer_config(architecture, config)
    spec = get_gpt_layer_local_spec(qk_layernorm=architecture.normed_qk, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    tensor_parallel = config.tensor_parallel
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=spec,
        vocab_size=-(-architecture.vocab_size // tensor_parallel) * tensor_parallel,
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
    )
    _mark_divided(model)
    return model.to(transformer.params_dtype)


def _mark_divided(model: GPTModel) -> None:
    """Say which weights tensor-parallel ranks hold different parts of. Megatron does so only while
    initialising them.

    Without it every weight passes for a copy of rank 0's, and the gradient norm counts that rank's part
    alone.
    """
    for module in model.modules():
        match module:
            case ColumnParallelLinear() | VocabParallelEmbedding():
                dimension = 0
            case RowParallelLinear():
                dimension = 1
            case _:
                continue
        if module.weight is not None:  # the output layer of a tied model has none of its own
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dimension, stride=1)


def transformer_config(architecture: Architecture, config: LearnerConfig) -> TransformerConfig:
    """Megatron's description of the same shape; every fusion that needs TransformerEngine or Apex is off."""
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.width,
        ffn_hidden_size=architecture.mlp_width,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_width,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.biased_qkv,
        qk_layernorm=architecture.normed_qk,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.dtype == "bf16",
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # asked for by variable lengths, of dense models too
        batch_p2p_sync=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def _check_divisible(architecture: Architecture, config: LearnerConfig) -> None:
    parts = {
        "tensor_parallel": (
            ("attention heads", architecture.num_heads),
            ("key-value heads", architecture.num_key_value_heads),
            ("columns of the MLP", architecture.mlp_width),
        ),
        "pipeline_parallel": (("layers", architecture.num_layers),),
    }
    for field, counted in parts.items():
        for name, count in counted:
            if count % getattr(config, field):
                raise ValueError(
                    f"learner.{field} = {getattr(config, field)} does not divide the model's {count} {name}: "
                    "set it to a divisor"
                )
