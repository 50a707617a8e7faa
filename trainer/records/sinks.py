"""The receivers of a run's rows: first the journal, then every sink.

A sink shows rows to people while the run continues: the console, the metrics of the process, and the sinks of the recipe's `[sinks]`.
Nothing is read back from a sink. To add one, write a class with `show` in a file of its own, which takes the numbers and their names from
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

from pipeline.journal.rows import Row
from pipeline.metrics import meter
from pipeline.settings import telemetry_settings
from trainer.learner import directories
from trainer.recipe import AnyRecipe, ImitationRecipe, MlflowRecipe, WandbRecipe
from trainer.records.alarms import Alarms
from trainer.records.background import ClosableSink, InBackground, MlflowRun, WandbRun, Webhook
from trainer.records.journal_writer import Journal
from trainer.records.points import Board, Meters, MetricsFile
from trainer.records.traces import TraceSink

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """Shows the rows that it knows (StepRow, EvaluationRow, PublicationRow, EndRow, ...) and ignores the others.

    `show` is called on the trainer's event loop and must return at once: a sink for a server sends from a separate thread, and handles that
    server's failures itself.
    """

    def show(self, row: Row) -> None: ...


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts about its run that a sink may need."""

    run_id: str
    directory: Path
    recipe: AnyRecipe
    # The first step of this process, if it resumes a run: later steps are taken again.
    resumed_at: int | None = None


def check_sinks(recipe: AnyRecipe) -> None:
    """Raises ValueError for a sink whose package is missing, and for a webhook without its URL."""
    if recipe.sinks.wandb.project:
        _require("wandb", "sinks.wandb", "pip install wandb")
    if recipe.sinks.mlflow.experiment:
        _require("mlflow", "sinks.mlflow", "pip install mlflow-skinny sqlalchemy alembic")
    if variable := _webhook_variable(recipe):
        _webhook_url(variable)


@contextlib.contextmanager
def open_sinks(run: RunFacts, console: Sink) -> Iterator[list[Sink]]:
    """The sinks of a run; closed afterwards, except for the console, which belongs to the caller.

    Raises ValueError like `check_sinks`.
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
        if variable := _webhook_variable(run.recipe):
            found.append(stack.enter_context(Webhook(run.run_id, _webhook_url(variable))))
        yield found


def _require(package: str, key: str, fix: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{key}: the package {package} is not installed: {fix}, or remove the table")


def _webhook_variable(recipe: AnyRecipe) -> str:
    """The environment variable of the webhook; empty if there is none."""
    return "" if isinstance(recipe, ImitationRecipe) else recipe.alarms.webhook_env


def _webhook_url(variable: str) -> str:
    """The URL of the webhook. No error contains it, because it may be a secret."""
    url = os.environ.get(variable, "")
    if not url.startswith(("http://", "https://")):
        fault = "holds no URL" if url else "is not set"
        raise ValueError(
            f"alarms.webhook_env: the environment variable {variable} {fault}: give it one that begins with https:// or http://, "
            "or remove the key"
        )
    return url


def _wandb(recipe: WandbRecipe, run: RunFacts) -> ClosableSink:
    return WandbRun(recipe, run.directory, run.run_id, msgspec.to_builtins(run.recipe))


def _mlflow(recipe: MlflowRecipe, run: RunFacts) -> ClosableSink:
    return MlflowRun(recipe, run.directory, run.run_id, msgspec.to_builtins(run.recipe))


class Records:
    """Appends rows to the journal and forwards them to the sinks, followed by the alarms that they cause. None: the run has no alarms."""

    def __init__(self, journal: Journal, sinks: Sequence[Sink], alarms: Alarms | None) -> None:
        self._journal = journal
        self._sinks = sinks
        self._alarms = alarms

    def append(self, row: Row) -> None:
        """Writes one row; then the sinks get it in its written form. Alarms that begin or end because of it come afterwards."""
        written = self._journal.append(row)
        with directories.writing(self._journal.directory):  # some sinks write into the same directory
            for sink in self._sinks:
                sink.show(written)
        for alarm in self._alarms.observe(written) if self._alarms else ():
            self.append(alarm)

    def checkpoint(self) -> dict[str, int]:
        """Forces the journal to disk; returns the lengths of its files, for the checkpoint."""
        return self._journal.checkpoint()
