"""Builds the Megatron GPTModel of an architecture, without reading its weights.

The RMS norm is our own: Megatron's wrapper of torch's norm rejects sequence parallelism, and on a CPU torch keeps fp32 copies of
half-precision inputs for the backward pass. Our norm keeps the input and one number per position for it.

In a mixture of experts, the router and everything outside the experts are divided like a dense model. Each expert is whole on the rank that
holds it, also under tensor parallelism, and tokens travel to their experts by an all-to-all. Nothing balances the load: an auxiliary loss
would train the policy for a goal other than its reward.
"""

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
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, distributed, nn

from trainer.learner import backend
from trainer.learner.architecture import Architecture, Experts, layout_faults
from trainer.learner.attention import OutputGatedAttention, RotaryAttention
from trainer.learner.config import LearnerConfig
from trainer.learner.delta_net import IN_FP32, GatedDeltaNet
from trainer.learner.dispatch import replace_dispatchers
from trainer.learner.experts import LocalExperts
from trainer.learner.logprobs import HeadlessModel
from trainer.learner.lora import mark_expert


class RmsNorm(nn.Module):
    """Scales each vector to a root mean square of 1, then by the weight, or by the weight plus 1 if the weights of norms are centred at
    zero. Computed in fp32, rounded once.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self._is_zero_centred = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size))
        # Megatron then adds up the gradients of the tensor-parallel ranks, each of which normalises other positions.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise the vectors in the last dimension."""
        # torch's kernel on a GPU keeps as few tensors as ours, but a weight plus 1 would be rounded for it.
        if inputs.is_cuda and not self._is_zero_centred:
            return F.rms_norm(inputs, self.weight.shape, self.weight, self.eps)
        return _RmsNorm.apply(inputs, self.weight, self.eps, self._is_zero_centred)


class NormOfAllHeads(nn.Module):
    """Scales the queries or keys of all heads of a layer, taken as one vector, to a root mean square of 1, then by the weight. Each
    tensor-parallel rank has the weights of its heads, and the ranks add up their squares.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, num_heads: int) -> None:
        super().__init__()
        self.eps = eps
        self._parts = config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.ones(num_heads // self._parts * hidden_size))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, vectors: Tensor) -> Tensor:
        """Normalise vectors of heads x width of a head, the last two dimensions."""
        inputs = vectors.flatten(-2)
        if inputs.is_cuda and self._parts == 1:
            return F.rms_norm(inputs, self.weight.shape, self.weight, self.eps).view(vectors.shape)
        return _RmsNorm.apply(inputs, self.weight, self.eps, False, self._parts).view(vectors.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weight in checkpoints that other layouts can read."""
        assert metadata is not None, "given by checkpoint.py"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=backend.tensor_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


class _RmsNorm(torch.autograd.Function):
    """`parts` is the number of tensor-parallel ranks that have parts of each vector, of equal size."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, eps: float, is_zero_centred: bool, parts: int = 1
    ) -> Tensor:
        wide = inputs.float()
        ctx.is_zero_centred, ctx.parts = is_zero_centred, parts
        scale = torch.rsqrt(_mean(wide.square(), parts) + eps)
        ctx.save_for_backward(inputs, weight, scale)
        return (wide * scale).mul_(_factor(weight, is_zero_centred)).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """The gradient, with n = inputs * scale: d inputs = scale * (g - n * mean(g * n)) for g = gradient * factor."""
        inputs, weight, scale = ctx.saved_tensors
        normed, gradient = inputs.float() * scale, gradient.float()
        of_weight = (gradient * normed).flatten(0, -2).sum(0)
        weighted = gradient * _factor(weight, ctx.is_zero_centred)
        of_inputs = (weighted - normed * _mean(weighted * normed, ctx.parts)).mul_(scale)
        return of_inputs.to(inputs.dtype), of_weight.to(weight.dtype), None, None, None


def _mean(values: Tensor, parts: int) -> Tensor:
    """The mean over the last dimension, of which each of `parts` ranks has a part."""
    mean = values.mean(-1, keepdim=True)
    if parts > 1:
        distributed.all_reduce(mean, group=backend.tensor_parallel_group())
        mean /= parts
    return mean


def _factor(weight: Tensor, is_zero_centred: bool) -> Tensor:
    return weight.float() + 1 if is_zero_centred else weight


if not hasattr(moe_utils, "te_general_gemm"):
    # megatron-core 0.16.1 asks whether this is None, and leaves it undefined where TransformerEngine is absent.
    moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]


def expert_options(architecture: Architecture, *, expert_parallel: int) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig; none for a dense model.

    The router computes in fp32. If the softmax weights of the chosen experts are scaled to a sum of 1, a softmax over the chosen
    alone is the same as one over all, scaled. Megatron scales the weights of sigmoid scores to a sum of 1, if a token has two experts or
    more. It would move the corrections by the experts' load, at a rate that is 0 here.
    """
    experts = architecture.experts
    if experts is None:
        return {}
    num_dense = experts.num_dense_layers
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.width,
        "moe_layer_freq": [0] * num_dense + [1] * (architecture.num_layers - num_dense),
        "moe_shared_expert_intermediate_size": experts.shared_width or None,
        "moe_shared_expert_gate": experts.shared_gated,
        "moe_router_topk": experts.per_token,
        "moe_router_score_function": experts.scores,
        "moe_router_pre_softmax": not experts.renormalised,
        "moe_router_enable_expert_bias": experts.corrected,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": None if experts.weight_factor == 1 else experts.weight_factor,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": 1,
    }


