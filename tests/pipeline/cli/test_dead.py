"""`dead`, `requeue` and `drop`."""

import json

from arq.connections import ArqRedis

from pipeline import deadletters, keys, queue
from pipeline.trajectory import Failed
from tests.pipeline import samples
from tests.pipeline.cli.situations import (
    RunCommand,
    dead_lettered,
    known_run,
)


async def test_requeue_and_drop_say_what_they_did(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    first, second, third = [await dead_lettered(pool) for _ in range(3)]
    status, out, _ = await run("requeue", first)
    assert (status, out) == (0, f"requeued: {first}  demo:calc-7  run laptop, 1 failed try\n")
    assert await pool.zscore(keys.queue(), first) is not None
    status, out, _ = await run("drop", second, "--json")
    assert json.loads(out) == {"request_id": second, "run_id": "laptop", "outcome": "dropped", "reason": ""}
    await pool.delete(keys.request(third))
    status, out, _ = await run("requeue", "--all-dead")
    assert status == 1
    assert out.startswith(f"left as it was: {third}")
    assert list(await deadletters.listed(pool, samples.RUN)) == [third]
    status, out, _ = await run("drop", "--all-dead")
    assert (status, out.split(":")[0]) == (0, "dropped")
    assert (await run("drop", "--all-dead"))[1] == "nothing is dead\n"
    status, _, err = await run("requeue", first)
    assert (status, "not among the dead" in err) == (2, True)


async def test_dead_lists_by_class_what_requests_died_of(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    hopeless = Failed(boundary="grader", message="tests do not apply", transient=False)
    outage, broken = await dead_lettered(pool), await dead_lettered(pool, hopeless)
    _, out, _ = await run("dead")
    assert [line.split()[:2] for line in out.splitlines()] == [
        [broken, "environment"],
        [outage, "infrastructure"],
    ]
    _, out, _ = await run("dead", "--class", "environment", "--json")
    (row,) = [json.loads(line) for line in out.splitlines()]
    assert (row["request_id"], row["class"], row["request"]["task"]["id"]) == (
        broken,
        "environment",
        samples.TASK.id,
    )
    assert (row["failures"][0]["worker"], row["failures"][0]["detail"]) == ("host/1", "Traceback: boom")
    _, out, _ = await run("dead", "--full", "--class", "infrastructure")
    assert "Traceback: boom" in out
    await run("requeue", "--class", "infrastructure")
    assert list(await deadletters.listed(pool, samples.RUN)) == [broken]
    status, _, err = await run("drop", broken, outage)
    assert (status, f"{outage} not among the dead" in err) == (2, True)
    assert list(await deadletters.listed(pool, samples.RUN)) == [broken], "all or nothing"


async def test_dead_speaks_of_those_that_nobody_can_read_too(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    poison, broken = samples.request(), await dead_lettered(pool)
    await queue.enqueue(pool, poison)
    await pool.set(keys.request(poison.id), b"\xff rubbish")
    await queue.take(pool, "host/1", 1)
    status, out, _ = await run("dead", "--json")
    rows = {row["request_id"]: row for row in map(json.loads, out.splitlines())}
    assert (status, set(rows)) == (0, {poison.id, broken})
    assert rows[poison.id]["request"] is None
    assert rows[poison.id]["unreadable"]
    assert rows[poison.id]["class"] == "poison"
