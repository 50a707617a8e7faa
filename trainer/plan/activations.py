"""Bytes of activations on one GPU of the learner, by formula. Pure arithmetic, no torch.

Given are bytes per position of the micro-batch, whatever part of the positions a process works on. The formulas list what the
modules keep for their backward pass; a test compares them with the bytes that the real modules keep, at the shapes of one process.

Names: a `stream` is one vector of the model's width, as it runs from layer to layer. With sequence parallelism each
tensor-parallel process keeps its part of the streams.
"""

import math

from trainer.learner.architecture import Architecture
from trainer.learner.config import LearnerConfig

VALUE_BYTES = {"bf16": 2, "fp32": 4}
FP32_BYTES = 4
INDEX_BYTES = 8
ANGLES = 2  # a cosine and a sine


def saved_bytes(architecture: Architecture, config: LearnerConfig) -> float:
    """Kept from the forward to the backward pass, per position and layer."""
    match config.recompute:
        case "full":
            return _stream(architecture, config)
        case "selective":
            return _outside_of_mlp(architecture, config)
        case "none":
            return _outside_of_mlp(architecture, config) + _mlp(architecture, config)


def outer_bytes(architecture: Architecture, config: LearnerConfig) -> float:
    """Kept outside of the layers, per position: the input of the last norm, and the angles of the rotary embedding."""
    angles = ANGLES * FP32_BYTES * architecture.head_width / config.context_parallel
    return _stream(architecture, config) + angles


def layer_bytes(architecture: Architecture, config: LearnerConfig) -> float:
    """What a layer keeps without recomputation, per position: so much exists while a recomputed layer's backward pass runs."""
    return _outside_of_mlp(architecture, config) + _mlp(architecture, config)


def head_bytes(architecture: Architecture, config: LearnerConfig, *, num_rows: int) -> int:
    """At most, while log-probs of `num_rows` trained positions and their gradients are computed.

    Forward, a chunk of logits and its exponentials, in fp32; backward, a chunk in fp32 and in the weights' type, and the sum of
    the weights' gradient in fp32.
    """
    size = VALUE_BYTES[config.dtype]
    rows = -(-num_rows // config.context_parallel)
    columns = -(-architecture.vocab_size // config.tensor_parallel)
    chunk = min(rows, config.head_chunk_tokens) * columns
    rounding = size if config.dtype == "bf16" else 0
    of_weight = columns * architecture.width * (FP32_BYTES + rounding)
    hidden = 2 * rows * architecture.width * size
    return hidden + max(2 * FP32_BYTES * chunk, (FP32_BYTES + rounding) * chunk + of_weight)


def _stream(architecture: Architecture, config: LearnerConfig) -> float:
    return architecture.width * VALUE_BYTES[config.dtype] / _stream_parts(config)


def _stream_parts(config: LearnerConfig) -> int:
    return config.context_parallel * (config.tensor_parallel if config.sequence_parallel else 1)


def _outside_of_mlp(architecture: Architecture, config: LearnerConfig) -> float:
    """Of the streams: the inputs of the two norms and what they return; each norm has one scale."""
    scales = 2 * FP32_BYTES / _stream_parts(config)
    return 4 * _stream(architecture, config) + scales + _attention(architecture, config)


def _attention(architecture: Architecture, config: LearnerConfig) -> float:
    """The joint output of the three projections, and what the kernel takes and returns. Keys and values have fewer heads."""
    parts = config.context_parallel
    heads = architecture.num_heads / config.tensor_parallel
    groups = architecture.num_key_value_heads / config.tensor_parallel
    vector = architecture.head_width * VALUE_BYTES[config.dtype]
    joint = (heads + 2 * groups) * vector
    queries_and_outputs, keys = 2 * heads * vector, groups * vector
    log_sums = heads * FP32_BYTES
    norms = heads * vector + (heads + groups) * FP32_BYTES if architecture.normed_qk else 0.0
    if parts == 1:
        return joint + queries_and_outputs + keys + log_sums + norms
    # Keys and values go to each process of the group, so the kernel's values are no view of the joint output, which is then kept
    # for the norms alone. The outputs exist twice, before and after they go back.
    keys *= parts / math.gcd(parts, int(groups))
    kernel = queries_and_outputs + 2 * keys + log_sums + heads * vector
    return (kernel + norms + (joint if architecture.normed_qk else 0.0)) / parts


def _mlp(architecture: Architecture, config: LearnerConfig) -> float:
    """The joint output of gate and up projection, the activated gate, the up projection again, and their product."""
    size = VALUE_BYTES[config.dtype]
    if architecture.experts is None:
        return 5 * architecture.mlp_width * size / config.tensor_parallel / config.context_parallel
    experts = architecture.experts
    # The product is kept before and after it is weighted. Each token chosen goes to its expert with its weight and its index.
    per_choice = (6 * experts.width + architecture.width) * size + 2 * FP32_BYTES + 2 * INDEX_BYTES
    router = experts.count * (3 * FP32_BYTES + 1)
    return (experts.per_token * per_choice + router) / _stream_parts(config)
