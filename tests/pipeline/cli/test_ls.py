"""Which requests `ls` lists."""

import json

import pytest
from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import queue
from pipeline.queue import Lease
from pipeline.trajectory import Reward
from tests.pipeline import samples
from tests.pipeline.cli.situations import (
    RunCommand,
    answered,
    dead_lettered,
    known_run,
    taken,
)


async def test_ls_tells_requests_apart_by_state(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    waiting, held = samples.request(), await taken(pool)
    await queue.enqueue(pool, waiting)
    done, dead = await answered(pool), await dead_lettered(pool)
    expected = {
        "queued": [waiting.id],
        "claimed": [held.request.id],
        "answered": [dead, done],
        "dead": [dead],
    }
    for state, ids in expected.items():
        status, out, _ = await run("ls", "--state", state, "--json")
        rows = [json.loads(line) for line in out.splitlines()]
        assert (status, [row["request_id"] for row in rows]) == (0, ids)
        assert {row["state"] for row in rows} == {state}
    _, out, _ = await run("ls")
    assert [line.split()[1] for line in out.splitlines()] == [
        "dead",
        "claimed",
        "queued",
        "answered",
        "answered",
    ]
    assert "infrastructure, sandbox: container vanished" in out


async def test_ls_keeps_to_its_limit_and_its_run(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    for _ in range(3):
        await queue.enqueue(pool, samples.request())
        await answered(pool)
    _, out, err = await run("ls", "--limit", "2")
    assert len(out.splitlines()) == 2
    assert err.startswith("only the first 2")
    _, out, err = await run("ls", "--limit", "4", "--json")
    assert [json.loads(line)["state"] for line in out.splitlines()] == ["queued"] * 3 + ["answered"]
    _, out, err = await run("ls", "--limit", "6")
    assert (len(out.splitlines()), err) == (6, ""), "the limit is of all lines, and was not reached"
    status, _, err = await run("ls", "--run", "another")
    assert (status, err) == (2, "no run another; there is laptop\n")


async def test_ls_filters(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    other = replace(samples.TASK, id="demo:text-3")
    waiting, held = samples.request(task=other), await taken(pool, group_id="laptop-gx")
    await queue.enqueue(pool, waiting)
    done, dead = await answered(pool), await dead_lettered(pool)
    lease = Lease(worker="host/1", attempt=1, claimed_at=1.0, task_id="demo:calc-7", group_id="laptop-gx")
    await queue.renew(pool, held, lease)

    async def ids(*words: str) -> list[str]:
        _, out, _ = await run("ls", "--json", *words)
        return [json.loads(line)["request_id"] for line in out.splitlines()]

    assert await ids("--task", "demo:text-*") == [waiting.id]
    assert await ids("--group", "laptop-gx") == [held.request.id]
    assert dead in await ids("--group", "laptop-g*", "--state", "dead")
    assert await ids("--outcome", "submitted") == [done]
    assert await ids("--outcome", "failed:*", "--state", "dead") == [dead]
    assert await ids("--worker", "nobody") == []
    assert await ids("--older-than", "1d", "--state", "answered") == []
    assert await ids("--older-than", "30s", "--state", "queued") == [waiting.id], "asked for a minute ago"


async def test_ls_filters_answered_requests_by_reward(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    await queue.enqueue(pool, samples.request())
    graded = {
        word: await answered(pool, reward=Reward(value=value, resolved=False, decided_by=""))
        for word, value in (("0", 0.0), ("1", 1.0), ("0.5", 0.5))
    }
    graded["none"] = await dead_lettered(pool)
    for reward, request_id in graded.items():
        _, out, _ = await run("ls", "--json", "--reward", reward)
        assert [json.loads(line)["request_id"] for line in out.splitlines()] == [request_id]
    with pytest.raises(SystemExit) as stopped:
        await run("ls", "--reward", "much")
    assert stopped.value.code == 2
