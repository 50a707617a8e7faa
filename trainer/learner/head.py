"""From hidden states to log-probs: the model without its output layer, and the output layer at the positions that are trained.

Most positions of an agent's trajectory are observations, which nothing is computed from but the keys and values of attention.
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from trainer.learner import backend
from trainer.learner.logprobs import head_logprobs


class HeadlessModel(GPTModel):
    """Megatron's GPTModel, whose forward pass ends with the hidden states. It still owns the weights of the output layer."""

    def _postprocess(self, hidden_states: Tensor, **_unused: Any) -> Tensor:
        return hidden_states


class Head:
    """The output layer of a model's last pipeline stage."""

    def __init__(self, model: GPTModel, *, vocab_size: int, chunk_tokens: int, fp32_logits: bool) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens
        self._fp32_logits = fp32_logits

    def logprobs(
        self,
        hidden_P1E: Tensor,
        rows_R: Tensor,
        targets_R: Tensor,
        temperature: float,
        *,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets at some positions and the entropies there, float32 of R; with a gradient of the latter if asked.

        With sequence parallelism `hidden_P1E` is this rank's part of the positions. `rows_R` counts over all of them.
        """
        if self._model.config.sequence_parallel:
            gathered_P1E: Tensor = gather_from_sequence_parallel_region(hidden_P1E)
            hidden_RE = gathered_P1E[:, 0].index_select(0, rows_R)
        else:
            hidden_RE = copy_to_tensor_model_parallel_region(hidden_P1E[:, 0].index_select(0, rows_R))
        return head_logprobs(
            hidden_RE,
            output_weight(self._model),
            targets_R,
            temperature=temperature,
            vocab_size=self._vocab_size,
            chunk_tokens=self._chunk_tokens,
            fp32_logits=self._fp32_logits,
            entropy_gradient=entropy_gradient,
            group=backend.tensor_parallel_group(),
        )


def output_weight(model: GPTModel) -> torch.nn.Parameter:
    """This rank's columns of the output layer. Of a tied model with one pipeline stage it is the embedding's weight; with
    several, the last stage has a copy.
    """
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    assert isinstance(weight, torch.nn.Parameter)
    return weight
