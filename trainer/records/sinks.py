"""Where the rows of a run go: the journal first, then every sink.

A sink shows rows to people while the run goes on: the console, the metrics of the process, and what the recipe's `[sinks]` names. Nothing
is read back from a sink. To add one, write a class with `show` in a file of its own, which takes the numbers and their names from
`points.py`, and add one line to `open_sinks`.
"""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from pipeline.metrics import meter
from pipeline.settings import telemetry_settings
from trainer.recipe import MlflowRecipe, Recipe, WandbRecipe
from trainer.records.alarms import Alarms
from trainer.records.background import ClosableSink, InBackground
from trainer.records.journal import Journal
from trainer.records.meters import Meters
from trainer.records.metrics_file import MetricsFile
from trainer.records.row import Row
from trainer.records.tensorboard import Board
from trainer.records.traces import TraceSink
from trainer.records.webhook import Webhook

METRICS_FILE = "metrics.jsonl"


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


def check_sinks(recipe: Recipe) -> None:
    """Raises ValueError for a sink whose package is missing, and for a webhook without its URL."""
    if recipe.sinks.wandb.project:
        _require("wandb", "sinks.wandb", "pip install wandb")
    if recipe.sinks.mlflow.experiment:
        _require("mlflow", "sinks.mlflow", "pip install mlflow-skinny sqlalchemy alembic")
    if recipe.alarms.webhook_env:
        _webhook_url(recipe.alarms.webhook_env)


@contextlib.contextmanager
def open_sinks(run: RunFacts, console: Sink) -> Iterator[list[Sink]]:
    """The sinks of a run; closed afterwards, except for the console, which belongs to the caller.

    Raises ValueError as `check_sinks`.
    """
    check_sinks(run.recipe)
    chosen, resumed_at = run.recipe.sinks, run.resumed_at
    with contextlib.ExitStack() as stack:
        found: list[Sink] = [console, Meters(meter())]
        if chosen.tensorboard:
            found.append(stack.enter_context(Board(run.directory / "board", resumed_at=resumed_at)))
        if chosen.jsonl:
            path = run.directory / METRICS_FILE
            found.append(stack.enter_context(MetricsFile(path, resumed_at=resumed_at)))
        if chosen.wandb.project:
            opening = functools.partial(_wandb, chosen.wandb, run)
            found.append(stack.enter_context(InBackground("Weights & Biases", opening)))
        if chosen.mlflow.experiment:
            opening = functools.partial(_mlflow, chosen.mlflow, run)
            found.append(stack.enter_context(InBackground("MLflow", opening)))
        if telemetry_settings().is_tracing:
            found.append(stack.enter_context(InBackground("traces", lambda: TraceSink(run.run_id))))
        if variable := run.recipe.alarms.webhook_env:
            found.append(stack.enter_context(Webhook(run.run_id, _webhook_url(variable))))
        yield found


def _require(package: str, key: str, fix: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{key}: the package {package} is not installed: {fix}, or remove the table")


def _webhook_url(variable: str) -> str:
    """Never named in an error, because it may be a secret."""
    url = os.environ.get(variable, "")
    if not url.startswith(("http://", "https://")):
        fault = "holds no URL" if url else "is not set"
        raise ValueError(
            f"alarms.webhook_env: the environment variable {variable} {fault}: give it one that begins with https:// or http://, "
            "or remove the key"
        )
    return url


def _wandb(recipe: WandbRecipe, run: RunFacts) -> ClosableSink:
    from trainer.records.wandb_run import WandbRun  # takes a second and a package that few have

    return WandbRun(recipe, run.directory, run.run_id, msgspec.to_builtins(run.recipe))


def _mlflow(recipe: MlflowRecipe, run: RunFacts) -> ClosableSink:
    from trainer.records.mlflow_run import MlflowRun

    return MlflowRun(recipe, run.directory, run.run_id, msgspec.to_builtins(run.recipe))


class Records:
    """Appends rows to the journal and forwards them to the sinks, with the alarms that they bring about."""

    def __init__(self, journal: Journal, sinks: Sequence[Sink], alarms: Alarms) -> None:
        self._journal = journal
        self._sinks = sinks
        self._alarms = alarms

    def append(self, row: Row) -> None:
        """Write one row; the sinks see it as it was written, after it was. Alarms that begin or end by it come after it."""
        written = self._journal.append(row)
        for sink in self._sinks:
            sink.show(written)
        for alarm in self._alarms.observe(written):
            self.append(alarm)

    def checkpoint(self) -> dict[str, int]:
        """As the journal's."""
        return self._journal.checkpoint()
