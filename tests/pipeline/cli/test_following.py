"""`top` and `tail`, which show what happens as it happens."""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress

from arq.connections import ArqRedis

from tests.pipeline.cli.situations import (
    RunCommand,
    answered,
    known_run,
    trainer_lives,
    worker_lives,
)


async def test_top_draws_one_picture_into_a_pipe(pool: ArqRedis, run: RunCommand) -> None:
    await trainer_lives(pool)
    await worker_lives(pool, paused="docker is out: no such socket")
    request_id = await answered(pool)
    status, out, _ = await run("top")
    assert status == 0
    assert "paused: docker is out: no such socket" in out
    assert request_id in out
    complaints = json.loads((await run("top", "--json"))[1])["complaints"]
    assert complaints == ["every worker is paused, the first because docker is out: no such socket"]


async def test_top_lives_on_a_terminal_until_q(pool: ArqRedis, redis_url: str, heartbeats_last: None) -> None:
    await trainer_lives(pool)
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "pipeline", "top", "--every", "60", "--redis", redis_url]
    child = await asyncio.create_subprocess_exec(*command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    drawn = b""
    while b"no results yet" not in drawn:
        drawn += await asyncio.to_thread(os.read, ours, 65536)
    os.write(ours, b"q")
    assert await child.wait() == 0
    # Until an error says that all is read: a read gives what is there, not all that was written.
    with suppress(OSError):
        while True:
            drawn += os.read(ours, 65536)
    os.close(ours)
    assert b"step 3 of 9" in drawn
    assert drawn.endswith(b"\x1b[?1049l"), "the terminal is as it was"


async def test_tail_without_f_ends(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    first, second = await answered(pool), await answered(pool)
    _, out, _ = await run("tail", "--json")
    assert [json.loads(line)["request_id"] for line in out.splitlines()] == [first, second]


async def test_tail_follows_arrivals_until_interrupted(pool: ArqRedis, redis_url: str) -> None:
    await known_run(pool)
    _, seen = await answered(pool), await answered(pool)
    command = [sys.executable, "-m", "pipeline", "tail", "-f", "-n", "1", "--json", "--redis", redis_url]
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    ids = [json.loads(await child.stdout.readline())["request_id"]]
    new = await answered(pool)
    ids.append(json.loads(await child.stdout.readline())["request_id"])
    child.send_signal(signal.SIGINT)
    rest, err = await child.communicate()
    assert (ids, child.returncode, rest, err) == ([seen, new], 0, b"", b"")


async def test_a_reader_that_goes_away_ends_tail_quietly(pool: ArqRedis, redis_url: str) -> None:
    await known_run(pool)
    await answered(pool)
    command = (
        f"{sys.executable} -m pipeline tail -f --redis '{redis_url}' | head -n 1; echo ${{PIPESTATUS[0]}}"
    )
    child = await asyncio.create_subprocess_exec(
        *("bash", "-c", command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    await child.stdout.readline()
    ending = asyncio.create_task(child.communicate())
    while not ending.done():  # `tail` notices at its first line after the reader is gone
        await answered(pool)
        await asyncio.wait({ending}, timeout=0.05)
    assert ending.result() == (b"141\n", b"")
