"""What runs that nobody goes on with have left in the queue: requests that a new run's workers would play first."""

import asyncio
import json
from pathlib import Path

from pipeline import connection, queue


def given_up(run_dir: Path, *, fresh: bool) -> list[str]:
    """Ids of the runs that were set aside beside `run_dir`, and of the one in it if it is to be forgotten."""
    places = [*run_dir.parent.glob(f"{run_dir.name}-seed*"), *([run_dir] if fresh else [])]
    notes = [place / "run.json" for place in places]
    return [json.loads(note.read_text())["run_id"] for note in notes if note.is_file()]


def withdraw(redis_url: str, run_ids: list[str]) -> int:
    """Ask for nothing more on behalf of these runs; how many requests that were. What was answered stays."""
    return asyncio.run(_withdrawn(redis_url, run_ids))


async def _withdrawn(redis_url: str, run_ids: list[str]) -> int:
    redis = await connection.connect(redis_url)
    try:
        gone = [await queue.withdraw(redis, one, await queue.open_ids(redis, one)) for one in run_ids]
    finally:
        await redis.aclose()
    return sum(map(len, gone))
