"""The table `[sinks]` of a recipe: where the numbers of a run are shown besides the console."""

from collections.abc import Iterator
from typing import Literal

from trainer.recipe.table import Table


class WandbRecipe(Table, frozen=True, kw_only=True):
    """Weights & Biases; needs `pip install wandb`. What it sends is numbers, the recipe, and a table of rollouts without their text."""

    project: str = ""  # by default nothing is shown there
    entity: str = ""  # by default that of whoever is logged in
    mode: Literal["online", "offline"] = "online"  # offline: into the run's directory, for `wandb sync` later
    tags: tuple[str, ...] = ()  # labels of the run


class MlflowRecipe(Table, frozen=True, kw_only=True):
    """MLflow; needs `pip install mlflow-skinny sqlalchemy alembic`."""

    experiment: str = ""  # by default nothing is shown there
    tracking_uri: str = ""  # of the server; by default the file mlflow.db in the run's directory


class SinksRecipe(Table, frozen=True, kw_only=True):
    """Where the numbers of a run are shown besides the console, under the same names everywhere: [sinks.md](sinks.md)."""

    tensorboard: bool = True  # in the directory board of the run
    jsonl: bool = True  # in the file metrics.jsonl of the run, one line for each step, audit and evaluation
    wandb: WandbRecipe = WandbRecipe()
    mlflow: MlflowRecipe = MlflowRecipe()


def sink_faults(sinks: SinksRecipe) -> Iterator[str]:
    """What is wrong with the table, each with its key and the fix."""
    if not sinks.wandb.project and sinks.wandb != WandbRecipe():
        yield "sinks.wandb.project is missing; give the project, or remove the other keys of sinks.wandb"
    if not sinks.mlflow.experiment and sinks.mlflow.tracking_uri:
        yield "sinks.mlflow.experiment is missing; give the experiment, or remove sinks.mlflow.tracking_uri"
