"""What Redis says: of runs, of workers, judges and engines. A Redis that does not answer is one sentence."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from arq.connections import ArqRedis
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.web.journal_files import JsonRow
from pipeline import census, connection
from pipeline.census import KindCensus, RunCensus, RunStatus
from pipeline.cli import show_json
from pipeline.cli.status import complaints, fleet_census
from pipeline.connection import RedisUnavailable, RedisUnreachable

ANSWER_S = 5.0  # within which Redis must answer what a page needs
PAUSE_S = 2.0  # after a failure, before the next try
T = TypeVar("T")
Statuses = dict[str, tuple[RunStatus | None, bool]]
"""By run id, the last heartbeat of its trainer, and whether that trainer is alive."""


class RedisReader:
    """A connection to Redis that may break and come back."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._redis: ArqRedis | None = None
        self._lock = asyncio.Lock()
        self._failure = RedisUnreachable("")
        self._failed_at = -PAUSE_S

    async def read(self, question: Callable[[ArqRedis], Awaitable[T]]) -> T:
        """What the question finds out. Raises RedisUnavailable."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await question(await self._connected())
        except (RedisError, OSError, TimeoutError) as error:
            raise connection.unavailable(self._url, error) from error

    async def close(self) -> None:
        if self._redis is not None:
            await self._redis.aclose()

    async def _connected(self) -> ArqRedis:
        async with self._lock:
            if self._redis is None:
                if time.monotonic() - self._failed_at < PAUSE_S:
                    raise self._failure
                try:
                    self._redis = await connection.connect(self._url, patience_s=0)
                except RedisUnavailable as error:
                    self._failure, self._failed_at = RedisUnreachable(str(error)), time.monotonic()
                    raise
        return self._redis


async def last_statuses(redis: Redis) -> Statuses:
    """Of every run that Redis knows."""
    found: Statuses = {}
    for run_id in await census.run_ids(redis):
        status, silent_s = await census.last_status(redis, run_id)
        is_alive = status is not None and not status.ended and silent_s < census.STATUS_EXPIRES_S
        found[run_id] = status, is_alive
    return found


async def run_and_fleet(redis: Redis, run_id: str) -> JsonRow:
    """A run, its queue, and the workers, judges and engines that it has."""
    fleet = await fleet_census(redis, [run_id])
    run = fleet.runs[0]
    shown: JsonRow = {
        "run": run.status,
        "has_trainer": run.has_trainer,
        "silent_s": run.silent_s,
        "admission": run.status.admission if run.status else "",
        "queue": _kind(run.rollouts),
        "judging": _kind(run.judging),
        "scoring": run.scoring,
        "lags": run.lags,
        "learned": run.learned,
        "engines": _engines(run),
        "confirmed_at": run.served.confirmed_at if run.served else None,
        "workers": fleet.workers,
        "judges": fleet.judges,
        "silent": fleet.silent,
        "complaints": complaints(fleet),
    }
    return {name: _plain(value) for name, value in shown.items()}


def _kind(jobs: KindCensus | None) -> JsonRow | None:
    if jobs is None:
        return None
    claimed = [show_json.plain(one) | {"lease": _plain(one.lease)} for one in jobs.claimed]
    return show_json.plain(jobs) | {"claimed": claimed, "num_outstanding": jobs.num_outstanding}


def _engines(run: RunCensus) -> list[JsonRow]:
    """Those in routing serve the confirmed version; of the others no version is known."""
    if run.served is None:
        return []
    routed = [{"url": url, "version": run.served.version, "routed": True} for url in run.served.engines]
    return routed + [{"url": url, "version": None, "routed": False} for url in run.served.quarantined]


def _plain(value: Any) -> Any:
    """Messages leave out fields with their defaults; pages are given all of them."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    names: tuple[str, ...] = getattr(value, "__struct_fields__", ())
    if names:
        return {name: _plain(getattr(value, name)) for name in names}
    return show_json.plain(value)
