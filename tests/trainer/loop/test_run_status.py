"""What a trainer's heartbeat says of its run."""

from pathlib import Path

import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from pipeline import connection
from tests.trainer.trainer_side import TrainerSide
from trainer.loop.status import status_of
from trainer.recipe import CreditRecipe, JudgeRecipe
from trainer.records.journal_writer import Journal


@pytest.mark.parametrize(
    ("judge", "wait_s", "is_required"),
    [
        (JudgeRecipe(), None, False),
        (JudgeRecipe(method="rule", name="commands"), 600.0, False),
        (JudgeRecipe(method="rule", name="commands", wait_s=45.0, required=True), 45.0, True),
    ],
)
async def test_a_heartbeat_says_how_long_groups_wait_for_their_judgements(
    redis: Redis,
    redis_url: str,
    tmp_path: Path,
    judge: JudgeRecipe,
    wait_s: float | None,
    *,
    is_required: bool,
) -> None:
    pool: ArqRedis = await connection.connect(redis_url)
    with Journal(tmp_path) as journal:
        credit = CreditRecipe(method="outcome_then_steps")
        status = status_of(TrainerSide(pool, journal, judge=judge, credit=credit).run)
    await pool.aclose()
    assert (status.judge_wait_s, status.judge_required) == (wait_s, is_required)
