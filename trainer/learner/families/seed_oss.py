"""Seed-OSS: Llama's form with biases of query, key and value, and a head size of its own."""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from trainer.learner.architecture import Architecture
from trainer.learner.families.family import Family


class SeedOss(Family, frozen=True, kw_only=True):
    models: ClassVar = "Seed-OSS"
    engines_read_scales: ClassVar = False

    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    attention_bias: bool | None = True
    attention_out_bias: bool | None = False

    def architecture(self) -> Architecture:
        return msgspec.structs.replace(super().architecture(), biased_qkv=bool(self.attention_bias))

    def unsupported(self) -> Mapping[str, bool]:
        # The published models name the dropout of their pretraining. Engines sample without it, so the learner computes without it.
        return {
            **super().unsupported(),
            "attention_bias": False,
            "attention_dropout": False,
            "attention_out_bias": bool(self.attention_out_bias),
        }
