"""The heartbeat of a trainer or a standalone evaluation: its status every second, to Redis and to the console."""

import asyncio
from collections.abc import Callable

from arq.connections import ArqRedis

from pipeline import census, retry

HEARTBEAT_S = 1.0


class Heartbeat:
    """`python -m pipeline status` shows what it writes."""

    def __init__(
        self,
        redis: ArqRedis,
        status: Callable[[], census.RunStatus],
        *,
        show: Callable[[str], None],
        measure: Callable[[], None] = lambda: None,
    ) -> None:
        """`show` is given a line about the present; `measure` sets metrics."""
        self._redis = redis
        self._status = status
        self._show = show
        self._measure = measure

    async def run(self) -> None:
        """For ever."""
        while True:
            status = self._status()
            self._measure()
            with retry.tolerating_outage():
                await census.beat_run(self._redis, status)
            self._show(line_of(status))
            await asyncio.sleep(HEARTBEAT_S)


def line_of(status: census.RunStatus) -> str:
    """A status in one line, for the console."""
    parts = (
        f"step {status.step}/{status.num_steps}" if status.num_steps else "",
        f"weights v{status.version}" if status.num_steps else "",
        status.phase,
        status.detail,
    )
    return "  ·  ".join(part for part in parts if part)
