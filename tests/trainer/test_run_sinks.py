"""A real run shows the same numbers in every sink, each read back through its own reader."""

from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import fleet
from pipeline.journal.reading import read
from pipeline.journal.rows import EvaluationRow
from tests.trainer.processes import recipe as recipe
from tests.trainer.processes import sets, start_anew, steps
from tests.trainer.records.test_all_sinks import in_file, in_mlflow, in_tensorboard, in_wandb

# MLflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

WISHES = sets(
    "num_steps=3",
    "evaluation.episodes=2",
    "evaluation.greedy_episodes=2",
    "audit.share=1.0",
    'sinks.wandb.project="swerve"',
    'sinks.wandb.mode="offline"',
    'sinks.mlflow.experiment="swerve"',
)


@pytest.mark.slow
async def test_every_sink_of_a_run_shows_the_same_numbers(recipe: Path, redis_url: str, redis: Redis) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url):
        trainer = start_anew(redis_url, recipe, "--run-dir", run, "--run-id", "shown", *WISHES)
        assert await trainer.ended() == 0, trainer.output
    assert "shows nothing more" not in trainer.output, trainer.output
    assert "did not take everything" not in trainer.output, trainer.output
    expected = in_file(run)
    rewards = {row.step: row.reward_mean for row in steps(run)}
    assert {step: expected["train/reward_mean", step] for step in (1, 2, 3)} == rewards
    held_out = [row for row in read(run / "journal", EvaluationRow) if row.name == "heldout_after"]
    assert {
        (f"heldout/{'greedy' if row.greedy else 'sampled'}/success", row.step): row.success
        for row in held_out
    }.items() <= expected.items()
    assert {name.split("/")[0] for name, _ in expected} == {"train", "audit", "heldout"}
    assert in_mlflow(run) == expected
    assert in_wandb(run) == expected
    assert in_tensorboard(run) == pytest.approx(expected), "TensorBoard holds float32"
