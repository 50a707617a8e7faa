"""`ls`, `show` and `explain` of judge requests read the directory of the run when Redis has forgotten them, or is gone."""

import asyncio
import json
from pathlib import Path

import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from pipeline.__main__ import main
from pipeline.journal.rows import EpisodeRow, JudgedTurn, JudgementFate, JudgementRow
from pipeline.judge import judge_request_id, judgement_head
from pipeline.rollout_store.record import StoredRollout
from pipeline.trajectory import head_of
from tests.pipeline import samples
from tests.pipeline.cli.situations import RunCommand
from tests.pipeline.cli.situations import taken as rollout_taken
from tests.pipeline.journal_rows import made, write
from tests.pipeline.judging import taken, voted
from trainer.records.journal_writer import Journal
from trainer.records.rollout_writer import RolloutWriter

NO_REDIS = "redis://127.0.0.1:1/0"


@pytest.fixture
def without_redis(capsys: pytest.CaptureFixture[str]) -> RunCommand:
    async def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = await asyncio.to_thread(main, [*words, "--redis", NO_REDIS])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
async def rollout_id(redis: Redis, pool: ArqRedis, tmp_path: Path) -> str:
    """A judged rollout in the directory of its run, of which Redis has forgotten everything; three others are in the journal."""
    played = samples.trajectory(await rollout_taken(pool), turns=(samples.turn(), samples.turn()))
    found = played.claim.request.id
    judged = voted(await taken(pool, judge_request_id(found), rollout_id=found), (1.0,), None)
    writer = RolloutWriter(tmp_path / "rollouts", max_bytes=10**9)
    writer.add(head_of(played, 0), StoredRollout(trajectory=played))
    writer.add_judgement(judgement_head(judged, 0), judged)
    writer.close()
    (tmp_path / "run.json").write_text(json.dumps({"run_id": samples.RUN}))
    turns = tuple(JudgedTurn.of(step) for step in judged.steps)
    with Journal(tmp_path / "journal") as journal:
        journal.append(_row(found, "joined", turns=turns))
        journal.append(_row("gone", "unneeded"))
        journal.append(_row("broken", "failed", error="engine: no reply"))
        journal.append(_row("slow", "late", turns=turns))
    await redis.flushdb()
    return found


def _row(
    rollout_id: str, fate: JudgementFate, *, turns: tuple[JudgedTurn, ...] = (), error: str = ""
) -> JudgementRow:
    return JudgementRow(
        rollout_id=rollout_id,
        group_id="g1",
        task_id="t",
        cursor=0,
        fate=fate,
        turns=turns,
        error=error,
        at=1e9,
    )


async def test_ls_lists_what_the_journal_has_of_judging(
    rollout_id: str, without_redis: RunCommand, tmp_path: Path
) -> None:
    words = ("ls", "--kind", "judge", "--run-dir", str(tmp_path), "--json")
    status, out, _ = await without_redis(*words)
    rows = [json.loads(line) for line in out.splitlines()]
    assert (status, [(row["request_id"], row["state"], row["detail"]) for row in rows]) == (
        0,
        [
            (
                "slow.judge",
                "answered",
                "1 of 2 turns scored, mean +1.00; not used: a step took its group without it",
            ),
            ("broken.judge", "dead", "engine: no reply"),
            (
                f"{rollout_id}.judge",
                "answered",
                "1 of 2 turns scored, mean +1.00; joined its rollout before a step took the group",
            ),
        ],
    ), "newest first; what was withdrawn is in no list"
    _, out, _ = await without_redis(*words, "--state", "dead")
    assert [json.loads(line)["request_id"] for line in out.splitlines()] == ["broken.judge"]
    _, out, _ = await without_redis(*words, "--run", "another")
    assert out == ""


@pytest.mark.parametrize("has_redis", [False, True])
async def test_a_stored_rollout_is_shown_with_its_scores(
    rollout_id: str, run: RunCommand, without_redis: RunCommand, tmp_path: Path, has_redis: bool
) -> None:
    command = run if has_redis else without_redis
    status, out, _ = await command("show", rollout_id, "--full", "--run-dir", str(tmp_path))
    assert status == 0
    assert "judging  1 of 2 turns scored, mean +1.00, by judge-8b at v1" in out
    assert "  score +1.00  (1 vote: +1)\n  vote 1: +1  seed 0\n    \\boxed{+1}" in out
    status, out, _ = await command("show", judge_request_id(rollout_id), "--run-dir", str(tmp_path))
    assert (status, f"source   {tmp_path}" in out, "\\boxed{+1}" in out) == (0, True, True)
    status, _, err = await command("show", judge_request_id("slow"), "--run-dir", str(tmp_path))
    assert (status, "nothing is known of request slow.judge" in err) == (2, True), "its rollout is not kept"


@pytest.mark.parametrize("has_redis", [False, True])
async def test_a_stored_judgement_is_explained_by_the_journal(
    rollout_id: str, run: RunCommand, without_redis: RunCommand, tmp_path: Path, has_redis: bool
) -> None:
    write(tmp_path, made(EpisodeRow, request_id=rollout_id, fate="trained", at=1.0))
    command = run if has_redis else without_redis
    _, out, _ = await command("explain", judge_request_id(rollout_id), "--run-dir", str(tmp_path))
    assert out.splitlines()[-1].startswith("joined its rollout before a step took the group; 1 of 2 turns")
    _, out, _ = await command("explain", rollout_id, "--run-dir", str(tmp_path))
    assert out.splitlines()[-1].startswith("judging: joined its rollout")
