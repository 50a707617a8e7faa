"""`python -m trainer.run --dry-run --gpus ...`: the plan behind what a dry run says of the run."""

from pathlib import Path

import pytest

from tests.trainer.processes import recipe as recipe
from tests.trainer.processes import start

NOWHERE = "redis://nowhere.invalid:1"


async def test_a_dry_run_prints_the_plan_for_the_machines_that_are_named(recipe: Path) -> None:
    trainer = await start(NOWHERE, recipe, "--dry-run", "--gpus", "2xA10-24", "--hosts", "1x8")
    assert await trainer.ended() == 0, trainer.output
    lines = trainer.output.splitlines()
    assert any(line.startswith("admission: at most") for line in lines)
    assert any(line.startswith("learner: 1xA10-24: tensor 1") for line in lines)
    assert any(line.startswith("sandboxes: 1 host x") for line in lines)
    assert "everything fits" in trainer.output


async def test_a_dry_run_without_machines_plans_none(recipe: Path) -> None:
    trainer = await start(NOWHERE, recipe, "--dry-run")
    assert await trainer.ended() == 0, trainer.output
    assert "everything fits" not in trainer.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dry-run", "--gpus", "2xH101-80"], "no GPU is known as 'H101-80'"),
        (["--dry-run", "--gpus", "many"], "--gpus many: write how many and which, as in 16xH100-80"),
        (["--dry-run", "--gpus", "1xH100-80"], "leave none for the engines"),
        (["--dry-run", "--gpus", "2xA10-24", "--hosts", "big"], "--hosts big: write hosts and the cores"),
        (["--gpus", "2xA10-24"], "--gpus, --hosts and --measured are of the plan: add --dry-run"),
    ],
)
async def test_what_cannot_be_planned_is_refused_in_one_line(
    arguments: list[str], said: str, recipe: Path
) -> None:
    trainer = await start(NOWHERE, recipe, *arguments)
    assert await trainer.ended() == 2
    assert said in trainer.output.splitlines()[-1]
