"""gpt-oss: a mixture of experts with biases everywhere and a clamped gate. Every head has a sink in its attention, and every other layer
attends to a window. The published weights of the experts are in MXFP4, which is read; exports have the type of the others.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from trainer.learner.architecture import Architecture, Experts
from trainer.learner.families.family import LAYER_NAMES, Family

LAYER_KINDS = ("sliding_attention", "full_attention")


class GptOss(Family, frozen=True, kw_only=True):
    models: ClassVar = "gpt-oss"
    engines_read_scales: ClassVar = False
    layer_names: ClassVar = {
        **LAYER_NAMES,
        "self_attention.core_attention.sinks": ("self_attn.sinks",),
        "self_attention.linear_proj.bias": ("self_attn.o_proj.bias",),
        "mlp.router.weight": ("mlp.router.weight",),
        "mlp.router.bias": ("mlp.router.bias",),
        "mlp.experts.local_experts.{expert}.linear_fc1.weight": ("mlp.experts.gate_up_proj",),
        "mlp.experts.local_experts.{expert}.linear_fc1.bias": ("mlp.experts.gate_up_proj_bias",),
        "mlp.experts.local_experts.{expert}.linear_fc2.weight": ("mlp.experts.down_proj",),
        "mlp.experts.local_experts.{expert}.linear_fc2.bias": ("mlp.experts.down_proj_bias",),
    }

    num_key_value_heads: int | None = 8
    num_local_experts: int
    num_experts_per_tok: int
    sliding_window: int | None = 128
    swiglu_limit: float = 7.0
    attention_bias: bool | None = True
    head_dim: int | None = 64

    def architecture(self) -> Architecture:
        windowed = frozenset(
            layer for layer, kind in enumerate(self._layer_types()) if kind == "sliding_attention"
        )
        return msgspec.structs.replace(
            super().architecture(),
            biased=True,
            sinks=True,
            window=self.sliding_window,
            windowed_layers=windowed if self.sliding_window else frozenset(),
        )

    def experts(self) -> Experts:
        return Experts(
            count=self.num_local_experts,
            per_token=self.num_experts_per_tok,
            width=self.intermediate_size,
            renormalised=True,
            in_one_tensor=True,
            gate_limit=self.swiglu_limit,
        )

    def unsupported(self) -> Mapping[str, bool]:
        quantization: Mapping[str, Any] = self.quantization_config or {}
        kinds = self._layer_types()
        return {
            **super().unsupported(),
            f"layer_types {self.layer_types}": not {*kinds} <= {*LAYER_KINDS},
            f"layer_types of {len(kinds)} layers": len(kinds) != self.num_hidden_layers,
            "attention_bias": False,
            "attention_bias false": not self.attention_bias,
            "num_experts_per_tok 1": self.num_experts_per_tok == 1,
            "quantization_config": quantization.get("quant_method", "mxfp4") != "mxfp4",
        }

    def _layer_types(self) -> list[str]:
        if self.layer_types is not None:
            return self.layer_types
        return [LAYER_KINDS[layer % 2] for layer in range(self.num_hidden_layers)]
