"""Debian's Chromium, started once, and servers of the pages as a person starts them.

All of it lives in the session's event loop, so the modules of this folder say `loop_scope="session"`.
"""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright, expect

from tests.infra.web.browser import shown_runs
from tests.infra.web.browser.reader import Reader
from tests.infra.web.example_run import NO_REDIS

PATIENCE_MS = 120_000  # a machine that runs two files of tests at a time may be slow


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    program = shutil.which("chromium")
    assert program is not None, "Chromium is missing: `bash infra/setup/setup.sh tests` installs it"
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=program)
        yield chromium
        await chromium.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def finished_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Pages of two runs that have ended, without a Redis."""
    root = tmp_path_factory.mktemp("finished")
    shown_runs.write_finished_run(root / "first")
    shown_runs.write_finished_run(root / "second", shown_runs.OTHER)
    async with pages_of(root, NO_REDIS) as url:
        yield url


@pytest_asyncio.fixture(loop_scope="session")
async def reader(browser: Browser) -> AsyncIterator[Reader]:
    """Somebody who opens pages. What the browser complained about meanwhile fails the test."""
    context = await browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    reader = Reader(await context.new_page())
    yield reader
    await context.close()
    assert reader.complaints == []


@asynccontextmanager
async def pages_of(root: Path, redis_url: str, *flags: str) -> AsyncIterator[str]:
    """`python -m infra.web` for the runs in a folder; yields its address."""
    words = ["-m", "infra.web", "--run-dir", str(root), "--port", "0", "--redis", redis_url, *flags]
    server = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None
        async with asyncio.timeout(240):
            address = await server.stdout.readline()
        yield address.decode().strip()
    finally:
        server.terminate()
        await server.wait()
