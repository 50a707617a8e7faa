"""Pages that are open hear of what is new."""

import asyncio
import json
from pathlib import Path

from aiohttp import ClientResponse
from arq.connections import ArqRedis

from tests.infra.web.example_run import Serve, append, finished, step, store
from tests.pipeline import samples
from tests.pipeline.cli.situations import trainer_lives


async def change(response: ClientResponse) -> tuple[str, str]:
    """The next change that the stream tells."""
    async with asyncio.timeout(240):
        while True:
            line = await response.content.readline()
            if line.startswith(b"data: "):
                told = json.loads(line.removeprefix(b"data: "))
                return told["run"], told["kind"]


async def test_a_journal_that_grows_is_told(serve: Serve, run_dir: Path) -> None:
    client = await serve(run_dir)
    async with client.get("/events") as response:
        assert response.content_type == "text/event-stream"
        assert await response.content.readline() == b": open\n"
        append(run_dir, "steps", step(2, []))
        assert await change(response) == (samples.RUN, "steps")


async def test_a_run_whose_journal_is_no_directory_does_not_silence_the_others(
    serve: Serve, run_dir: Path
) -> None:
    (run_dir.parent / "broken").mkdir()
    (run_dir.parent / "broken" / "run.json").write_text(json.dumps({"run_id": "broken"}))
    (run_dir.parent / "broken" / "journal").write_text("")
    client = await serve(run_dir.parent)
    async with client.get("/events") as response:
        assert await response.content.readline() == b": open\n"
        append(run_dir, "steps", step(2, []))
        assert await change(response) == (samples.RUN, "steps")


async def test_a_rollout_that_is_stored_is_told_to_every_page(serve: Serve, run_dir: Path) -> None:
    client = await serve(run_dir)
    async with client.get("/events") as first, client.get("/events") as second:
        for response in (first, second):
            assert await response.content.readline() == b": open\n"
        store(run_dir, finished("new", reward=1.0))
        assert await change(first) == await change(second) == (samples.RUN, "rollouts")


async def test_a_heartbeat_is_told(serve: Serve, pool: ArqRedis, redis_url: str, run_dir: Path) -> None:
    client = await serve(run_dir, redis_url=redis_url)
    async with client.get("/events") as response:
        assert await response.content.readline() == b": open\n"
        await trainer_lives(pool, updated_at=2.0)
        assert await change(response) == (samples.RUN, "status")


async def test_a_page_that_comes_after_all_have_gone_hears_too(serve: Serve, run_dir: Path) -> None:
    client = await serve(run_dir)
    async with client.get("/events") as response:
        assert await response.content.readline() == b": open\n"
    async with client.get("/events") as response:
        assert await response.content.readline() == b": open\n"
        append(run_dir, "alarms", {"at": 1.0})
        assert await change(response) == (samples.RUN, "alarms")
