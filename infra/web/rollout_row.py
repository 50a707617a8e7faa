"""A rollout as the pages know it without its body."""

import sys
from typing import Any

import msgspec

from pipeline.trajectory import TrajectoryHead


class RolloutRow(msgspec.Struct, kw_only=True, gc=False):
    """What journal and store tell of a rollout.

    A row of `episodes.jsonl` is decoded into one, and the table shows the same object: there may be hundreds of thousands.
    """

    request_id: str
    task_id: str = ""
    group_id: str = ""
    member: int = 0
    group_size: int = 0
    purpose: str = "train"
    outcome: str = ""
    reward: float | None = None
    num_turns: int = 0
    sampled_tokens: int = 0
    num_tokens: int = 0
    version_first: int | None = None
    version_last: int | None = None
    version_at_enqueue: int = 0
    attempt: int = 0
    worker: str = ""
    enqueued_at: float = 0.0
    claimed_at: float = 0.0
    finished_at: float = 0.0
    control: str = ""
    patch: str = ""  # fingerprint of the patch that was graded
    num_cuts: int = 0
    evaluation: str = ""
    lag: int | None = None  # in versions; None: it was not trained
    is_dead: bool = False
    fate: str = ""  # "": the journal does not have it yet
    step: int | None = None  # that trained it
    is_stored: bool = False
    at: float = 0.0  # when it was settled; 0: it is not

    def __post_init__(self) -> None:
        for name in _REPEATED:
            setattr(self, name, sys.intern(getattr(self, name)))


_REPEATED = ("task_id", "group_id", "worker", "purpose", "outcome", "fate", "evaluation", "control", "patch")
"""Texts that many rows share."""

COLUMNS = RolloutRow.__struct_fields__
_OF_HEADS = tuple(name for name in COLUMNS if name in set(TrajectoryHead.__struct_fields__))


def row_of_line(line: bytes) -> RolloutRow:
    """Of a row of `episodes.jsonl`. Raises msgspec.DecodeError."""
    row = _LINES.decode(line)
    row.finished_at = row.finished_at or row.at
    return row


def row_of_head(head: TrajectoryHead) -> RolloutRow:
    """Of a rollout that the journal does not have."""
    told: dict[str, Any] = {name: getattr(head, name) for name in _OF_HEADS}
    return RolloutRow(**told)


_LINES = msgspec.json.Decoder(RolloutRow)
