"""Mistral: Llama's form with a head size of its own; 7B v0.1 attends to a window. Ministral 3 scales the queries of far positions."""

from typing import ClassVar

import msgspec

from trainer.learner.architecture import Architecture, QueryScaling
from trainer.learner.families.family import Family


class Mistral(Family, frozen=True, kw_only=True):
    models: ClassVar = "Mistral from 7B to Small 3, Devstral Small 2505 and 2507"
    engines_read_scales: ClassVar = False

    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096

    def architecture(self) -> Architecture:
        if self.sliding_window is None:
            return super().architecture()
        every_layer = frozenset(range(self.num_hidden_layers))
        return msgspec.structs.replace(
            super().architecture(), window=self.sliding_window, windowed_layers=every_layer
        )


class Ministral3(Mistral, frozen=True, kw_only=True):
    models: ClassVar = "Ministral 3 without its vision"

    head_dim: int | None = 128
    sliding_window: int | None = None

    def architecture(self) -> Architecture:
        beta, original = (
            self.rope.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings")
        )
        if beta is None or not original:
            raise ValueError(
                "rope_parameters.llama_4_scaling_beta or original_max_position_embeddings is missing; take the file that came with the "
                "weights"
            )
        scaling = QueryScaling(beta=beta, original_positions=original)
        return msgspec.structs.replace(super().architecture(), query_scaling=scaling)
