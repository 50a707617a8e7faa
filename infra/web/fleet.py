"""Redis's data about runs, workers, judges and engines. A Redis that does not answer becomes one sentence."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from arq.connections import ArqRedis
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.web.run_journal import JsonRow
from pipeline import census, connection
from pipeline.census import KindCensus, RunCensus, RunStatus
from pipeline.cli import show
from pipeline.cli.status import complaints, complaints_of_run, fleet_census, pauses
from pipeline.connection import RedisUnavailable, RedisUnreachable

ANSWER_S = 5.0  # time within which Redis must answer what a page needs
MOST_ASKED = 40  # number of runs of a list whose problems are looked up
PAUSE_S = 2.0  # pause after a failure, before the next try
T = TypeVar("T")
Statuses = dict[str, tuple[RunStatus | None, bool]]
"""The last heartbeat of each run's trainer, and whether that trainer is alive, by run id."""


class RedisReader:
    """A connection to Redis that is made again after it has broken."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._redis: ArqRedis | None = None
        self._lock = asyncio.Lock()
        self._failure = RedisUnreachable("")
        self._failed_at = -PAUSE_S

    async def read(self, question: Callable[[ArqRedis], Awaitable[T]]) -> T:
        """The answer to the question. Raises RedisUnavailable."""
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
    """The last status of every run that Redis knows."""
    found: Statuses = {}
    for run_id in await census.run_ids(redis):
        status, silent_s = await census.last_status(redis, run_id)
        is_alive = status is not None and not status.ended and silent_s < census.STATUS_EXPIRES_S
        found[run_id] = status, is_alive
    return found


async def unwell(redis: Redis, statuses: Statuses) -> JsonRow:
    """The problems of each run and of the fleet, and the paused workers.

    If there are many runs, only those that are active or were heard last are checked: each check takes about twenty commands.
    """

    def order(run_id: str) -> tuple[bool, float]:
        status, is_alive = statuses[run_id]
        return not is_alive, -status.updated_at if status else 0.0

    fleet = await fleet_census(redis, sorted(statuses, key=order)[:MOST_ASKED])
    return {
        "by_run": {run.run_id: list(complaints_of_run(run)) for run in fleet.runs},
        "complaints": complaints(fleet),
        "pauses": pauses(fleet),
    }


async def run_and_fleet(redis: Redis, run_id: str) -> JsonRow:
    """A run, its queue, and its workers, judges and engines."""
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
        "pauses": pauses(fleet),
    }
    return {name: _plain(value) for name, value in shown.items()}


def _kind(jobs: KindCensus | None) -> JsonRow | None:
    if jobs is None:
        return None
    claimed = [show.plain(one) | {"lease": _plain(one.lease)} for one in jobs.claimed]
    return show.plain(jobs) | {"claimed": claimed, "num_outstanding": jobs.num_outstanding}


def _engines(run: RunCensus) -> list[JsonRow]:
    """The engines of the run. Those in routing serve the confirmed version; the version of the others is not known."""
    if run.served is None:
        return []
    routed = [{"url": url, "version": run.served.version, "routed": True} for url in run.served.engines]
    return routed + [{"url": url, "version": None, "routed": False} for url in run.served.quarantined]


def _plain(value: Any) -> Any:
    """The value as plain data with all fields. Messages leave out fields with their defaults, but pages need them."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    names: tuple[str, ...] = getattr(value, "__struct_fields__", ())
    if names:
        return {name: _plain(getattr(value, name)) for name in names}
    return show.plain(value)
