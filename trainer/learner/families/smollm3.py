"""SmolLM3: Llama's form, in which every fourth layer does not rotate queries and keys by their positions."""

from typing import ClassVar

import msgspec

from trainer.learner.architecture import Architecture
from trainer.learner.families.family import Family


class SmolLM3(Family, frozen=True, kw_only=True):
    models: ClassVar = "SmolLM3"
    engines_read_scales: ClassVar = False
    rope_theta_without_key: ClassVar = 2_000_000.0

    num_key_value_heads: int | None = 4
    tie_word_embeddings: bool | None = True
    no_rope_layers: list[int] | None = None  # 0 for each layer that does not rotate, and 1 for each that does
    no_rope_layer_interval: int = 4

    def architecture(self) -> Architecture:
        given, interval = self.no_rope_layers, self.no_rope_layer_interval
        if given is None and interval < 1:
            raise ValueError(
                "no_rope_layer_interval must be 1 or more; take the file that came with the weights"
            )
        if given is None:
            given = [int((layer + 1) % interval != 0) for layer in range(self.num_hidden_layers)]
        if len(given) < self.num_hidden_layers:
            raise ValueError(
                f"no_rope_layers has {len(given)} entries for {self.num_hidden_layers} layers; take the file that came with the weights"
            )
        unrotated = (layer for layer in range(self.num_hidden_layers) if not given[layer])
        return msgspec.structs.replace(super().architecture(), unrotated_layers=frozenset(unrotated))
