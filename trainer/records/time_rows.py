"""The rows that say where time went besides the steps: starts, the fleet, pauses of engines."""

from typing import Literal

import msgspec

from trainer.records.row import Row

ClosedBy = Literal["", "lag", "weights", "evaluation", "end", "judge", "redis", "memory", "failures"]
"""Why no group may be enqueued: the bound of `max_lag_versions`; the same while engines load the newest weights, or while an
evaluation keeps these from them; every group of the run is enqueued; no judge works; the bounds of bytes in Redis and in the
trainer's memory; a pause after failed groups. "": one more may be.
"""


class StartRow(Row, frozen=True, kw_only=True):
    """From here on a process takes steps."""

    step: int
    seconds: dict[str, float]  # since the process began to build the run, by part (`trainer.loop.step_times`)
    at: float = 0.0


class EnginePause(msgspec.Struct, frozen=True, kw_only=True):
    """An engine was paused to load a weight version."""

    engine: str  # URL
    began_at: float  # Unix seconds
    ended_at: float


class FleetRow(Row, frozen=True, kw_only=True):
    """The workers' slots at one moment, as heartbeats tell."""

    span_s: float  # since the sample before, or since sampling began
    num_workers: int
    slots: int
    running: int  # slots with a claim, of whichever run
    paused: int  # slots without a claim, of workers that take none because something is out
    closed_by: ClosedBy
    is_waiting: bool  # the trainer waits for trajectories
    at: float = 0.0
    # Share of the processors' time that was used since the sample before; None if workers run on other machines than the trainer.
    cpu_share: float | None = None
