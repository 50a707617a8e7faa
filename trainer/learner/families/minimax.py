"""MiniMax-M2: a mixture of experts in every layer, chosen by sigmoid scores with a correction. Queries and keys are normalised over all
heads together, and half of each head is rotated. The published weights are in FP8, which is read.
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from trainer.learner.architecture import Architecture, Experts
from trainer.learner.families.family import LAYER_NAMES, Family

EXPERT = "mlp.experts.local_experts.{expert}"


class MiniMaxM2(Family, frozen=True, kw_only=True):
    models: ClassVar = "MiniMax-M2 to M2.5"
    layer_names: ClassVar = {
        **LAYER_NAMES,
        "mlp.router.weight": ("block_sparse_moe.gate.weight",),
        "mlp.router.expert_bias": ("block_sparse_moe.e_score_correction_bias",),
        f"{EXPERT}.linear_fc1.weight": (
            "block_sparse_moe.experts.{expert}.w1.weight",
            "block_sparse_moe.experts.{expert}.w3.weight",
        ),
        f"{EXPERT}.linear_fc2.weight": ("block_sparse_moe.experts.{expert}.w2.weight",),
    }
    rope_theta_without_key: ClassVar = 5_000_000.0

    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    num_local_experts: int
    num_experts_per_tok: int
    rotary_dim: int | None = None
    use_qk_norm: bool = False
    qk_norm_type: str = "per_layer"
    scoring_func: str | None = None
    use_routing_bias: bool = False
    shared_intermediate_size: int | None = 0
    attn_type_list: list[int] | None = None

    def architecture(self) -> Architecture:
        return msgspec.structs.replace(super().architecture(), normed_qk=True, normed_together=True)

    def rotary_width(self) -> int:
        return self.rotary_dim or self.head_width

    def experts(self) -> Experts:
        return Experts(
            count=self.num_local_experts,
            per_token=self.num_experts_per_tok,
            width=self.intermediate_size,
            renormalised=True,
            scores="sigmoid",
            corrected=True,
        )

    def unsupported(self) -> Mapping[str, bool]:
        rotated = int(self.head_width * self.rotary_share)
        return {
            **super().unsupported(),
            # Engines take rotary_dim alone.
            f"rotary_dim {self.rotary_dim} beside partial_rotary_factor {self.rotary_share}": self.rotary_share
            != 1.0
            and rotated != self.rotary_dim,
            # What engines compute without these keys, transformers does not.
            "use_qk_norm false": not self.use_qk_norm,
            f"qk_norm_type {self.qk_norm_type!r}": self.qk_norm_type != "per_layer",
            f"scoring_func {self.scoring_func!r}": self.scoring_func != "sigmoid",
            "use_routing_bias false": not self.use_routing_bias,
            "shared_intermediate_size": bool(self.shared_intermediate_size),
            f"attn_type_list {self.attn_type_list}": not {*(self.attn_type_list or ())} <= {1},
            # SGLang gives the output layer weights of its own.
            "tie_word_embeddings": bool(self.tie_word_embeddings),
            # Megatron does not scale the weight of a single expert to 1.
            "num_experts_per_tok 1": self.num_experts_per_tok == 1,
        }
