"""`ls`, `tail`, `dead`, `requeue` and `drop` of judge requests, beside those of rollouts."""

import json
from typing import Any

from arq.connections import ArqRedis

from pipeline import deadletters, keys, stream
from pipeline.__main__ import KIND_NAMES
from pipeline.kinds import JUDGE, KINDS
from tests.pipeline import samples
from tests.pipeline.cli import situations
from tests.pipeline.cli.situations import RunCommand, answered, known_run
from tests.pipeline.judging import dead_lettered, enqueued, judgement, taken, voted


def test_the_command_line_names_every_kind() -> None:
    assert tuple(kind.name for kind in KINDS) == KIND_NAMES


async def _rows(run: RunCommand, *words: str) -> list[dict[str, Any]]:
    status, out, err = await run(*words, "--json")
    assert (status, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


async def test_ls_lists_requests_of_one_kind(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    rollout = await answered(pool)
    await stream.publish(pool, judgement(await taken(pool, "judge-1"), 1.0), kind=JUDGE)
    await taken(pool, "judge-2", worker="host/7")
    await enqueued(pool, "judge-3")
    await dead_lettered(pool, "judge-4")
    assert [row["request_id"] for row in await _rows(run, "ls")] == [rollout]
    rows = await _rows(run, "ls", "--kind", "judge")
    assert [(row["request_id"], row["state"]) for row in rows] == [
        ("judge-4", "dead"),
        ("judge-2", "claimed"),
        ("judge-3", "queued"),
        ("judge-4", "answered"),
        ("judge-1", "answered"),
    ]
    assert {row["kind"] for row in rows} == {"judge"}
    assert rows[0]["detail"] == "infrastructure, engine: no reply"
    held = await _rows(run, "ls", "--kind", "judge", "--worker", "host/7")
    assert [row["request_id"] for row in held] == ["judge-2"]


async def test_a_judgement_is_listed_with_what_was_scored(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    voting, ruling, silent = [await taken(pool, f"judge-{number}") for number in (1, 2, 3)]
    await stream.publish(pool, voted(voting, (1.0, -1.0, 1.0), None), kind=JUDGE)
    await stream.publish(pool, judgement(ruling, -1.0, None, 0.5), kind=JUDGE)
    await stream.publish(pool, voted(silent, (None,)), kind=JUDGE)
    details = {row["request_id"]: row["detail"] for row in await _rows(run, "ls", "--kind", "judge")}
    assert details == {
        "judge-1": "judged, 1 of 2 steps scored, mean +0.33, 3 of 3 votes valid",
        "judge-2": "judged, 2 of 3 steps scored, mean -0.25",
        "judge-3": "judged, 0 of 1 step scored, 0 of 1 vote valid",
    }
    _, out, _ = await run("ls", "--kind", "judge", "--outcome", "judged")
    assert all(line.split()[4] == "judge" for line in out.splitlines()), (
        "the kind stands where purposes stand"
    )


async def test_a_filter_by_reward_is_of_rollouts_only(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    status, out, err = await run("ls", "--kind", "judge", "--reward", "none")
    assert (status, out, err) == (2, "", "--reward: only rollouts have one; leave --kind out\n")


async def test_tail_shows_the_newest_judgements_and_top_shows_both_kinds(
    pool: ArqRedis, run: RunCommand
) -> None:
    await known_run(pool)
    rollout = await answered(pool)
    await stream.publish(pool, judgement(await taken(pool), 1.0), kind=JUDGE)
    assert [row["request_id"] for row in await _rows(run, "tail")] == [rollout]
    assert [row["request_id"] for row in await _rows(run, "tail", "--kind", "judge")] == ["judge-1"]
    _, out, _ = await run("top")
    newest = out[out.index("newest results") :]
    assert rollout in newest
    assert "judge-1" in newest


async def test_dead_requests_are_of_every_kind_unless_one_is_named(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    rollout, judging = await situations.dead_lettered(pool), await dead_lettered(pool)
    rows = await _rows(run, "dead")
    assert [(row["request_id"], row["kind"]) for row in rows] == [(judging, "judge"), (rollout, "rollout")]
    (row,) = await _rows(run, "dead", "--kind", "judge")
    assert (row["request"]["rollout_id"], row["class"]) == ("laptop-0001", "infrastructure")
    _, out, _ = await run("dead", "--kind", "judge", "--full")
    assert "Traceback: judge" in out
    assert rollout not in out
    await run("drop", "--all-dead", "--kind", "rollout")
    assert [row["request_id"] for row in await _rows(run, "dead")] == [judging]


async def test_a_dead_judge_request_is_found_by_its_id_and_requeued_or_dropped(
    pool: ArqRedis, run: RunCommand
) -> None:
    await known_run(pool)
    first, second = await dead_lettered(pool, "judge-1"), await dead_lettered(pool, "judge-2")
    status, out, _ = await run("requeue", first)
    assert (status, out) == (0, f"requeued: {first}  task-1  run laptop, 1 failed try\n")
    assert await pool.zscore(keys.queue(JUDGE), first) is not None
    assert await pool.zscore(keys.queue(), first) is None, "it is no rollout"
    status, out, _ = await run("drop", second)
    assert (status, out.split(":")[0]) == (0, "dropped")
    assert await deadletters.listed(pool, samples.RUN, JUDGE) == {}