def keep_in_fp32(model: GPTModel) -> None:
    """Give the constants of routers and some weights of delta nets fp32 again, after the model was converted to another type."""
    for module in model.modules():
        if isinstance(module, TopKRouter) and module.expert_bias is not None:
            module.expert_bias.data = module.expert_bias.data.float()
        if isinstance(module, GatedDeltaNet):
            for name in IN_FP32:
                parameter = module.get_parameter(name)
                parameter.data = parameter.data.float()


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
    for module in model.modules():
        if isinstance(module, LocalExperts):
            mark_expert(module)
    replace_dispatchers(model)
    if config.recompute != "none":
        _let_gradients_through(model)
    model.to(transformer.params_dtype)
    keep_in_fp32(model)
    return model


def _block(architecture: Architecture, transformer: TransformerConfig) -> Any:
    """The `TransformerBlockSubmodules` of this pipeline stage: with our attention, and norms that sequence parallelism allows."""
    first = get_transformer_layer_offset(transformer)
    layers = range(first, first + get_num_layers_to_build(transformer))
    kinds = [(architecture.experts_of(one), one in architecture.delta_layers) for one in layers]
    specs = {
        (experts, is_linear): _layer(architecture, experts, is_linear=is_linear)
        for experts, is_linear in {*kinds}
    }
    return TransformerBlockSubmodules(
        layer_specs=[specs[kind] for kind in kinds], layer_norm=cast(Any, RmsNorm)
    )


def _layer(architecture: Architecture, experts: Experts | None, *, is_linear: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=experts.count if experts else None,
        qk_layernorm=architecture.normed_qk,
        normalization="RMSNorm",
    )
    layer: Any = spec.submodules  # a union of dataclasses; this one is of a transformer layer
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    if experts:
        layer.mlp.submodules.experts.module = LocalExperts
    if is_linear:
        layer.self_attention = ModuleSpec(GatedDeltaNet, params={"architecture": architecture})
        return spec
    if architecture.gated:
        layer.self_attention.module = OutputGatedAttention
    attention = layer.self_attention.submodules
    attention.core_attention = ModuleSpec(RotaryAttention, params={"architecture": architecture})
    if architecture.normed_together:
        attention.q_layernorm, attention.k_layernorm = (
            ModuleSpec(NormOfAllHeads, params={"num_heads": num_heads})
            for num_heads in (architecture.num_heads, architecture.num_key_value_heads)
        )
    elif architecture.normed_qk:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return spec


def _mark_divided(model: GPTModel) -> None:
    """Flags the weights of which each tensor-parallel rank holds a different part.

    Megatron flags them only during its own initialisation, which we skip. A weight without the flag counts as a copy of rank 0's, and the
    gradient norm then covers only rank 0's part.
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

    Megatron's recomputed regions run without a graph, so their output requires a gradient only if their input does. After a
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
        **_activation(architecture),
        add_bias_linear=architecture.biased,
        add_qkv_bias=architecture.biased_qkv,
        # Megatron would add up the gradients of norms that tensor-parallel ranks divide.
        qk_layernorm=architecture.normed_qk and not architecture.normed_together,
        attention_output_gate=architecture.gated,
        layernorm_zero_centered_gamma=architecture.zero_centred_norms,
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
        **expert_options(architecture, expert_parallel=config.expert_parallel),
        batch_p2p_sync=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **_recomputation(config),
    )


def _activation(architecture: Architecture) -> dict[str, Any]:
    """Megatron's options for what is between the two matrices of an MLP."""
    limit = architecture.experts.gate_limit if architecture.experts else None
    if limit is None:
        return {"activation_func": F.silu}
    return {"activation_func": _quick_gelu, "activation_func_clamp_value": limit, "glu_linear_offset": 1.0}


def _quick_gelu(inputs: Tensor) -> Tensor:
    """x sigmoid(1.702 x). Megatron's own is compiled, which takes a compiler and a minute on a CPU."""
    return inputs * torch.sigmoid(1.702 * inputs)


def _recomputation(config: LearnerConfig) -> dict[str, Any]:
    """Megatron's options for `learner.recompute`. Megatron runs the recomputed modules again with the same kernels and inputs. On a CPU,
    gradients are then bit-identical; on a GPU they differ even between two runs, because the backward pass of flash attention adds in the
    order in which its blocks finish.

    "selective" excludes attention, whose flash kernel saves nothing that grows with the square of the length, and the norms,
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
