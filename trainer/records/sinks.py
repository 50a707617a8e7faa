"""The receivers of a run's rows: first the journal, then every sink.

A sink shows rows to people while the run continues: the console, the metrics of the process, and the sinks of the recipe's `[sinks]`.
Nothing is read back from a sink. To add one, write a class with `show`, which takes the numbers and their names from `points.py`, and add
one line to `open_sinks`.

Sinks whose server may block or fail run in a separate thread, so that training never waits for them: MLflow, Weights & Biases, and a URL
that gets alarms, one JSON object each. A resumed run continues the same run of MLflow or W&B. Steps that are taken again are logged again,
at the same step. Their packages need not be installed, and are imported only where they are used.
"""

import contextlib
import functools
import http.client
import importlib.util
import logging
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

from pipeline.journal.rows import AlarmRow, EpisodeRow, Row, StepRow
from pipeline.settings import telemetry_settings
from pipeline.telemetry import meter
from trainer.learner import directories
from trainer.recipe import AnyRecipe, ImitationRecipe, MlflowRecipe, WandbRecipe
from trainer.records.alarms import Alarms
from trainer.records.journal_writer import Journal
from trainer.records.points import Board, Meters, MetricsFile, points
from trainer.records.traces import TraceSink

log = logging.getLogger("swerve.trainer")

MAX_WAITING_ROWS = 10_000
CLOSE_S = 60.0
_RUN_TAG = "swerve.run_id"
_MAX_PARAM_CHARS = 6000
_MAX_PARAMS = 100  # number of parameters that one call of MLflow may log
_COLUMNS = (
    *("request_id", "task_id", "purpose", "fate", "outcome", "reward", "num_turns", "sampled_tokens"),
    *("version_first", "version_last", "enqueued_at", "finished_at", "control"),
)

METRICS_FILE = "metrics.jsonl"


class _ClosableSink(Protocol):
    """A sink that is opened, used and closed in the same thread."""

    def show(self, row: Row) -> None: ...

    def close(self) -> None: ...


class InBackground(AbstractContextManager["InBackground", None]):
    """Shows rows in a thread. If opening or showing fails, it reports that once and shows nothing more."""

    def __init__(self, name: str, open_sink: Callable[[], _ClosableSink]) -> None:
        self._name = name
        self._open_sink = open_sink
        self._rows: queue.Queue[Row | None] = queue.Queue(MAX_WAITING_ROWS)
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def show(self, row: Row) -> None:
        """Returns at once. If more than MAX_WAITING_ROWS rows wait because of a slow server, the sink ends."""
        if self._has_failed:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._fail("it does not keep up with the run")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shows the waiting rows, for CLOSE_S at most."""
        if not self._has_failed:
            self._rows.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("%s did not take everything within %.0f s", self._name, CLOSE_S)

    def _run(self) -> None:
        try:
            sink = self._open_sink()
            try:
                while not self._has_failed and (row := self._rows.get()) is not None:
                    sink.show(row)
            finally:
                sink.close()
        except Exception as error:  # an error of a library or a server may not end the run
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self._has_failed = True
        log.warning("%s shows nothing more of this run: %s", self._name, why)


TIMEOUT_S = 10.0
RETRY_S = 1.0
NUM_TRIES = 2


class Webhook(AbstractContextManager["Webhook", None]):
    """Posts alarms that begin or end; other rows are ignored. Training never waits for it."""

    def __init__(self, run_id: str, url: str) -> None:
        self._sender = InBackground("the alarms' webhook", lambda: _Sender(run_id, url))

    def show(self, row: Row) -> None:
        if isinstance(row, AlarmRow):
            self._sender.show(row)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sender.__exit__(kind, error, trace)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST becomes a GET without a body, so a redirect counts as a failure."""

    def redirect_request(self, *_: object) -> None:
        return None


