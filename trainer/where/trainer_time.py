"""The time of the trainer: from its first start to its last row, by what the loop did or waited for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.records.journal import EndRow, StepRow
from trainer.records.time_rows import StartRow
from trainer.where.account import Account, account

START, WAIT, NOT_KEPT = "start", "waiting for groups", "not in the journal"
LEARNER = ("forward", "backward", "optimizer")
REST = ("audit", "export", "engines", "checkpoint", "evaluation", "other")
NO_STEPS = "No step says where its time went: the journal is older than that, or no step was taken yet."
NO_START = (
    "Nothing is known of the time before the first step and after the last: the journal is older than that."
)


@dataclass(frozen=True, slots=True)
class TrainerWindow:
    """From when to when the trainer's time is known (Unix s)."""

    began_at: float
    ended_at: float


def window_of(
    starts: Sequence[StartRow], steps: Sequence[StepRow], endings: Sequence[EndRow]
) -> TrainerWindow | None:
    """None if nothing is known."""
    told = [row for row in steps if row.wall_s]
    began = [row.at - sum(row.seconds.values()) for row in starts] + [row.at - row.wall_s for row in told]
    ended = [row.at for row in (*told, *starts)] + [row.at for row in endings if row.seconds]
    return TrainerWindow(min(began), max(ended)) if began else None


def trainer_account(
    starts: Sequence[StartRow], steps: Sequence[StepRow], endings: Sequence[EndRow]
) -> Account:
    """What no row accounts for, such as steps that a resume discarded, or hours without a trainer, is a part of its own."""
    told = [row for row in steps if row.wall_s]
    window = window_of(starts, told, endings)
    if window is None:
        return account("trainer", {}, NO_STEPS)
    parts = {START: sum(sum(row.seconds.values()) for row in starts), WAIT: sum(row.wait_s for row in told)}
    for part in (*LEARNER, *REST):
        parts[part] = sum(getattr(row, f"{part}_s") for row in told)
    for row in endings:
        for name, seconds in row.seconds.items():
            parts[_part_of(name, parts)] += seconds
    elapsed_s = window.ended_at - window.began_at
    parts[NOT_KEPT] = max(0.0, elapsed_s - sum(parts.values()))
    unknown = () if starts else (NO_START,)
    return account("trainer", parts, *unknown)


def _part_of(name: str, parts: Mapping[str, float]) -> str:
    """Of a part of `StepTimes` after the last step, where no step divides what the learner did."""
    return WAIT if name == "wait" else name if name in parts else "other"
