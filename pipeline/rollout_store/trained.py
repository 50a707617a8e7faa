"""What an optimizer step did with each token of a rollout that it trained.

The record arrives after the rollout's own, and lies in the same store. Of a rollout there is one that counts, the newest: a step that
is taken again after a resume replaces what it wrote before.
"""

import struct
from typing import Final

from pipeline.message import Float32s, MalformedMessage, Message

REASONS: Final = ("", "masked", "vetoed", "geometric_mask")
"""Why a token has no policy gradient, by its code in `TrainedTurn.reasons`. "": it has one. masked: it lies outside the objective's
trust region or clip. vetoed: its trajectory has an impossible ratio. geometric_mask: the mean ratio of its trajectory lies outside
learner.loss.geometric_mask.
"""
_HALF_BYTES = 2


class TrainedHead(Message, frozen=True, kw_only=True):
    """What can be told without reading the arrays."""

    rollout_id: str
    step: int
    version: int  # of the weights that the step started from
    num_tokens: int  # that were trained


class TrainedTurn(Message, frozen=True, kw_only=True):
    """Of one turn. Each array has one entry for each sampled token. Where a step passes over a token several times, the last pass
    counts.
    """

    turn: int  # of the trajectory, from 0
    # Of the learner, in nats, with the weights before the update, at the temperature at which the engine sampled.
    logprobs: Float32s
    advantages: Float32s
    # The factor of the objective on the token's policy gradient, 2 bytes each. With a reason, it is what the factor would have been.
    weights: bytes
    reasons: bytes  # one byte each: REASONS


class TrainedTokens(Message, frozen=True, kw_only=True):
    """The body of the record."""

    step: int
    version: int
    turns: tuple[TrainedTurn, ...]


def unpack_halves(packed: bytes) -> tuple[float, ...]:
    """The numbers in `packed`, IEEE half precision, little-endian. Raises MalformedMessage if the length is no multiple of 2."""
    if len(packed) % _HALF_BYTES:
        raise MalformedMessage(f"packed array of {len(packed)} bytes: not a multiple of {_HALF_BYTES}")
    return struct.unpack(f"<{len(packed) // _HALF_BYTES}e", packed)
