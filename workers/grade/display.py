"""What a person sees while patches are graded: a row for each patch that is done."""

import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from rich.text import Text

from pipeline.visible import visible_line
from workers.display import Display, open_display
from workers.grade.results import PredictionResult

ID_CHARS = 44
_COLUMNS = {"value": 16, "applied by": 18, "tests": 12, "control": 11, "s": 8}


class ResultTable:
    """Rows on a display."""

    def __init__(self, display: Display, *, width: int) -> None:
        self._display = display
        self._width = width

    def begin(self, task_id: str) -> None:
        """The patch of this task is now being graded."""
        self._display.begin(task_id, "grading")

    def finish(self, result: PredictionResult) -> None:
        """The patch is graded, or could not be."""
        self._display.finish(result.task, [row(result, self._width)], ok=result.value is not None)


@contextmanager
def open_table(task_ids: Sequence[str]) -> Generator[ResultTable]:
    """A table of the patches of these tasks on standard output."""
    width = min(max((len(visible_line(one)) for one in task_ids), default=4), ID_CHARS)
    heading = "task".ljust(width) + "".join(name.rjust(room) for name, room in _COLUMNS.items())
    with open_display(sys.stdout, items="patches", num_items=len(task_ids), heading=heading) as display:
        yield ResultTable(display, width=width)


def row(result: PredictionResult, width: int) -> Text:
    """One patch in one line, with what decided the verdict at its end."""
    value = "infrastructure" if result.value is None else f"{result.value:g}"
    cells = {
        "value": value,
        "applied by": result.applied_by or "-",
        "tests": _passed(result.tests),
        "control": result.control or "-",
        "s": f"{result.seconds:.1f}",
    }
    text = Text(visible_line(result.task)[-width:].ljust(width))
    for name, room in _COLUMNS.items():
        text.append(cells[name].rjust(room), "yellow" if cells[name] == "infrastructure" else "")
    why = visible_line(result.error if result.value is None else result.decided_by)
    text.append(f"  {why}", "yellow" if result.value is None else "green" if result.value else "")
    return text


def _passed(tests: Mapping[str, str]) -> str:
    """How many of the tests passed that decide the verdict."""
    return f"{sum(outcome == 'PASSED' for outcome in tests.values())}/{len(tests)}" if tests else "-"
