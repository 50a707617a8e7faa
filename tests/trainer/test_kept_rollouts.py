"""After a real run, with Redis gone, its directory is enough to look into every rollout and to export it."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import atif
import pyarrow.parquet as pq
import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import alternating, fleet
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow
from pipeline.request import RolloutRequest
from pipeline.rollout_store.reading import stores_of
from tests.trainer.processes import recipe as recipe
from tests.trainer.processes import sets, start, steps

NO_REDIS = "redis://127.0.0.1:1/0"


def verdict(request: RolloutRequest) -> float | None:
    return None if request.task.id == "t1" and request.member == 3 else alternating(request)


def printed(words: str, *paths: Path) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", *shlex.split(words), *map(str, paths)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
async def test_without_redis_every_rollout_of_a_run_is_shown_explained_listed_and_exported(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run, out = recipe.parent / "run", recipe.parent / "out"
    async with fleet(redis_url, verdict):
        wishes = sets("num_steps=2", "evaluation.episodes=3", "rollouts.tokens=true")
        trainer = await start(redis_url, recipe, "--run-dir", run, *wishes)
        assert await trainer.ended() == 0, trainer.output
    await redis.flushdb()
    rows = {row.request_id: row for row in read(run / "journal", EpisodeRow) if row.fate != "withdrawn"}

    listed = printed(f"pipeline ls --json --limit 10000 --redis {NO_REDIS} --run-dir", run).splitlines()
    assert {line["request_id"]: line["reward"] for line in map(json.loads, listed)} == {
        request_id: row.reward for request_id, row in rows.items()
    }
    kept, first = stores_of(run)[0], steps(run)[0]
    tokens = kept.trained(first.request_ids)
    assert tokens.keys() == set(first.request_ids)
    assert {(one.step, one.version) for one in tokens.values()} == {(1, 0)}
    assert sum(len(turn.reasons) for one in tokens.values() for turn in one.turns) == first.num_trained_tokens
    trained = first.request_ids[0]
    failed = next(row.request_id for row in rows.values() if row.fate == "failed")
    shown = printed(f"pipeline show {trained} --redis {NO_REDIS} --run-dir", run)
    assert "turn 1" in shown
    assert printed(f"pipeline explain {trained} --redis {NO_REDIS} --run-dir", run).endswith(
        "trained in step 1, from weights v0\n"
    )
    assert "state    dead" in printed(f"pipeline show {failed} --redis {NO_REDIS} --run-dir", run)

    for kind in ("traj", "atif", "sft", "messages", "parquet"):
        printed(f"trainer.rollouts export --format {kind} --out", out / kind, run)
    assert {path.parent.name for path in (out / "traj").glob("*/*.traj.json")} == set(rows)
    table = pq.read_table(out / "parquet" / "rollouts.parquet")
    assert sorted(table.column("request_id").to_pylist()) == sorted(rows)
    for document in (out / "atif").iterdir():
        atif.Trajectory.model_validate_json(document.read_text())
    fine_tuning = [json.loads(line) for line in (out / "sft" / "sft.jsonl").read_text().splitlines()]
    played = {one for one, row in rows.items() if row.purpose == "train"}
    assert {path.stem for path in (out / "atif").iterdir()} == played
    assert {row["request_id"] for row in fine_tuning} == played, "the failed one broke off after a reply"
    assert all(sum(sample["loss_mask"]) for row in fine_tuning for sample in row["samples"])
