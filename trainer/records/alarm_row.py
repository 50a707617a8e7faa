"""Alarm rows: where an alarm of a run began, and where it was over."""

from trainer.recipe.alarms import AlarmKind
from trainer.records.row import Row


class AlarmRow(Row, frozen=True, kw_only=True):
    """The condition of an alarm holds from here on, or holds no longer."""

    step: int  # the newest optimizer step at that moment
    kind: AlarmKind
    text: str  # the numbers that decided it
    subject: str = ""  # what it is about, where one kind can be about several things: "training", "held out"
    is_over: bool = False
    at: float = 0.0


def alarm_sentence(row: AlarmRow) -> str:
    """For people, in one line."""
    return f"{'alarm is over' if row.is_over else 'ALARM'}: {row.kind}: {row.text}"
