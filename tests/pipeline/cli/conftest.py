"""The command line, run as a person or a script would run it."""

import asyncio

import pytest
from arq.connections import ArqRedis

from pipeline.__main__ import main
from pipeline.screen import as_shown
from tests.pipeline.cli.situations import RunCommand


@pytest.fixture
def run(pool: ArqRedis, redis_url: str, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """A command line's exit status, output and error output, as they reach a terminal.

    In a thread, for it has an event loop of its own.
    """

    async def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = await asyncio.to_thread(main, [*words, "--redis", redis_url])
        captured = capsys.readouterr()
        return status, as_shown(captured.out), as_shown(captured.err)

    return run
