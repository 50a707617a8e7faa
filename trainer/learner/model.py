"""Builds the Megatron GPTModel of an architecture, its weights not yet read."""

from typing import Any

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
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from trainer.learner.architecture import Architecture, layout_faults
from trainer.learner.attention import RotaryAttention
from trainer.learner.config import LearnerConfig
from trainer.learner.head import HeadlessModel
from trainer.learner.moe import expert_options, mark_experts
from trainer.learner.norm import norm_class


def build_model(architecture: Architecture, config: LearnerConfig) -> GPTModel:
    """This rank's part of the model, on the CPU, its weights uninitialised. Call inside `backend.device_scope`.

    Raises ValueError if the parallel layout does not divide the model.
    """
    for fault in layout_faults(architecture, config):
        raise ValueError(fault)
    transformer = transformer_config(architecture, config)
    tensor_parallel = config.tensor_parallel
    model = HeadlessModel(
        config=transformer,
        transformer_layer_spec=_block(architecture, transformer),
        vocab_size=-(-architecture.vocab_size // tensor_parallel) * tensor_parallel,
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="none",  # RotaryAttention turns queries and keys
    )
    _mark_divided(model)
    mark_experts(model)
    if config.recompute != "none":
        _let_gradients_through(model)
    return model.to(transformer.params_dtype)


def _block(architecture: Architecture, transformer: TransformerConfig) -> Any:
    """The `TransformerBlockSubmodules` of this pipeline stage: with our attention, and norms that sequence parallelism allows."""
    spec = get_gpt_layer_local_spec(
        num_experts=architecture.experts.count if architecture.experts else None,
        qk_layernorm=architecture.normed_qk,
        normalization="RMSNorm",
    )
    layer: Any = spec.submodules  # a union of dataclasses; this one is of a transformer layer
    layer.input_layernorm = layer.pre_mlp_layernorm = norm_class()
    attention = layer.self_attention.submodules
    attention.core_attention = RotaryAttention
    if architecture.normed_qk:
        attention.q_layernorm = attention.k_layernorm = norm_class()
    return TransformerBlockSubmodules(
        layer_specs=[spec] * get_num_layers_to_build(transformer), layer_norm=norm_class()
    )


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


def _let_gradients_through(model: GPTModel) -> None:
    """Make the output of a frozen embedding require a gradient.

    Megatron's recomputed regions run without a graph, so their output requires a gradient only if their input does. Behind a
    frozen embedding the trained weights of the first layers would otherwise silently get none.
    """

    def require_gradient(_embedding: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()
        return output

    if model.pre_process:
        model.embedding.register_forward_hook(require_gradient)


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
        context_parallel_size=config.context_parallel,
        sequence_parallel=config.sequence_parallel,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths requires it, for dense models too
        **expert_options(architecture.experts, expert_parallel=config.expert_parallel),
        batch_p2p_sync=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **_recomputation(config),
    )


def _recomputation(config: LearnerConfig) -> dict[str, Any]:
    """Megatron's options for `learner.recompute`. It runs the recomputed modules again with the same kernels and inputs, so
    gradients are the same bit for bit.

    Selective leaves attention alone, whose flash kernel saves nothing that grows with the square of the length, and the norms,
    which Megatron recomputes only with TransformerEngine.
    """
    match config.recompute:
        case "none":
            return {}
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]}
        case "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
