"""The display of a verification: a row for each finished task, and the states that are being graded."""

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from rich.text import Text

from pipeline.screen import visible_line
from pipeline.taskfile import EXPECTED, Found, State, Strength, Verification
from workers.display import Display, open_display

ID_CHARS = 44
EVIDENCE_LINES = 6
NAMED_AT_MOST = 3  # number of tests that a line names
_COLUMNS: dict[State, int] = {"empty": 8, "useless": 9, "tests_only": 12, "gold": 8, "agent": 8}


class VerificationTable:
    """Shows the progress of verification: a row for each finished task, and the state that is being graded."""

    def __init__(self, display: Display, *, width: int) -> None:
        self._display = display
        self._width = width
        self._begun: set[str] = set()

    def begin(self, task_id: str, what: str, done: int, total: int) -> None:
        """Shows that this state of the task, or this partial fix, is now graded, after `done` of `total` steps of the task."""
        if task_id not in self._begun:
            self._begun.add(task_id)
            self._display.begin(task_id)
        self._display.advance(task_id, f"{what} ({done + 1} of {total})", done=done, total=total)

    def finish(self, verification: Verification, evidence: str) -> None:
        """Shows the finished task; `evidence` is the end of a log that shows what is wrong with it."""
        lines = [line for line in evidence.splitlines() if line.strip()][-EVIDENCE_LINES:]
        shown = [
            row(verification, self._width),
            *(Text(f"    | {visible_line(line)}", style="dim") for line in lines),
            *flag_rows(verification),
            *(strength_rows(verification.strength) if verification.strength else ()),
        ]
        self._display.finish(verification.task, shown, ok=verification.ok)


@contextmanager
def open_table(task_ids: Sequence[str]) -> Generator[VerificationTable]:
    """Opens a table of these tasks on standard output."""
    width = min(max((len(visible_line(one)) for one in task_ids), default=4), ID_CHARS)
    with open_display(sys.stdout, items="tasks", num_items=len(task_ids), heading=heading(width)) as display:
        yield VerificationTable(display, width=width)


def heading(width: int) -> str:
    states = "".join(name.rjust(room) for name, room in _COLUMNS.items())
    return f"{'task'.ljust(width)}{states}{'controls':>10}{'s':>8}{'agent s':>9}"


def row(verification: Verification, width: int) -> Text:
    """One task in one line, with the reason at its end if it is not ok."""
    text = Text(visible_line(verification.task)[-width:].ljust(width))
    for state, room in _COLUMNS.items():
        found = verification.states[state]
        cell = "broken" if found == "infrastructure" else str(found)
        text.append(cell.rjust(room), _style(state, found))
    text.append(_controls(verification).rjust(10))
    text.append(f"{verification.seconds:8.1f}{verification.agent_s:9.1f}  ")
    reason = "ok" if verification.ok else visible_line(verification.reason)
    text.append(reason, "green" if verification.ok else "red")
    if verification.num_uncontrolled:
        num, total = verification.num_uncontrolled, verification.num_needing_fix
        text.append(
            f"; {verification.control}: no control for {num} of {total} tests that need the fix", "yellow"
        )
    if verification.warning:
        text.append(f"; {visible_line(verification.warning)}", "yellow")
    return text


def _controls(verification: Verification) -> str:
    """The number of tests that can be made to fail, and of all tests."""
    return f"{verification.num_controlled}/{verification.num_tests}" if verification.num_tests else "-"


def flag_rows(verification: Verification) -> list[Text]:
    """The tests whose pass proves little, because a patch may change them or their expected values."""
    flagged = {
        "are in files that a patch may change": verification.in_fix,
        "take cases, references or data from the package under test": verification.from_package,
    }
    return [
        Text(f"    tests that {what} ({len(names)}): {_few(names)}", "yellow")
        for what, names in flagged.items()
        if names
    ]


def strength_rows(strength: Strength) -> list[Text]:
    """The weakness of a task with its interval, and the partial fixes that its tests let pass."""
    if strength.weakness is None:
        return [Text("    weakness not known: no partial fix could be made of the known fix", style="dim")]
    num, (low, high) = strength.num_partial_fixes, strength.interval
    fixes = "1 partial fix" if num == 1 else f"{num} partial fixes"
    weakness = f"    weakness {strength.weakness:.2f} ({low:.2f} to {high:.2f}, {fixes})"
    return [
        Text(f"{weakness}, of which pass:", "yellow") if strength.passing else Text(weakness, "dim"),
        *(Text(f"    | {visible_line(one)}", style="dim") for one in strength.passing),
    ]


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"{', '.join(map(visible_line, names[:NAMED_AT_MOST]))}{more}"


def _style(state: State, found: Found) -> str:
    if found == "infrastructure":
        return "yellow"
    return "" if found == EXPECTED[state] else "bold red"
