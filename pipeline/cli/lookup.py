"""One request, from Redis, or from the directory of its run where Redis has forgotten it."""

import contextlib
from collections.abc import Collection
from pathlib import Path

from redis.asyncio import Redis

from pipeline.cli import finding, stored, stored_judging
from pipeline.cli.finding import FoundJudging, FoundRollout


async def rollout(redis: Redis, request_id: str, run_dirs: Collection[Path]) -> FoundRollout:
    """Redis has the log of grading too, so it comes first. Raises LookupError if neither knows the request."""
    try:
        found = await finding.find_rollout(redis, request_id)
    except LookupError:
        return stored.find(run_dirs, request_id)
    if found.result is None and found.state in ("answered", "dead"):
        with contextlib.suppress(LookupError):
            kept = stored.find(run_dirs, request_id)
            found = kept if kept.result is not None else found
    return found


async def judging(redis: Redis, request_id: str, run_dirs: Collection[Path]) -> FoundJudging:
    """A judge request. Raises LookupError if neither knows it."""
    try:
        found = await finding.find_judging(redis, request_id)
    except LookupError:
        return stored_judging.find(run_dirs, request_id)
    if found.result is None and found.state == "answered":
        with contextlib.suppress(LookupError):
            return stored_judging.find(run_dirs, request_id)
    return found
