"""A sink that shows the numbers of a run in MLflow.

A resumed run continues the same MLflow run. Steps that are taken again are logged again, at the same step.
"""

from collections.abc import Mapping
from pathlib import Path

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from pipeline.journal.rows import Row
from trainer.recipe import MlflowRecipe
from trainer.records.points import points

RUN_TAG = "swerve.run_id"
MAX_PARAM_CHARS = 6000
MAX_PARAMS = 100  # number of parameters that one call may log


class MlflowRun:
    """A sink that is opened, used and closed in the same thread."""

    def __init__(
        self, recipe: MlflowRecipe, directory: Path, run_id: str, config: Mapping[str, object]
    ) -> None:
        """Opens the run. Raises mlflow's errors, for example if the server does not answer."""
        self._client = MlflowClient(tracking_uri=recipe.tracking_uri or default_uri(directory))
        self._run_id = self._find(recipe.experiment, run_id) or self._create(
            recipe.experiment, run_id, config
        )

    def show(self, row: Row) -> None:
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
        runs = self._client.search_runs([known.experiment_id], f"tags.`{RUN_TAG}` = '{run_id}'")
        if not runs:
            return None
        found = str(runs[0].info.run_id)
        self._client.update_run(found, status="RUNNING")
        return found

    def _create(self, experiment: str, run_id: str, config: Mapping[str, object]) -> str:
        known = self._client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known else self._client.create_experiment(experiment)
        run = self._client.create_run(experiment_id, run_name=run_id, tags={RUN_TAG: run_id})
        params = [Param(name, str(value)[:MAX_PARAM_CHARS]) for name, value in _flat(config)]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(run.info.run_id, params=params[first : first + MAX_PARAMS])
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
