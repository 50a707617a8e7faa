"""Qwen2 and Qwen3: Qwen2 has biases of query, key and value; Qwen3 normalises the queries and keys of each head instead, and has a form
with a mixture of experts.
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from trainer.learner.architecture import Architecture, Experts
from trainer.learner.families.family import EXPERT_NAMES, LAYER_NAMES, Family


class Qwen2(Family, frozen=True, kw_only=True):
    models: ClassVar = "Qwen2, Qwen2.5"

    num_key_value_heads: int | None = 32

    def architecture(self) -> Architecture:
        return msgspec.structs.replace(super().architecture(), biased_qkv=True)

    def unsupported(self) -> Mapping[str, bool]:
        # The biases are part of every model, whatever attention_bias says.
        return {**super().unsupported(), "attention_bias": False}


class Qwen3(Family, frozen=True, kw_only=True):
    models: ClassVar = "Qwen3"

    num_key_value_heads: int | None = 32
    head_dim: int | None = 128

    def architecture(self) -> Architecture:
        return msgspec.structs.replace(super().architecture(), normed_qk=True)


class Qwen3Mixture(Family, frozen=True, kw_only=True):
    models: ClassVar = "Qwen3's mixture of experts"
    layer_names: ClassVar = {**LAYER_NAMES, **EXPERT_NAMES}

    num_key_value_heads: int | None = 4
    num_experts: int | None = None
    num_local_experts: int | None = None  # the same, as transformers 5 writes it
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None

    def architecture(self) -> Architecture:
        return msgspec.structs.replace(super().architecture(), normed_qk=True)

    def experts(self) -> Experts:
        count = self.num_experts or self.num_local_experts
        if not count or not self.num_experts_per_tok or not self.moe_intermediate_size:
            raise ValueError(
                "num_experts, num_experts_per_tok or moe_intermediate_size is missing; take the file that came with the weights"
            )
        return Experts(
            count=count,
            per_token=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            renormalised=self.norm_topk_prob,
        )

    def unsupported(self) -> Mapping[str, bool]:
        return {
            **super().unsupported(),
            f"decoder_sparse_step {self.decoder_sparse_step}": self.decoder_sparse_step != 1,
            "mlp_only_layers": bool(self.mlp_only_layers),
            # Megatron does not scale the weight of a single expert to 1.
            "num_experts_per_tok 1": self.num_experts_per_tok == 1 and self.norm_topk_prob,
        }
