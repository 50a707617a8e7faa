"""How long a page of the rollouts of a long run takes: `python -m benchmarks.web_table [--json] [--short]`.

The pages of a run with 100,000 rollouts are served as `swerve web` serves them. Each reply to a browser is compared with 200 ms,
which is what we allow, and with the same rows from SQLite in memory, which has them in a table without an index and sends nothing.
"""

import asyncio
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import long_run
from benchmarks.report import Comparison, compared, main, p50, p95, shuffled

NO_REDIS = "redis://127.0.0.1:1/0"  # the directories alone are shown
ALLOWED_MS = 200.0
NUM_ROUNDS, NUM_ROUNDS_SHORT, NUM_ROLLOUTS_SHORT = 30, 2, 2_000
PAGE_ROWS = 100
WAIT_S = 0.2

COLUMNS = ("request_id", "group_id", "task_id", "num_turns", "reward", "finished_at")


@dataclass(frozen=True, slots=True)
class Look:
    """What a reader looks for: as the parameters of the page, and as the end of the same query in SQL."""

    name: str
    parameters: dict[str, str | int]
    sql: str


LOOKS = (
    Look("the newest", {}, "ORDER BY finished_at DESC"),
    Look(
        "those that solved a task, longest first",
        {"task": "task-07", "reward": "1", "sort": "-num_turns"},
        "WHERE task_id LIKE '%task-07%' AND reward = 1 ORDER BY num_turns DESC",
    ),
    Look("by group, the eighth page", {"sort": "group_id", "page": 7}, "ORDER BY group_id"),
)


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address of the pages of this run, or of a folder of runs."""
    words = [
        sys.executable,
        "-m",
        "infra.web",
        "--run-dir",
        str(directory),
        "--port",
        "0",
        "--redis",
        NO_REDIS,
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


async def _whole(session: aiohttp.ClientSession, path: str) -> None:
    """Return when the server has read the run."""
    while (await _page(session, path, {}))["reading"] is not None:  # noqa: ASYNC110 - another process reads it
        await asyncio.sleep(WAIT_S)


async def _page(session: aiohttp.ClientSession, path: str, parameters: dict[str, str | int]) -> Any:
    async with session.get(path, params=parameters | {"page_size": PAGE_ROWS}) as response:
        return json.loads(await response.read())


def _in_sqlite(num_rollouts: int) -> sqlite3.Connection:
    """The columns that are looked at, in memory."""
    database = sqlite3.connect(":memory:")
    database.execute(f"CREATE TABLE rollouts ({', '.join(COLUMNS)})")
    rows = (long_run.told(number) for number in range(num_rollouts))
    marks = ", ".join("?" * len(COLUMNS))
    database.executemany(
        f"INSERT INTO rollouts VALUES ({marks})", ([row[name] for name in COLUMNS] for row in rows)
    )
    return database


def _selected(database: sqlite3.Connection, look: Look) -> list[dict[str, Any]]:
    offset = PAGE_ROWS * int(look.parameters.get("page", 0))
    rows = database.execute(f"SELECT * FROM rollouts {look.sql} LIMIT {PAGE_ROWS} OFFSET {offset}")
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


@dataclass(slots=True)
class Took:
    """Milliseconds, by round."""

    ours: list[list[float]] = field(default_factory=list[list[float]])
    sqlite: list[list[float]] = field(default_factory=list[list[float]])


async def measure(address: str, num_rollouts: int, num_rounds: int) -> list[Took]:
    """Measures each look. Each round has all of them in random order, after one round that is not counted."""
    path, database = f"/api/runs/{long_run.RUN}/rollouts", _in_sqlite(num_rollouts)
    found = [Took() for _ in LOOKS]
    async with aiohttp.ClientSession(address, raise_for_status=True) as session:
        await _whole(session, path)
        for number in range(num_rounds + 1):
            for look, took in shuffled(zip(LOOKS, found, strict=True)):
                began = time.perf_counter()
                shown = (await _page(session, path, look.parameters))["rows"]
                replied = time.perf_counter()
                selected = _selected(database, look)
                ended = time.perf_counter()
                for ours, theirs in zip(shown, selected, strict=True):
                    assert ours["num_turns"] == theirs["num_turns"], look.name
                if number:
                    took.ours.append([1000 * (replied - began)])
                    took.sqlite.append([1000 * (ended - replied)])
    return found


async def web_table(short: bool) -> list[Comparison]:
    num_rollouts = NUM_ROLLOUTS_SHORT if short else long_run.NUM_ROLLOUTS
    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / long_run.RUN
        await asyncio.to_thread(long_run.write, run_dir, num_rollouts)
        with served(run_dir) as address:
            found = await measure(address, num_rollouts, NUM_ROUNDS_SHORT if short else NUM_ROUNDS)
    for look, took in zip(LOOKS, found, strict=True):
        allowed = [[ALLOWED_MS]] * len(took.ours)
        unit = f"ms for {PAGE_ROWS} of {num_rollouts:,} rollouts: {look.name}"
        comparisons += [
            compared("web_table", took.ours, allowed, p95, rival_name="200 ms", unit=f"{unit}, p95"),
            compared("web_table", took.ours, took.sqlite, p50, rival_name="SQLite", unit=unit),
        ]
    return comparisons


if __name__ == "__main__":
    sys.exit(main("web_table", __doc__, web_table))
