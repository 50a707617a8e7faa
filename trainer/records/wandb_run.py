"""A sink that shows the numbers of a run, and a table of its rollouts, in Weights & Biases.

A resumed run continues the same W&B run. Steps that are taken again are logged again, at the same value of `step`.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
import wandb

from pipeline.journal.rows import EpisodeRow, Row, StepRow
from trainer.recipe import WandbRecipe
from trainer.records.points import points

COLUMNS = (
    *("request_id", "task_id", "purpose", "fate", "outcome", "reward", "num_turns", "sampled_tokens"),
    *("version_first", "version_last", "enqueued_at", "finished_at", "control"),
)


class WandbRun:
    """A sink that is opened, used and closed in the same thread."""

    def __init__(self, recipe: WandbRecipe, directory: Path, run_id: str, config: dict[str, Any]) -> None:
        """Opens the run. Raises wandb's errors, for example if nobody is logged in."""
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
        rows = [[msgspec.structs.asdict(row)[column] for column in COLUMNS] for row in self._episodes]
        self._episodes.clear()
        self._run.log({"rollouts": wandb.Table(columns=list(COLUMNS), data=rows)})
