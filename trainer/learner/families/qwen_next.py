"""Qwen3-Next and Qwen3.5: three of four layers have a gated delta net, a linear attention, in place of attention. In the others a gate
multiplies what attention returns, and a quarter of each head is rotated. The factors of norms are their weights plus 1. Qwen3-Next has a
mixture of experts beside an expert that every token passes, with a gate.

Qwen3.5 also sees: the published directories have a vision tower, which is not trained, and exports have it unchanged. Its rotary embedding
has three positions for each token, which are the same in text. The published weights of all have a further layer that predicts more tokens,
which is neither trained nor exported.
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from trainer.learner.architecture import Architecture, DeltaNet, Experts
from trainer.learner.families.family import EXPERT_NAMES, LAYER_NAMES, Family

LAYER_KINDS = ("linear_attention", "full_attention")

DELTA_NAMES: Mapping[str, tuple[str, ...]] = {
    "self_attention.in_proj.weight": tuple(
        f"linear_attn.in_proj_{one}.weight" for one in ("qkv", "z", "b", "a")
    ),
    "self_attention.conv_weight": ("linear_attn.conv1d.weight",),
    "self_attention.decay_log": ("linear_attn.A_log",),
    "self_attention.decay_bias": ("linear_attn.dt_bias",),
    "self_attention.norm_weight": ("linear_attn.norm.weight",),
    "self_attention.out_proj.weight": ("linear_attn.out_proj.weight",),
}
"""Qwen3.5's names of the tensors of a delta net."""

SHARED_NAMES: Mapping[str, tuple[str, ...]] = {
    "mlp.shared_experts.linear_fc1.weight": (
        "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_expert.down_proj.weight",),
    "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
}
"""The names of the expert that every token passes, and of its gate."""


class Hybrid(Family, frozen=True, kw_only=True):
    """What these families share."""

    head_dim: int | None = 256
    partial_rotary_factor: float | None = 0.25
    full_attention_interval: int = 4  # where layer_types is missing
    attn_output_gate: bool | None = True
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    def architecture(self) -> Architecture:
        return msgspec.structs.replace(
            super().architecture(),
            normed_qk=True,
            gated=True,
            zero_centred_norms=True,
            delta_net=self.delta_net(grouped=False),
        )

    def delta_net(self, *, grouped: bool) -> DeltaNet | None:
        """The delta net of the layers that have one; None if all have attention."""
        layers = frozenset(n for n, kind in enumerate(self._layer_types()) if kind == "linear_attention")
        if not layers:
            return None
        return DeltaNet(
            num_key_heads=self.linear_num_key_heads,
            num_value_heads=self.linear_num_value_heads,
            key_width=self.linear_key_head_dim,
            value_width=self.linear_value_head_dim,
            kernel=self.linear_conv_kernel_dim,
            layers=layers,
            grouped=grouped,
        )

    def rotary_width(self) -> int:
        return int(self.head_width * self.rotary_share)

    def unsupported(self) -> Mapping[str, bool]:
        kinds = self._layer_types()
        return {
            **super().unsupported(),
            f"layer_types {self.layer_types}": not {*kinds} <= {*LAYER_KINDS},
            f"layer_types of {len(kinds)} layers": len(kinds) != self.num_hidden_layers,
            "attn_output_gate false": not self.attn_output_gate,
            f"linear_num_value_heads {self.linear_num_value_heads} for linear_num_key_heads {self.linear_num_key_heads}": bool(
                self.linear_num_value_heads % self.linear_num_key_heads
            ),
        }

    def _layer_types(self) -> list[str]:
        if self.layer_types is not None:
            return self.layer_types
        interval = self.full_attention_interval
        return [LAYER_KINDS[(layer + 1) % interval == 0] for layer in range(self.num_hidden_layers)]


class HybridMixture(Hybrid, frozen=True, kw_only=True):
    """What those with experts share."""

    intermediate_size: int = 0  # no layer has an MLP
    num_key_value_heads: int | None = 2
    num_experts: int | None = None
    num_local_experts: int | None = None  # the same, as transformers 5 writes it
    num_experts_per_tok: int
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None

    def experts(self) -> Experts:
        count = self.num_experts or self.num_local_experts
        if not count:
            raise ValueError("num_experts is missing; take the file that came with the weights")
        return Experts(
            count=count,
            per_token=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            renormalised=self.norm_topk_prob,
            shared_width=self.shared_expert_intermediate_size,
            shared_gated=True,
        )

    def unsupported(self) -> Mapping[str, bool]:
        return {
            **super().unsupported(),
            f"decoder_sparse_step {self.decoder_sparse_step}": self.decoder_sparse_step != 1,
            "mlp_only_layers": bool(self.mlp_only_layers),
            "shared_expert_intermediate_size 0": not self.shared_expert_intermediate_size,
            # Megatron does not scale the weight of a single expert to 1.
            "num_experts_per_tok 1": self.num_experts_per_tok == 1 and self.norm_topk_prob,
        }


class Qwen3Next(HybridMixture, frozen=True, kw_only=True):
    models: ClassVar = "Qwen3-Next, Qwen3-Coder-Next"
    layer_names: ClassVar = {
        **LAYER_NAMES,
        **EXPERT_NAMES,
        **DELTA_NAMES,
        **SHARED_NAMES,
        "self_attention.in_proj.weight": ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
    }

    def architecture(self) -> Architecture:
        return msgspec.structs.replace(super().architecture(), delta_net=self.delta_net(grouped=True))


class Qwen35Text(Hybrid, frozen=True, kw_only=True):
    models: ClassVar = "the language model of Qwen3.5 by itself"
    layer_names: ClassVar = {**LAYER_NAMES, **DELTA_NAMES}
    neutral_rope_keys: ClassVar = ("mrope_section",)

    num_key_value_heads: int | None = 4


class Qwen35(Qwen35Text, frozen=True, kw_only=True):
    models: ClassVar = "Qwen3.5 and 3.6 without experts, their vision as it is"
    language_prefix: ClassVar = "model.language_model."
    carried_prefixes: ClassVar = ("model.visual.",)
    class_endings: ClassVar = ("ForCausalLM", "ForConditionalGeneration")


class Qwen35Mixture(HybridMixture, frozen=True, kw_only=True):
    models: ClassVar = "Qwen3.5 and 3.6 with experts, their vision as it is"
    layer_names: ClassVar = {
        **LAYER_NAMES,
        **DELTA_NAMES,
        **SHARED_NAMES,
        "mlp.router.weight": ("mlp.gate.weight",),
        "mlp.experts.local_experts.{expert}.linear_fc1.weight": ("mlp.experts.gate_up_proj",),
        "mlp.experts.local_experts.{expert}.linear_fc2.weight": ("mlp.experts.down_proj",),
    }
    language_prefix: ClassVar = Qwen35.language_prefix
    carried_prefixes: ClassVar = Qwen35.carried_prefixes
    class_endings: ClassVar = Qwen35.class_endings
    neutral_rope_keys: ClassVar = Qwen35.neutral_rope_keys

    def experts(self) -> Experts:
        return msgspec.structs.replace(super().experts(), in_one_tensor=True, outputs_first=True)
