"""The console of a run: one row per step, and a sentence about what the trainer does at the moment.

On a terminal the rows are a table that stays in place. Elsewhere there is one line per event, and after HEARTBEAT_S without one, a line
with the current sentence.
"""

import contextlib
import io
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Group
from rich.live import Live
from rich.logging import RichHandler
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pipeline.journal.rows import (
    AlarmRow,
    EpisodeRow,
    EvaluationRow,
    HeldoutLossRow,
    ImitationStepRow,
    Row,
    StepRow,
)
from pipeline.rich_console import VisibleConsole
from pipeline.screen import one_line
from trainer.records.source_tally import SourceTally

HEARTBEAT_S = 10.0
SHOWN_STEPS = 14
SMOOTHED_STEPS = 10

COLUMNS = ("step", "reward", "mean10", "groups", "lag", "gap", "loss", "grad", "tokens", "wait s", "train s")
"""The columns, which together fit into 80 characters."""

IMITATION_COLUMNS = ("step", "epoch", "loss", "grad", "lr", "rows", "tokens", "tokens/s", "train s")
"""The columns of supervised fine-tuning."""

LEGEND = "mean10: of 10 steps   groups: trained/dropped   lag: versions, mean/max   gap: nats, mean/max"


class Console(Protocol):
    """A context manager, and a sink of the run's rows. Every method may be called at any time."""

    def say(self, text: str) -> None:
        """Print one event."""
        ...

    def show(self, row: Row) -> None:
        """Print a step, an evaluation, a held-out loss or an alarm; other rows are ignored."""
        ...

    def recall(self, row: StepRow | ImitationStepRow | EpisodeRow) -> None:
        """Adds a step of an earlier process to the smoothed reward and to the table, or one of its episodes to those of its source."""
        ...

    def beat(self, sentence: str) -> None:
        """Shows what the trainer is doing; call this every second or so."""
        ...

    def log_handler(self) -> logging.Handler: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_console(stream: TextIO) -> Console:
    """A table for a terminal, lines for a file or a pipe."""
    return TableConsole(stream) if stream.isatty() else LineConsole(stream)


class Smoothing:
    """The mean of the last SMOOTHED_STEPS rewards."""

    def __init__(self) -> None:
        self._rewards: deque[float] = deque(maxlen=SMOOTHED_STEPS)

    def add(self, reward: float) -> float:
        self._rewards.append(reward)
        return sum(self._rewards) / len(self._rewards)


class LineConsole(AbstractContextManager["LineConsole", None]):
    """The console for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._smoothing = Smoothing()
        self._sources = SourceTally()
        self._wrote_at = 0.0

    def say(self, text: str) -> None:
        self._wrote_at = time.monotonic()
        print(one_line(f"{time.strftime('%H:%M:%S')} {text}"), file=self._stream, flush=True)

    def show(self, row: Row) -> None:
        if isinstance(row, StepRow):
            self._say_cells(COLUMNS, cells_of(row, self._smoothing.add(row.reward_mean)))
            if row.judging:
                self.say(f"judge: {row.judging.sentence}")
            if row.distillation:
                self.say(f"teacher: {row.distillation.sentence}")
            if sources := self._sources.sentence:
                self.say(f"sources: {sources}")
        elif isinstance(row, EpisodeRow):
            self._sources.add(row)
        elif isinstance(row, ImitationStepRow):
            self._say_cells(IMITATION_COLUMNS, imitation_cells(row))
        elif isinstance(row, EvaluationRow):
            self.say(evaluation_sentence(row))
        elif isinstance(row, AlarmRow | HeldoutLossRow):
            self.say(row.sentence)

    def _say_cells(self, names: Sequence[str], cells: Sequence[str]) -> None:
        self.say("  ".join(f"{name} {cell}" for name, cell in zip(names, cells, strict=True)))

    def recall(self, row: StepRow | ImitationStepRow | EpisodeRow) -> None:
        if isinstance(row, StepRow):
            self._smoothing.add(row.reward_mean)
        elif isinstance(row, EpisodeRow):
            self._sources.add(row)

    def beat(self, sentence: str) -> None:
        if time.monotonic() - self._wrote_at >= HEARTBEAT_S:
            self.say(f"... {sentence}")

    def log_handler(self) -> logging.Handler:
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s", "%H:%M:%S"))
        return handler

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()


class TableConsole(AbstractContextManager["TableConsole", None]):
    """The console for terminals: the newest steps and the current sentence stay at the bottom, events scroll above them."""

    def __init__(self, stream: TextIO) -> None:
        self._console = VisibleConsole(stream)
        self._smoothing = Smoothing()
        self._sources = SourceTally()
        self._rows: deque[tuple[str, ...]] = deque(maxlen=SHOWN_STEPS)
        self._columns: Sequence[str] = COLUMNS
        self._notes: list[str] = []  # lines below the table
        self._spinner = Spinner("dots", "starting")
        self._live = Live(get_renderable=self._picture, console=self._console, refresh_per_second=4)

    def say(self, text: str) -> None:
        self._console.print(one_line(f"{time.strftime('%H:%M:%S')} {text}"), markup=False, highlight=False)

    def show(self, row: Row) -> None:
        if isinstance(row, StepRow):
            self._rows.append(cells_of(row, self._smoothing.add(row.reward_mean)))
            named = {
                "judge": row.judging and row.judging.sentence,
                "teacher": row.distillation and row.distillation.sentence,
                "sources": self._sources.sentence,
            }
            self._notes = [one_line(f"{name}: {sentence}") for name, sentence in named.items() if sentence]
        elif isinstance(row, EpisodeRow):
            self._sources.add(row)
        elif isinstance(row, ImitationStepRow):
            self._columns = IMITATION_COLUMNS
            self._rows.append(imitation_cells(row))
        elif isinstance(row, EvaluationRow):
            self.say(evaluation_sentence(row))
        elif isinstance(row, AlarmRow | HeldoutLossRow):
            self.say(row.sentence)

    def recall(self, row: StepRow | ImitationStepRow | EpisodeRow) -> None:
        self.show(row)

    def beat(self, sentence: str) -> None:
        self._spinner.update(text=Text(one_line(sentence)))  # plain text, not markup

    def log_handler(self) -> logging.Handler:
        return RichHandler(console=self._console, show_path=False, markup=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def _picture(self) -> Group:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for name in self._columns:
            table.add_column(name, justify="right", no_wrap=True)
        for cells in self._rows:
            table.add_row(*cells)
        if not self._rows:
            return Group(self._spinner)
        notes = map(Text, self._notes)
        legend = [Text(LEGEND, style="dim")] if self._columns == COLUMNS else []
        return Group(table, *notes, *legend, self._spinner)


class LogFile(io.TextIOBase):
    """A log, to which lines are appended. A line that cannot be written, because the disk is full, is dropped: a run does not depend on
    its log.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        self._file = path.open("ab", buffering=0)  # so that no line is left to be written at the end

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text.encode(errors="replace"))
        return len(text)

    def close(self) -> None:
        self._file.close()
        super().close()


