"""Where the rows of a run go: the journal first, then every sink.

A sink shows rows to people while the run goes on: the console and TensorBoard do, and Weights & Biases or MLflow would. Nothing is
read back from a sink. To add one, write a class with `show` in a file of its own, and add one line to `open_sinks`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.recipe import Recipe
from trainer.records.journal import Journal, Row
from trainer.records.tensorboard import Board


class Sink(Protocol):
    """Shows the rows that it knows (StepRow, EvaluationRow, PublicationRow, EndRow, ...) and ignores the others.

    `show` is called on the trainer's event loop and must return at once: a sink that talks to a server sends from a thread of
    its own, and keeps that server's failures to itself.
    """

    def show(self, row: Row) -> None: ...


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a sink may want to know of its run."""

    run_id: str
    directory: Path
    recipe: Recipe
    # The first step of this process, if it resumes a run: later steps are taken again.
    resumed_at: int | None = None


@contextlib.contextmanager
def open_sinks(run: RunFacts, console: Sink) -> Iterator[list[Sink]]:
    """The sinks of a run; closed afterwards, except for the console, which belongs to the caller."""
    with contextlib.ExitStack() as stack:
        yield [
            console,
            stack.enter_context(Board(run.directory / "board", resumed_at=run.resumed_at)),
        ]


class Records:
    """Appends rows to the journal and forwards them to the sinks."""

    def __init__(self, journal: Journal, sinks: Sequence[Sink]) -> None:
        self._journal = journal
        self._sinks = sinks

    def append(self, row: Row) -> None:
        """Write one row; the sinks see it as it was written, after it was."""
        written = self._journal.append(row)
        for sink in self._sinks:
            sink.show(written)
