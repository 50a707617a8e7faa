"""Shows work on a list of items: a line for each finished item and, on a terminal, a bar for each current one.

Every command of workers that processes a list uses this display: pulling and building images, verifying tasks. Items, notes and lines
come from data sets and logs; the display makes their control characters visible.
"""

import threading
import time
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from pipeline.rich_console import VisibleConsole
from pipeline.screen import visible_line

NAME_CHARS = 60
QUIET_S = 10.0  # pause between lines about current work, where there are no bars


class Display(Protocol):
    """A context manager for the work. Its methods may be called from several threads."""

    def begin(self, item: str, note: str = "") -> None:
        """Work on `item` has begun, or continues with another step, which `note` names."""
        ...

    def advance(self, item: str, note: str, *, done: float, total: float) -> None:
        """`done` of `total` units of the work on `item` are done; `note` describes that."""
        ...

    def remark(self, item: str, text: str) -> None:
        """Something about `item` that a person should know now."""
        ...

    def finish(self, item: str, lines: list[Text], *, ok: bool) -> None:
        """Work on `item` has ended; `lines` stay."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_display(
    stream: TextIO, *, items: str, num_items: int, heading: str = "", plain: bool = False
) -> Display:
    """A display for `num_items` of `items` ("images"), with bars if `stream` is a terminal, unless `plain`."""
    if plain or not stream.isatty():
        return PlainDisplay(stream, heading=heading)
    return TerminalDisplay(stream, items=items, num_items=num_items, heading=heading)


class PlainDisplay:
    """The display for files and pipes: lines only. Current items are listed once in QUIET_S at most."""

    def __init__(self, stream: TextIO, *, heading: str = "") -> None:
        self._stream = stream
        self._heading = heading
        self._one_at_a_time = threading.Lock()
        self._said_at = time.monotonic()

    def begin(self, item: str, note: str = "") -> None: ...

    def advance(self, item: str, note: str, *, done: float, total: float) -> None:
        if time.monotonic() - self._said_at >= QUIET_S:
            self.remark(item, note)

    def remark(self, item: str, text: str) -> None:
        self._print(f"{'...':<8}  {item}  {text}")

    def finish(self, item: str, lines: list[Text], *, ok: bool) -> None:
        self._print(*(line.plain for line in lines))

    def _print(self, *lines: str) -> None:
        with self._one_at_a_time:
            print(*map(visible_line, lines), sep="\n", file=self._stream, flush=True)
            self._said_at = time.monotonic()

    def __enter__(self) -> Self:
        if self._heading:
            self._print(self._heading)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class TerminalDisplay:
    """The display for a terminal: finished lines scroll above a bar for all items and a bar for each current item."""

    def __init__(self, stream: TextIO, *, items: str, num_items: int, heading: str = "") -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=VisibleConsole(stream, highlight=False), transient=True)
        self._heading = heading
        self._num_items, self._num_done, self._num_not_ok = num_items, 0, 0
        self._all = self._bars.add_task(f"all {items}", total=num_items, note=f"0 of {num_items}")
        self._under_way: dict[str, TaskID] = {}
        self._one_at_a_time = threading.Lock()

    def begin(self, item: str, note: str = "") -> None:
        with self._one_at_a_time:
            if item not in self._under_way:
                name = visible_line(item)
                shown = name if len(name) <= NAME_CHARS else f"…{name[-NAME_CHARS + 1 :]}"
                self._under_way[item] = self._bars.add_task(escape(shown), total=None, note="")
        self.remark(item, note)

    def advance(self, item: str, note: str, *, done: float, total: float) -> None:
        self._bars.update(self._under_way[item], completed=done, total=total, note=_note(note))

    def remark(self, item: str, text: str) -> None:
        self._bars.update(self._under_way[item], note=_note(text[:NAME_CHARS]))

    def finish(self, item: str, lines: list[Text], *, ok: bool) -> None:
        with self._one_at_a_time:
            self._bars.remove_task(self._under_way.pop(item))
            for line in lines:
                self._bars.console.print(_visible(line), soft_wrap=True)
            self._num_done += 1
            self._num_not_ok += not ok
            not_ok = f", {self._num_not_ok} not ok" if self._num_not_ok else ""
            note = f"{self._num_done} of {self._num_items}{not_ok}"
            self._bars.update(self._all, completed=self._num_done, note=note)

    def __enter__(self) -> Self:
        if self._heading:
            self._bars.console.print(Text(visible_line(self._heading), style="bold"), soft_wrap=True)
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def _note(text: str) -> str:
    return escape(visible_line(text))


def _visible(line: Text) -> Text:
    """The line as it is, or without its colours if it contains something that has to be made visible."""
    shown = visible_line(line.plain)
    return line if shown == line.plain else Text(shown)
