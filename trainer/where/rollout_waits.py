"""The life of trained rollouts, from their requests to the steps that trained them, by what they waited for."""

import math
from collections.abc import Iterable, Sequence

import msgspec

from trainer.records.journal import EpisodeRow, StepRow
from trainer.where.slots import AT_WORK, seconds_of

QUEUE, DELIVERY, GROUP, JUDGE, TURN, STEP = (
    "queue",
    "delivery",
    "waiting for the group",
    "waiting for judgements",
    "waiting for the step",
    "step",
)
ON_WORKER, UNTIL_SETTLED = "on its worker", "until it was settled"
OLD = "What rollouts waited for on their workers and in their groups is unknown: the journal is older than that."


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the rollouts' lives."""

    p50_s: float
    p90_s: float
    share: float  # of all lives together


class RolloutWaits(msgspec.Struct, frozen=True, kw_only=True):
    """Of all trained rollouts."""

    num_rollouts: int
    life_p50_s: float
    life_p90_s: float
    waits: dict[str, Wait]  # in the order of a life; the shares sum up to 1
    unknown: tuple[str, ...] = ()


def parts_of(row: EpisodeRow, taken_at: float) -> dict[str, float]:
    """One life, of a rollout that a step took at `taken_at`; 0: that is not known. The machines' clocks may differ, so a part
    that would be negative is 0. The parts sum up to the life's length.
    """
    queue = {QUEUE: row.claimed_at - row.enqueued_at}
    if row.seconds is None or not taken_at:
        later = {ON_WORKER: row.finished_at - row.claimed_at, UNTIL_SETTLED: row.at - row.finished_at}
        return _positive(queue | later)
    work = {name: getattr(row.seconds, field) for field, name in AT_WORK.items()}
    stamps = row.stamps
    released_at = stamps.released_at or taken_at
    later = {
        DELIVERY: stamps.joined_at - row.claimed_at - seconds_of(row.seconds),
        GROUP: stamps.closed_at - stamps.joined_at,
        JUDGE: released_at - stamps.closed_at,
        TURN: taken_at - released_at,
        STEP: row.at - taken_at,
    }
    return _positive(queue | work | later)


def rollout_waits(rows: Iterable[EpisodeRow], steps: Iterable[StepRow]) -> RolloutWaits:
    """Of the trained ones; those that tell more are not mixed with those of an older journal."""
    taken_at = {request_id: row.began_at for row in steps for request_id in row.request_ids}
    trained = [row for row in rows if row.fate == "trained" and row.claimed_at]
    told = [row for row in trained if row.seconds is not None and taken_at.get(row.request_id)]
    lives = [parts_of(row, taken_at.get(row.request_id, 0.0)) for row in told or trained]
    lengths = [sum(life.values()) for life in lives]
    whole_s = sum(lengths)
    names = lives[0] if lives else ()
    return RolloutWaits(
        num_rollouts=len(lives),
        life_p50_s=percentile(lengths, 0.5),
        life_p90_s=percentile(lengths, 0.9),
        waits={name: _wait([life[name] for life in lives], whole_s) for name in names},
        unknown=() if told or not trained else (OLD,),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; 0 of none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def _wait(values: Sequence[float], whole_s: float) -> Wait:
    share = sum(values) / whole_s if whole_s else 0.0
    return Wait(p50_s=percentile(values, 0.5), p90_s=percentile(values, 0.9), share=share)


def _positive(parts: dict[str, float]) -> dict[str, float]:
    return {name: max(0.0, seconds) for name, seconds in parts.items()}
