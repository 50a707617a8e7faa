"""What a person sees while tasks are verified: a row for each task that is done, and the states that are being graded."""

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from rich.text import Text

from pipeline.taskfile import EXPECTED, Found, State, Strength, Verification
from pipeline.visible import visible_line
from workers.display import Display, open_display

ID_CHARS = 44
EVIDENCE_LINES = 6
_COLUMNS: dict[State, int] = {"empty": 8, "useless": 9, "tests_only": 12, "gold": 8}


class VerificationTable:
    """Rows on a display."""

    def __init__(self, display: Display, *, width: int) -> None:
        self._display = display
        self._width = width

    def begin(self, task_id: str, what: str) -> None:
        """This state of the task, or this partial fix, is now being graded."""
        self._display.begin(task_id, what)

    def finish(self, verification: Verification, evidence: str) -> None:
        """The task is done; `evidence` is the end of a log that shows what is wrong with it."""
        lines = [line for line in evidence.splitlines() if line.strip()][-EVIDENCE_LINES:]
        shown = [
            row(verification, self._width),
            *(Text(f"    | {visible_line(line)}", style="dim") for line in lines),
            *(strength_rows(verification.strength) if verification.strength else ()),
        ]
        self._display.finish(verification.task, shown, ok=verification.ok)


@contextmanager
def open_table(task_ids: Sequence[str]) -> Generator[VerificationTable]:
    """A table of these tasks on standard output."""
    width = min(max((len(visible_line(one)) for one in task_ids), default=4), ID_CHARS)
    with open_display(sys.stdout, items="tasks", num_items=len(task_ids), heading=heading(width)) as display:
        yield VerificationTable(display, width=width)


def heading(width: int) -> str:
    states = "".join(name.rjust(room) for name, room in _COLUMNS.items())
    return f"{'task'.ljust(width)}{states}{'controls':>10}{'s':>8}"


def row(verification: Verification, width: int) -> Text:
    """One task in one line, with the reason at its end if it is not ok."""
    text = Text(visible_line(verification.task)[-width:].ljust(width))
    for state, room in _COLUMNS.items():
        found = verification.states[state]
        cell = "broken" if found == "infrastructure" else str(found)
        text.append(cell.rjust(room), _style(state, found))
    text.append(_controls(verification).rjust(10))
    text.append(f"{verification.seconds:8.1f}  ")
    reason = "ok" if verification.ok else visible_line(verification.reason)
    text.append(reason, "green" if verification.ok else "red")
    if verification.warning:
        text.append(f"; {visible_line(verification.warning)}", "yellow")
    return text


def _controls(verification: Verification) -> str:
    """How many of the tests can be made to fail."""
    return f"{verification.num_controlled}/{verification.num_tests}" if verification.num_tests else "-"


def strength_rows(strength: Strength) -> list[Text]:
    """The weakness of a task, and the partial fixes that its tests let pass."""
    if not strength.num_partial_fixes:
        return [Text("    no partial fix could be made of the known fix", style="dim")]
    passing = f"{len(strength.passing)} of {strength.num_partial_fixes} partial fixes pass"
    return [
        Text(f"    weakness {strength.weakness:.2f}: {passing}", "yellow" if strength.passing else "dim"),
        *(Text(f"    | {visible_line(one)}", style="dim") for one in strength.passing),
    ]


def _style(state: State, found: Found) -> str:
    if found == "infrastructure":
        return "yellow"
    return "" if found == EXPECTED[state] else "bold red"
