"""The row of the log-prob gap of one step."""

import msgspec

from trainer.records.row import Row


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between learner and engine over some tokens, in nats."""

    num_tokens: int
    mean: float  # absolute
    max: float  # absolute
    bias: float  # mean of learner minus engine


class AuditRow(Row, frozen=True, kw_only=True):
    """The log-prob gap between engine and learner under the same weights, on a share of a step's trained tokens."""

    step: int
    num_tokens: int  # measured
    num_batch_tokens: int  # that the step trained
    num_unmeasured: int  # drawn, but sampled by weights that are no longer held
    num_samples: int  # drawn
    num_positions: int  # that the learner computed for it
    gap_max: float | None  # absolute, nats; None where nothing was measured
    gap_mean: float | None
    audit_s: float
    # Of the weights that sampled the token.
    by_version: dict[str, Drift] = msgspec.field(default_factory=dict[str, Drift])
    # Tokens before it in its sample.
    by_position: dict[str, Drift] = msgspec.field(default_factory=dict[str, Drift])
    by_kind: dict[str, Drift] = msgspec.field(default_factory=dict[str, Drift])  # what it is part of
    at: float = 0.0