class LoggedConsole(AbstractContextManager["LoggedConsole", None]):
    """A console on a screen that is open, and the same lines in a log."""

    def __init__(self, screen: Console, log: LineConsole) -> None:
        self._consoles = (screen, log)

    def say(self, text: str) -> None:
        for console in self._consoles:
            console.say(text)

    def show(self, row: Row) -> None:
        for console in self._consoles:
            console.show(row)

    def recall(self, row: StepRow | ImitationStepRow | EpisodeRow) -> None:
        for console in self._consoles:
            console.recall(row)

    def beat(self, sentence: str) -> None:
        for console in self._consoles:
            console.beat(sentence)

    def log_handler(self) -> logging.Handler:
        return self._consoles[0].log_handler()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Does nothing: whoever opened the two consoles closes them."""


def cells_of(row: StepRow, smoothed: float) -> tuple[str, ...]:
    """A step's row as text, in the order of COLUMNS."""
    dropped = row.groups_dropped_zero_variance + row.groups_dropped_invalid
    gap = f"{row.logprob_gap_mean:.0e}/{row.logprob_gap_max:.0e}" if row.is_gap_measured else "not measured"
    return (
        str(row.step),
        f"{row.reward_mean:.3f}",
        f"{smoothed:.3f}",
        f"{'?' if row.num_groups is None else row.num_groups}/{dropped}",
        f"{row.lag_mean:.1f}/{row.lag_max}",
        gap,
        f"{row.loss:+.3f}",
        f"{row.grad_norm:.2f}",
        str(row.num_trained_tokens),
        f"{row.wait_s:.1f}",
        f"{row.train_s:.1f}",
    )


def imitation_cells(row: ImitationStepRow) -> tuple[str, ...]:
    """A step's row as text, in the order of IMITATION_COLUMNS."""
    return (
        f"{row.step}/{row.num_steps}",
        str(row.epoch + 1),
        f"{row.loss:.4f}",
        f"{row.grad_norm:.2f}",
        f"{row.lr:.1e}",
        str(len(row.rows)),
        str(row.num_trained_tokens),
        f"{row.tokens_per_s:.0f}",
        f"{row.train_s:.1f}",
    )


def evaluation_sentence(row: EvaluationRow) -> str:
    """One evaluation as a sentence."""
    how = "greedy" if row.greedy else "sampled"
    lost = f", {row.num_failed} without a verdict left out" if row.num_failed else ""
    return (
        f"{row.name}{f' {row.tasks}' if row.tasks else ''} ({how}): weights v{row.version} solve "
        f"{row.estimate.percent()} of {row.num_episodes} episodes{lost}"
    )
