"""GLM 4.5 to 4.7: a mixture of experts chosen by sigmoid scores with a correction, beside an expert that every token passes. The first
layers have no experts, and half of each head is rotated.

The published weights have a further layer that predicts more tokens, which is neither trained nor exported.
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from trainer.learner.architecture import Architecture, Experts
from trainer.learner.families.family import EXPERT_NAMES, LAYER_NAMES, Family


class Glm4Mixture(Family, frozen=True, kw_only=True):
    models: ClassVar = "GLM-4.5 to 4.7, Flash excepted"
    layer_names: ClassVar = {
        **LAYER_NAMES,
        **EXPERT_NAMES,
        "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
        "mlp.shared_experts.linear_fc1.weight": (
            "mlp.shared_experts.gate_proj.weight",
            "mlp.shared_experts.up_proj.weight",
        ),
        "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight",),
    }

    num_key_value_heads: int | None = 8
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1
    use_qk_norm: bool = False
    partial_rotary_factor: float | None = 0.5

    def architecture(self) -> Architecture:
        return msgspec.structs.replace(
            super().architecture(), biased_qkv=bool(self.attention_bias), normed_qk=self.use_qk_norm
        )

    def rotary_width(self) -> int:
        return int(self.head_width * self.rotary_share)

    def experts(self) -> Experts:
        return Experts(
            count=self.n_routed_experts,
            per_token=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            renormalised=True,
            scores="sigmoid",
            corrected=True,
            weight_factor=self.routed_scaling_factor,
            shared_width=self.n_shared_experts * self.moe_intermediate_size,
            num_dense_layers=self.first_k_dense_replace,
        )

    def unsupported(self) -> Mapping[str, bool]:
        return {
            **super().unsupported(),
            "attention_bias": False,
            f"n_group {self.n_group} with topk_group {self.topk_group}": self.n_group != self.topk_group,
            "norm_topk_prob false": not self.norm_topk_prob,
            # Megatron scales the weight of a single expert neither to 1 nor by a factor of 0.
            "num_experts_per_tok 1": self.num_experts_per_tok == 1,
            "routed_scaling_factor 0": self.routed_scaling_factor == 0,
        }
