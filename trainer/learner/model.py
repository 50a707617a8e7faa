"""Builds the Megatron GPTModel of an architecture, its weights not yet read."""

from typing import Any, cast

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

from trainer.learner.architecture import Architecture, layout_faults
from trainer.learner.attention import PackedAttention
from trainer.learner.config import LearnerConfig


def build_model(architecture: Architecture, config: LearnerConfig) -> GPTModel:
    """This rank's part of the model, on the CPU, its weights uninitialised. Call inside `backend.device_scope`.

    Raises ValueError if the parallel layout does not divide the model.
    """
    for fault in layout_faults(architecture, config):
        raise ValueError(fault)
    transformer = transformer_config(architecture, config)
    spec = get_gpt_layer_local_spec(qk_layernorm=architecture.normed_qk, normalization="RMSNorm")
    layer: Any = spec.submodules  # a union of dataclasses; this one is of a transformer layer
    layer.self_attention.submodules.core_attention = PackedAttention
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
        rotary_base=cast(int, architecture.rope_theta),  # computed with as a float, declared an int
    )
    _mark_divided(model)
    return model.to(transformer.params_dtype)


def _mark_divided(model: GPTModel) -> None:
    """Mark the weights of which each tensor-parallel rank holds a different part.

    Megatron marks them only while it initialises them, which we do not let it do. An unmarked weight counts as a copy of
    rank 0's, and the gradient norm then covers rank 0's part alone.
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


def weights_dtype(config: LearnerConfig) -> torch.dtype:
    return torch.bfloat16 if config.dtype == "bf16" else torch.float32


def transformer_config(architecture: Architecture, config: LearnerConfig) -> TransformerConfig:
    """Megatron's description of the same shape; every fusion that needs TransformerEngine or Apex is off."""
    dtype = weights_dtype(config)
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
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths requires it, for dense models too
        batch_p2p_sync=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
