"""`top` on a terminal of 80 columns and 24 rows, as a person has one at night."""

import asyncio
import fcntl
import os
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from arq.connections import ArqRedis

from infra import redis_server
from pipeline import connection
from pipeline.screen import Ink, cut, one_line
from tests.pipeline import samples
from tests.pipeline.cli.situations import answered, dead_lettered, taken, trainer_lives, worker_lives

LINES, COLUMNS = 24, 80
SEQUENCE = re.compile(r"\x1b\[[?;0-9]*[A-Za-z]")
PAGE_DOWN = b"\x1b[6~"


class Terminal:
    """What `top` has drawn on it."""

    def __init__(self, ours: int) -> None:
        self._ours = ours
        self.written = ""

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    async def rows(self, until: Callable[[list[str]], bool]) -> list[str]:
        """The rows of the newest picture that is as `until` wants it."""
        while True:
            self.written += (await asyncio.to_thread(os.read, self._ours, 65536)).decode()
            # The newest picture may be cut short; the one before it is whole.
            for picture in self.written.split("\x1b[H")[1:]:
                rows = SEQUENCE.sub("", picture).split("\r\n")
                if picture.endswith("\x1b[J") and until(rows):
                    self.written = ""
                    return rows


@asynccontextmanager
async def top(redis_url: str, **environment: str) -> AsyncIterator[Terminal]:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "pipeline", "top", "--every", "0.2", "--redis", redis_url]
    child = await asyncio.create_subprocess_exec(
        *command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | environment
    )
    os.close(theirs)
    terminal = Terminal(ours)
    try:
        yield terminal
        os.write(ours, b"q")
        with suppress(OSError):
            while await asyncio.to_thread(os.read, ours, 65536):
                pass
        assert await child.wait() == 0
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        os.close(ours)


@pytest.fixture
async def fleet(pool: ArqRedis, heartbeats_last: None) -> None:
    """More than a screen: two workers with claims, an alarm, a dead request and newest results."""
    await trainer_lives(pool, alarms=("gap_grows since step 7: the gap is 0.2 nats, " + "which is " * 20,))
    for name in ("host/1", "host/2"):
        await worker_lives(pool, name=name)
    for _ in range(12):
        await taken(pool)
    for _ in range(8):
        await answered(pool)
    await dead_lettered(pool)


async def test_the_verdict_comes_first_and_what_does_not_fit_is_counted_and_scrolled_to(
    fleet: None, redis_url: str
) -> None:
    async with top(redis_url, NO_COLOR="1") as terminal:
        rows = await terminal.rows(lambda rows: len(rows) > 3)
        assert "\x1b[3" not in terminal.written
        assert len(rows) == LINES
        assert max(map(len, rows)) <= COLUMNS
        assert rows[1] == f"unwell: run {samples.RUN} has 1 dead request: `dead` lists them"
        assert rows[2].startswith(f"unwell: run {samples.RUN}, alarm gap_grows since step 7")
        assert rows[2].endswith("…")
        below = re.fullmatch(r"(\d+) more below: arrow keys, Page Up and Page Down scroll", rows[-1])
        assert below is not None
        assert not any("newest results" in row for row in rows)
        for _ in range(5):
            terminal.press(PAGE_DOWN)
        end = await terminal.rows(
            lambda rows: rows[-1].endswith("more above: arrow keys, Page Up and Page Down scroll")
        )
        assert end[1:3] == rows[1:3], "the verdict stays"
        assert any("newest results" in row for row in end)
        assert rows[-1].split()[0] == end[-1].split()[0], "what was below is above"


async def test_a_restart_of_redis_is_said_and_survived(tmp_path: Path, heartbeats_last: None) -> None:
    directory = tmp_path / "r"
    directory.mkdir()
    server = redis_server.start_in(directory, redis_server.FORGETFUL)
    url = redis_server.url_in(directory)
    try:
        pool = await connection.connect(url)
        await worker_lives(pool)
        async with top(url) as terminal:
            await terminal.rows(lambda rows: "well" in rows)
            server.stop(grace_s=0)
            rows = await terminal.rows(lambda rows: rows[1].startswith("Redis does not answer"))
            assert any("host/1" in row for row in rows), "what was known stays"
            server = redis_server.start_in(directory, redis_server.FORGETFUL)
            await terminal.rows(
                lambda rows: rows[1].startswith("this Redis knows neither a run nor a worker")
            )
        await pool.aclose()
    finally:
        server.stop(grace_s=0)


def test_a_row_is_cut_to_its_columns_whatever_is_in_it() -> None:
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdefg", 6) == "abcde…"
    assert cut("漢字漢字", 6) == "漢字…"
    assert cut("e\u0301" * 6, 6) == "e\u0301" * 6

    ink = Ink(coloured=True)
    assert cut(f"ab{ink.bad('cdef')}gh", 5) == one_line(f"ab{ink.bad('cd…')}")
