"""Mistral: Llama's form with a head size of its own. Ministral 3 scales the queries of far positions, too."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from trainer.learner.architecture import Architecture, QueryScaling
from trainer.learner.families.family import Family


class Mistral(Family, frozen=True, kw_only=True):
    models: ClassVar = "Mistral from 7B v0.2 to Small 3, Devstral Small"

    sliding_window: int | None = 4096

    def unsupported(self) -> Mapping[str, bool]:
        return {
            **super().unsupported(),
            f"sliding_window {self.sliding_window}": self.sliding_window is not None,
        }


class Ministral3(Mistral, frozen=True, kw_only=True):
    models: ClassVar = "Ministral 3 without its vision"

    sliding_window: int | None = None

    def architecture(self) -> Architecture:
        rope: dict[str, Any] = self.rope_parameters or {}
        try:
            scaling = QueryScaling(
                beta=rope["llama_4_scaling_beta"],
                original_positions=rope["original_max_position_embeddings"],
            )
        except KeyError as error:
            raise ValueError(
                f"rope_parameters.{error.args[0]} is missing; take the file that came with the weights"
            ) from error
        return msgspec.structs.replace(super().architecture(), query_scaling=scaling)
