"""Requests of abandoned runs that are still in the queue: workers would play them before those of a new run."""

import asyncio
import json
from pathlib import Path

from pipeline import connection, queue
from pipeline.kinds import KINDS


def abandoned_runs(run_dir: Path, *, fresh: bool) -> list[str]:
    """Ids of the runs that were set aside beside `run_dir`, and with `fresh` also of the run in it."""
    places = [*run_dir.parent.glob(f"{run_dir.name}-seed*"), *([run_dir] if fresh else [])]
    notes = [place / "run.json" for place in places]
    return [json.loads(note.read_text())["run_id"] for note in notes if note.is_file()]


def withdraw(redis_url: str, run_ids: list[str]) -> int:
    """Cancel the outstanding requests of these runs; return how many there were. Finished trajectories stay."""
    return asyncio.run(_withdraw(redis_url, run_ids))


async def _withdraw(redis_url: str, run_ids: list[str]) -> int:
    redis = await connection.connect(redis_url)
    try:
        gone = [
            await queue.withdraw(redis, run_id, await queue.open_ids(redis, run_id, kind), kind)
            for run_id in run_ids
            for kind in KINDS
        ]
    finally:
        await redis.aclose()
    return sum(map(len, gone))
