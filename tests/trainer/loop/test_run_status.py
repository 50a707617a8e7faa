"""What a trainer's heartbeat says of its run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from pipeline import connection
from tests.trainer.test_recipe import MINIMAL
from tests.trainer.trainer_side import RUN, TrainerSide
from trainer.loop.budget import AdmissionBudget
from trainer.loop.run_status import StatusWriter
from trainer.loop.state import RunState
from trainer.recipe import AdmissionRecipe, load_recipe
from trainer.records.journal import Journal
from trainer.rollouts.admission import Admission
from trainer.rollouts.ledger import LedgerState
from trainer.rollouts.staleness import StalenessController, bounds_of

RULE = ("judge.method=rule", "judge.name=commands")


def status_writer(side: TrainerSide, recipe: Path, *overrides: str) -> StatusWriter:
    state = RunState.resumed(LedgerState(), [])
    bounds = AdmissionRecipe()
    budget = AdmissionBudget(
        side.pool,
        RUN,
        Admission(max_lag_versions=4, groups_per_step=1, num_steps=9),
        StalenessController(bounds_of(bounds)),
        side.book,
        side.ledger,
        state,
        bounds=bounds,
        group_size=3,
    )
    return StatusWriter(
        load_recipe(recipe, overrides),
        RUN,
        state,
        budget,
        book=side.book,
        ledger=side.ledger,
        heldout=SimpleNamespace(progress=""),
        quarantined=(),
        alarms=SimpleNamespace(firing=()),
        journal=side.journal.directory,
        trouble=str,
    )


@pytest.mark.parametrize(
    ("overrides", "wait_s", "is_required"),
    [
        ((), None, False),
        (RULE, 600.0, False),
        ((*RULE, "judge.wait_s=45", "judge.required=true"), 45.0, True),
    ],
)
async def test_a_heartbeat_says_how_long_groups_wait_for_their_judgements(
    redis: Redis,
    redis_url: str,
    tmp_path: Path,
    overrides: tuple[str, ...],
    wait_s: float | None,
    *,
    is_required: bool,
) -> None:
    (tmp_path / "recipe.toml").write_text(MINIMAL)
    pool: ArqRedis = await connection.connect(redis_url)
    with Journal(tmp_path) as journal:
        side = TrainerSide(pool, journal)
        status = status_writer(side, tmp_path / "recipe.toml", *overrides).status()
    await pool.aclose()
    assert (status.judge_wait_s, status.judge_required) == (wait_s, is_required)
