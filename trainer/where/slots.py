"""The time of the workers' slots: what each claim did, and why slots had none."""

from collections.abc import Iterable, Sequence

import msgspec

from pipeline.trajectory import EpisodeSeconds
from trainer.records.journal import EpisodeRow
from trainer.records.time_rows import ClosedBy, FleetRow
from trainer.where.account import Account, account

AT_WORK: dict[str, str] = {
    "open_s": "container open",
    "engine_wait_s": "waiting for the engine",
    "generate_s": "generate",
    "command_s": "command",
    "close_s": "container close",
    "grade_s": "grade",
    "other_s": "other",
}
"""What a claim does, by the fields of `EpisodeSeconds`."""

PAUSED = "idle: the worker is paused"
IDLE: dict[ClosedBy, str] = {
    "": "idle: between claims",
    "lag": "idle: admission is closed by the lag",
    "weights": "idle: engines load the newest weights",
    "evaluation": "idle: an evaluation keeps the newest weights from the engines",
    "end": "idle: the run's last groups are enqueued",
    "judge": "idle: no judge works",
    "redis": "idle: Redis is full of trajectories",
    "memory": "idle: the trainer's memory is full of trajectories",
    "failures": "idle: a pause after failed groups",
}
UNSETTLED = "claims without a row here"
"""Of other runs, tried again, or not settled yet."""

NO_SAMPLES = "Slots without a claim are unknown: the journal has no samples of the fleet (fleet.jsonl)."
NO_SECONDS = "What claims did is unknown: the journal is older than that."


def at_work(rows: Iterable[EpisodeRow]) -> dict[str, float]:
    """The seconds of these rows' claims, by what they were spent on; nothing where no row tells."""
    told = [row.seconds for row in rows if row.seconds is not None]
    return {name: sum(getattr(one, field) for one in told) for field, name in AT_WORK.items()} if told else {}


def seconds_of(seconds: EpisodeSeconds) -> float:
    """All of them."""
    return sum(msgspec.structs.astuple(seconds))


def idle_of(samples: Iterable[FleetRow]) -> dict[str, float]:
    """Slot-seconds without a claim, by reason."""
    found = dict.fromkeys((PAUSED, *IDLE.values()), 0.0)
    for row in samples:
        found[PAUSED] += row.span_s * row.paused
        found[IDLE[row.closed_by]] += row.span_s * (row.slots - row.running - row.paused)
    return found


def slots_account(rows: Sequence[EpisodeRow], samples: Sequence[FleetRow]) -> Account:
    """The wall is that of the samples, and the claims' time that of their rows, which is exact; samples divide the rest."""
    work, idle = at_work(rows), idle_of(samples)
    unknown = [text for text, is_known in ((NO_SAMPLES, samples), (NO_SECONDS, work)) if not is_known]
    if not samples:
        return account("slots", work, *unknown)
    rest_s = max(0.0, sum(row.span_s * row.slots for row in samples) - sum(work.values()))
    idle_s = sum(idle.values())
    scale = min(1.0, rest_s / idle_s) if idle_s else 0.0
    scaled = {name: seconds * scale for name, seconds in idle.items()}
    return account("slots", {**work, UNSETTLED: rest_s - sum(scaled.values()), **scaled}, *unknown)
