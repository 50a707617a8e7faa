"""Floating-point operations of a model on packed samples. Pure arithmetic, no torch.

Counted are the operations that the result needs: matrix products at two per multiplication and addition, causal attention at
the pairs that it keeps. Norms, activations and the rotary embedding are left out (below 1 %), and so is recomputation: what is
computed twice is not needed twice, so a share of the device's peak that is computed from these counts falls with it.
"""

from collections.abc import Iterable

from trainer.learner.architecture import Architecture

TRAINING_PASSES = 3
"""A step costs three forward passes: the backward pass has a product for the input and one for the weight."""


def forward_flops(
    architecture: Architecture, lengths: Iterable[int], *, num_head_positions: int | None = None
) -> int:
    """Operations of one forward pass over samples of `lengths` positions each, whole model.

    A sample of T tokens takes T - 1 positions. The output layer runs at `num_head_positions` of them, or at all.
    """
    sizes = list(lengths)
    num_positions = sum(sizes)
    layers = architecture.num_layers * (
        2 * num_positions * _layer_matrices(architecture)
        + sum(attention_flops(architecture, length) for length in sizes)
    )
    rows = num_positions if num_head_positions is None else num_head_positions
    return layers + 2 * rows * architecture.width * architecture.vocab_size


def training_flops(
    architecture: Architecture, lengths: Iterable[int], *, num_head_positions: int | None = None
) -> int:
    """Operations of forward and backward pass, when all weights are trained."""
    return TRAINING_PASSES * forward_flops(architecture, lengths, num_head_positions=num_head_positions)


def attention_flops(architecture: Architecture, length: int) -> int:
    """Scores and weighted values of one sample in one layer: position t attends to t positions, itself included."""
    num_pairs = length * (length + 1) // 2
    return 2 * 2 * num_pairs * architecture.num_heads * architecture.head_width


def _layer_matrices(architecture: Architecture) -> int:
    """Weights of one layer that each position is multiplied with."""
    query_width = architecture.num_heads * architecture.head_width
    key_value_width = 2 * architecture.num_key_value_heads * architecture.head_width
    attention = architecture.width * (query_width + key_value_width) + query_width * architecture.width
    router = architecture.width * architecture.experts.count if architecture.experts else 0
    return attention + router + 3 * architecture.width * architecture.active_mlp_width