class _Sender:
    """Logs only the first of several failures in a row, without the URL, which may be a secret."""

    def __init__(self, run_id: str, url: str) -> None:
        self._run_id = run_id
        self._url = url
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._is_failing = False

    def show(self, row: Row) -> None:
        assert isinstance(row, AlarmRow)
        body = msgspec.json.encode(
            {
                "run": self._run_id,
                "alarm": row.kind,
                "subject": row.subject,
                "state": "over" if row.is_over else "begun",
                "step": row.step,
                "at": row.at,
                "text": f"{self._run_id}, step {row.step}: {row.sentence}",
            }
        )
        failure = self._post(body)
        for _ in range(NUM_TRIES - 1):
            if failure:
                time.sleep(RETRY_S)
                failure = self._post(body)
        if failure and not self._is_failing:
            log.warning("the alarms' webhook does not take alarms: %s", failure)
        self._is_failing = bool(failure)

    def close(self) -> None: ...

    def _post(self, body: bytes) -> str:
        """The reason of a failure; empty if the server accepted the body."""
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=TIMEOUT_S):
                return ""
        except urllib.error.HTTPError as error:
            error.close()
            return f"status {error.code} {http.client.responses.get(error.code, '')}".strip()
        except urllib.error.URLError as error:
            return f"{error.reason}"
        # The connection failed in the middle of a response.
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__


class MlflowRun:
    """Shows the numbers of a run in MLflow. It is opened, used and closed in the same thread."""

    def __init__(
        self, recipe: MlflowRecipe, directory: Path, run_id: str, config: Mapping[str, object]
    ) -> None:
        """Opens the run. Raises mlflow's errors, for example if the server does not answer."""
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=recipe.tracking_uri or default_uri(directory))
        self._run_id = self._find(recipe.experiment, run_id) or self._create(
            recipe.experiment, run_id, config
        )

    def show(self, row: Row) -> None:
        from mlflow.entities import Metric

        for point in points(row):
            at_ms = int(point.at * 1000)
            metrics = [Metric(name, value, at_ms, point.step) for name, value in point.values.items()]
            self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _find(self, experiment: str, run_id: str) -> str | None:
        """The MLflow run of an earlier process of this run, opened again; None if there is none."""
        known = self._client.get_experiment_by_name(experiment)
        if known is None:
            return None
        runs = self._client.search_runs([known.experiment_id], f"tags.`{_RUN_TAG}` = '{run_id}'")
        if not runs:
            return None
        found = str(runs[0].info.run_id)
        self._client.update_run(found, status="RUNNING")
        return found

    def _create(self, experiment: str, run_id: str, config: Mapping[str, object]) -> str:
        from mlflow.entities import Param

        known = self._client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known else self._client.create_experiment(experiment)
        run = self._client.create_run(experiment_id, run_name=run_id, tags={_RUN_TAG: run_id})
        params = [Param(name, str(value)[:_MAX_PARAM_CHARS]) for name, value in _flat(config)]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(run.info.run_id, params=params[first : first + _MAX_PARAMS])
        return str(run.info.run_id)


def default_uri(directory: Path) -> str:
    """A database in the run's directory, for `mlflow ui --backend-store-uri`."""
    return f"sqlite:///{directory / 'mlflow.db'}"


def _flat(config: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in config.items():
        key = f"{prefix}{name}"
        found += _flat(value, f"{key}.") if isinstance(value, Mapping) else [(key, value)]
    return found


class WandbRun:
    """Shows the numbers of a run, and a table of its rollouts, in W&B. It is opened, used and closed in the same thread."""

    def __init__(self, recipe: WandbRecipe, directory: Path, run_id: str, config: dict[str, Any]) -> None:
        """Opens the run. Raises wandb's errors, for example if nobody is logged in."""
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._run = wandb.init(
            project=recipe.project,
            entity=recipe.entity or None,
            tags=list(recipe.tags),
            mode=recipe.mode,
            id=run_id,
            name=run_id,
            resume="allow",
            dir=directory,
            config=config,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._episodes: list[EpisodeRow] = []

    def show(self, row: Row) -> None:
        """Sends numbers at once, and with each step the rollouts that were settled since the step before."""
        if isinstance(row, EpisodeRow):
            self._episodes.append(row)
        for point in points(row):
            self._run.log({**point.values, "step": point.step, "at": point.at})
        if isinstance(row, StepRow):
            self._show_episodes()

    def close(self) -> None:
        self._show_episodes()
        self._run.finish()

    def _show_episodes(self) -> None:
        if not self._episodes:
            return
        import wandb

        rows = [[msgspec.structs.asdict(row)[column] for column in _COLUMNS] for row in self._episodes]
        self._episodes.clear()
        self._run.log({"rollouts": wandb.Table(columns=list(_COLUMNS), data=rows)})


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


def _wandb(recipe: WandbRecipe, run: RunFacts) -> _ClosableSink:
    return WandbRun(recipe, run.directory, run.run_id, msgspec.to_builtins(run.recipe))


def _mlflow(recipe: MlflowRecipe, run: RunFacts) -> _ClosableSink:
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
