"""What a person sees while tasks are verified: a line per task as it is done, and on a terminal what is under way."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from pipeline.taskfile import EXPECTED, Found, State, Verification

ID_CHARS = 44
EVIDENCE_LINES = 6
SHOWN_RUNNING = 8
_COLUMNS: dict[State, int] = {"empty": 8, "useless": 9, "tests_only": 12, "gold": 8}


class Display(Protocol):
    """A context manager round the verification of `num_tasks` tasks."""

    def begin(self, task_id: str, state: State) -> None:
        """This state of the task is now before the grader."""
        ...

    def finish(self, verification: Verification, evidence: str) -> None:
        """The task is done; `evidence` is the end of a log that shows what is wrong with it."""
        ...

    def say(self, text: str) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_display(stream: TextIO, task_ids: Sequence[str]) -> Display:
    """The fitting kind for where `stream` leads."""
    width = min(max((len(one) for one in task_ids), default=4), ID_CHARS)
    if stream.isatty():
        return Screen(stream, num_tasks=len(task_ids), width=width)
    return Lines(stream, width=width)


class Lines(AbstractContextManager["Lines", None]):
    """For files and pipes."""

    def __init__(self, stream: TextIO, *, width: int) -> None:
        self._stream = stream
        self._width = width

    def begin(self, task_id: str, state: State) -> None:
        return

    def finish(self, verification: Verification, evidence: str) -> None:
        self.say(row(verification, self._width).plain)
        for line in _end(evidence):
            self.say(f"    | {line}")

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def __enter__(self) -> Self:
        self.say(heading(self._width))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()


class Screen(AbstractContextManager["Screen", None]):
    """For a terminal: what is under way stays at the bottom, what is done scrolls above."""

    def __init__(self, stream: TextIO, *, num_tasks: int, width: int) -> None:
        self._console = Console(file=stream, highlight=False)
        self._num_tasks = num_tasks
        self._width = width
        self._running: dict[str, tuple[State, float]] = {}
        self._done = 0
        self._wrong = 0
        self._began_at = time.monotonic()
        self._spinner = Spinner("dots")
        self._live = Live(
            get_renderable=self._picture, console=self._console, refresh_per_second=4, transient=True
        )

    def begin(self, task_id: str, state: State) -> None:
        began_at = self._running.get(task_id, (state, time.monotonic()))[1]
        self._running[task_id] = (state, began_at)

    def finish(self, verification: Verification, evidence: str) -> None:
        self._running.pop(verification.task, None)
        self._done += 1
        self._wrong += not verification.ok
        self._console.print(row(verification, self._width))
        for line in _end(evidence):
            self._console.print(Text(f"    | {line}", style="dim"))

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def _picture(self) -> Group:
        now = time.monotonic()
        lines = [
            Text(f"  {name[: self._width].ljust(self._width)}  {state}, {now - began_at:.0f} s", style="dim")
            for name, (state, began_at) in list(self._running.items())[:SHOWN_RUNNING]
        ]
        more = len(self._running) - SHOWN_RUNNING
        lines += [Text(f"  and {more} more", style="dim")] if more > 0 else []
        wrong = f", {self._wrong} not ok" if self._wrong else ""
        self._spinner.update(
            text=f"{self._done} of {self._num_tasks} tasks{wrong}, {now - self._began_at:.0f} s"
        )
        return Group(*lines, self._spinner)

    def __enter__(self) -> Self:
        self._console.print(Text(heading(self._width), style="bold"))
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def heading(width: int) -> str:
    states = "".join(name.rjust(room) for name, room in _COLUMNS.items())
    return f"{'task'.ljust(width)}{states}{'s':>8}"


def row(verification: Verification, width: int) -> Text:
    """One task in one line; the reason, if there is one, at its end."""
    text = Text(verification.task[-width:].ljust(width))
    for state, room in _COLUMNS.items():
        found = verification.states[state]
        cell = "broken" if found == "infrastructure" else str(found)
        text.append(cell.rjust(room), _style(state, found))
    text.append(f"{verification.seconds:8.1f}  ")
    text.append("ok" if verification.ok else verification.reason, "green" if verification.ok else "red")
    if verification.warning:
        text.append(f"; {verification.warning}", "yellow")
    return text


def _style(state: State, found: Found) -> str:
    if found == "infrastructure":
        return "yellow"
    return "" if found == EXPECTED[state] else "bold red"


def _end(evidence: str) -> list[str]:
    return [line for line in evidence.splitlines() if line.strip()][-EVIDENCE_LINES:]
