"""The command, as a person starts it."""

import asyncio
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.infra.web.example_run import NO_REDIS
from tests.pipeline import samples


# Quick: the pages are served by their command and end with a signal.
@pytest.mark.slow_but_for("itself")
@pytest.mark.parametrize(
    "command",
    [["infra.web", "--redis", NO_REDIS], ["pipeline", "--redis", NO_REDIS, "web"]],
    ids=["itself", "pipeline"],
)
async def test_the_command_says_its_address_serves_and_ends_with_a_signal(
    run_dir: Path, command: list[str]
) -> None:
    words = ["-m", *command, "--run-dir", str(run_dir), "--port", "0"]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(240):
            address = (await process.stdout.readline()).decode().strip()
            async with aiohttp.ClientSession() as session, session.get(f"{address}events") as open_stream:
                async with session.get(f"{address}api/runs") as response:
                    assert [row["id"] for row in (await response.json())["runs"]] == [samples.RUN]
                async with session.get(address) as response:
                    assert response.content_type == "text/html"
                assert open_stream.status == 200
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
