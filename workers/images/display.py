"""How pulls and builds are shown: bars on a terminal, a line when each ends anywhere else."""

import sys
import threading
from typing import Self, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from workers.images.outcome import Outcome
from workers.images.sizes import show_bytes

NAME_CHARS = 60


def line_of(outcome: Outcome) -> str:
    """`pulled   NAME  1.2 GB  34 s  by MIRROR/NAME`"""
    words = [f"{outcome.state:<8}", outcome.image]
    if outcome.size_bytes:
        words.append(show_bytes(outcome.size_bytes))
    if outcome.state != "present":
        words.append(f"{outcome.seconds:.1f} s")
    if outcome.via and outcome.via != outcome.image:
        words.append(f"by {outcome.via}")
    if outcome.reason:
        words.append(f"({outcome.reason})")
    return "  ".join(words)


class Lines:
    """One line an image, and one for each thing worth saying in between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
    def began(self, image: str) -> None: ...
    def progress(self, image: str, done_bytes: int, total_bytes: int) -> None: ...

    def says(self, image: str, text: str) -> None:
        self._print(f"{'...':<8}  {image}  {text}")

    def ended(self, outcome: Outcome) -> None:
        self._print(line_of(outcome))

    def _print(self, line: str) -> None:
        with self._one_at_a_time:
            print(line, file=self._stream, flush=True)


class Bars:
    """A bar for each image that is under way, its line once it has ended, and a bar for all of them."""

    def __init__(self, num_images: int, stream: TextIO) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[says]}"),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=Console(file=stream), transient=True)
        self._all = self._bars.add_task("all images", total=num_images, says=f"0 of {num_images}")
        self._num_images, self._num_ended = num_images, 0
        self._under_way: dict[str, TaskID] = {}
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def began(self, image: str) -> None:
        shown = image if len(image) <= NAME_CHARS else f"…{image[-NAME_CHARS + 1 :]}"
        self._under_way[image] = self._bars.add_task(escape(shown), total=None, says="")

    def progress(self, image: str, done_bytes: int, total_bytes: int) -> None:
        says = f"{show_bytes(done_bytes)} of {show_bytes(total_bytes)}"
        self._bars.update(self._under_way[image], completed=done_bytes, total=total_bytes, says=says)

    def says(self, image: str, text: str) -> None:
        self._bars.update(self._under_way[image], says=escape(text[:NAME_CHARS]))

    def ended(self, outcome: Outcome) -> None:
        self._bars.remove_task(self._under_way.pop(outcome.image))
        self._bars.console.print(line_of(outcome), markup=False, highlight=False, soft_wrap=True)
        with self._one_at_a_time:
            self._num_ended += 1
            says = f"{self._num_ended} of {self._num_images}"
            self._bars.update(self._all, completed=self._num_ended, says=says)


def watching(num_images: int, *, plain: bool) -> "Lines | Bars":
    """On standard error, so that results alone are on standard output."""
    return Lines(sys.stderr) if plain or not sys.stderr.isatty() else Bars(num_images, sys.stderr)
