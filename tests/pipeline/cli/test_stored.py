"""`ls`, `show` and `explain` read the directory of the run when Redis has forgotten a request, or is gone."""

import asyncio
import json
from pathlib import Path

import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from pipeline import deadletters, keys, stream
from pipeline.__main__ import main
from pipeline.chat import ChatMessage
from pipeline.journal.rows import EpisodeRow, StepRow
from pipeline.request import Claim
from pipeline.rollout_store.record import StoredRollout
from pipeline.trajectory import head_of
from tests.pipeline import samples
from tests.pipeline.cli.situations import BROKEN, RunCommand, taken, trainer_lives
from tests.pipeline.journal_rows import made, write
from trainer.records.rollout_writer import RolloutWriter

NO_REDIS = "redis://127.0.0.1:1/0"


@pytest.fixture
async def stored(redis: Redis, pool: ArqRedis, tmp_path: Path) -> tuple[str, str]:
    """The ids of a finished and of a dead request, in the directory of their run and in Redis."""
    finished, dead = await taken(pool), await taken(pool)
    solved = samples.trajectory(
        finished, turns=(samples.turn(told=(ChatMessage("user", "Fix add()."),)),), reward=_judged()
    )
    await stream.publish(pool, solved)
    broken = samples.trajectory(dead, turns=(), outcome=BROKEN, reward=None)
    evidence = (deadletters.attempt_failure(dead, BROKEN, detail="Traceback: boom"),)
    await deadletters.dead_letter(pool, broken, evidence)
    writer = RolloutWriter(tmp_path / "rollouts", max_bytes=10**9)
    writer.add(head_of(solved, 0), StoredRollout(trajectory=solved))
    writer.add(head_of(broken, 0), StoredRollout(trajectory=broken, failures=evidence))
    writer.close()
    _journal(tmp_path, finished)
    return finished.request.id, dead.request.id


def _judged():
    return samples.reward(log_tail="the log of grading")


def _journal(run_dir: Path, claim: Claim) -> None:
    request_id = claim.request.id
    write(run_dir, made(StepRow, step=7, version=6, at=1e10, request_ids=[request_id]))
    write(run_dir, made(EpisodeRow, request_id=request_id, fate="trained", at=1e10))


@pytest.fixture
def without_redis(capsys: pytest.CaptureFixture[str]) -> RunCommand:
    async def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = await asyncio.to_thread(main, [*words, "--redis", NO_REDIS])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


async def test_without_redis_the_directory_of_the_run_is_enough(
    stored: tuple[str, str], without_redis: RunCommand, tmp_path: Path
) -> None:
    finished, dead = stored
    status, out, err = await without_redis("show", finished, "--run-dir", str(tmp_path))
    assert status == 0
    assert f"only {tmp_path} is read" in err
    for expected in ("reward   1 (exit_code 0", "$ cat calc.py", "+    return a + b", "demo:calc-7"):
        assert expected in out
    assert "the log of grading" not in out

    status, out, _ = await without_redis("show", dead, "--run-dir", str(tmp_path))
    assert (status, "state    dead" in out, "Traceback: boom" in out) == (0, True, True)

    status, out, _ = await without_redis("explain", finished, "--run-dir", str(tmp_path))
    words = [line.split()[4] for line in out.splitlines()[1:-1]]
    assert (status, words) == (0, ["enqueued", "claimed", "published", "trained"])
    assert out.splitlines()[-1] == "trained in step 7, from weights v6"

    status, out, _ = await without_redis("ls", "--run-dir", str(tmp_path), "--json")
    assert {line["request_id"]: line["state"] for line in map(json.loads, out.splitlines())} == {
        finished: "answered",
        dead: "dead",
    }


async def test_what_redis_has_forgotten_is_read_from_the_directory(
    stored: tuple[str, str], run: RunCommand, redis: Redis, tmp_path: Path
) -> None:
    finished, _ = stored
    await redis.flushdb()
    status, _, err = await run("show", finished)
    assert (status, "nothing is known" in err) == (2, True)
    for verb in ("show", "explain"):
        status, out, err = await run(verb, finished, "--run-dir", str(tmp_path))
        assert (status, finished in out, err) == (0, True, "")
    _, out, _ = await run("ls", "--reward", "1", "--run-dir", str(tmp_path))
    assert len(out.splitlines()) == 1


async def test_the_directory_is_found_by_itself_where_the_trainer_wrote_on_this_machine(
    stored: tuple[str, str], run: RunCommand, pool: ArqRedis, redis: Redis, tmp_path: Path
) -> None:
    await redis.flushdb()
    await trainer_lives(pool, journal=str(tmp_path / "journal"))
    for verb in ("show", "explain"):
        status, out, _ = await run(verb, stored[0])
        assert (status, "calc.py" in out or "trained in step 7" in out) == (0, True)


async def test_what_redis_still_has_is_listed_once_and_shown_from_redis(
    stored: tuple[str, str], run: RunCommand, pool: ArqRedis, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": samples.RUN}))
    await trainer_lives(pool)
    queued = (await taken(pool)).request.id
    _, out, _ = await run("ls", "--run-dir", str(tmp_path), "--json")
    ids = [json.loads(line)["request_id"] for line in out.splitlines()]
    assert set(ids) == {*stored, queued}
    assert ids.count(stored[0]) == 1
    _, out, _ = await run("show", stored[0], "--run-dir", str(tmp_path))
    assert "the log of grading" in out


async def test_a_limit_that_redis_reaches_in_the_first_of_several_states_is_kept(
    stored: tuple[str, str], run: RunCommand, pool: ArqRedis, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": samples.RUN}))
    await trainer_lives(pool)
    for _ in range(2):
        await taken(pool)
    status, out, err = await run("ls", "--limit", "1", "--run-dir", str(tmp_path))
    assert (status, len(out.splitlines())) == (0, 1)
    assert err.startswith("only the first 1")


async def test_a_body_that_redis_dropped_is_read_from_the_directory(
    stored: tuple[str, str], run: RunCommand, redis: Redis, tmp_path: Path
) -> None:
    await redis.delete(keys.body(stored[0]))
    _, out, _ = await run("show", stored[0], "--run-dir", str(tmp_path))
    assert f"source   {tmp_path}" in out
    assert "$ cat calc.py" in out


async def test_a_directory_without_rollouts_is_one_line(
    stored: tuple[str, str], without_redis: RunCommand, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for words in (("ls",), ("show", stored[0])):
        status, out, err = await without_redis(*words, "--run-dir", str(empty))
        assert (status, out) == (2, "")
        assert str(empty) in err.splitlines()[-1]
