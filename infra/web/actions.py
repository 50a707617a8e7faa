"""Dead letters of a run: the list that everybody sees, and requeue and drop if `--allow-actions` permits them.

Each action is written to a log before it is carried out, and its outcome afterwards: an action that cannot be logged is not carried out.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from arq.connections import ArqRedis

from infra.web.fleet import RedisReader
from infra.web.run_journal import JsonRow
from infra.web.security import json_reply
from pipeline import deadletters
from pipeline.cli import dead
from pipeline.cli.dead import DeadRequest
from pipeline.connection import RedisUnavailable
from pipeline.kinds import KINDS
from pipeline.message import MalformedMessage

MAX_AT_ONCE = 500  # Redis carries out this many well within its reply deadline
log = logging.getLogger("swerve.web")


class ChosenRequests(msgspec.Struct, forbid_unknown_fields=True):
    """The body of an action."""

    request_ids: list[str]


class ActionLog:
    """A file with a JSON line for each requested action, and one for its outcome."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be written."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def write(self, row: JsonRow) -> None:
        line = msgspec.json.encode({"at": time.time(), **row})
        with self._path.open("ab") as file:
            file.write(line + b"\n")
        log.warning("%s", line.decode())


class DeadLetters:
    """The routes for dead letters. Without a log nothing can be changed."""

    def __init__(self, redis: RedisReader, action_log: ActionLog | None) -> None:
        self._redis = redis
        self._log = action_log

    @property
    def allows_actions(self) -> bool:
        return self._log is not None

    def routes(self) -> list[web.RouteDef]:
        place = "/api/runs/{run}/dead"
        return [web.get(place, self._list), web.post(f"{place}/{{action:requeue|drop}}", self._change)]

    async def _list(self, request: web.Request) -> web.Response:
        run_id = request.match_info["run"]
        try:
            found = await self._redis.read(lambda redis: _dead_requests(redis, run_id))
        except RedisUnavailable as error:
            return json_reply({"gone": str(error)})
        rows = [dead.as_json(one) for one in found]
        return json_reply({"dead": rows, "allows_actions": self.allows_actions})

    async def _change(self, request: web.Request) -> web.Response:
        assert self._log is not None, "the guard lets no action through"
        chosen = _chosen(await request.read())
        run_id, action = request.match_info["run"], request.match_info["action"]
        asked: JsonRow = {
            "address": request.remote,
            "browser": request.headers.get("User-Agent", ""),
            "run": run_id,
            "action": action,
            "request_ids": chosen.request_ids,
        }
        await asyncio.to_thread(self._log.write, asked)
        change, done = dead.CHANGES[action]

        async def change_chosen(redis: ArqRedis) -> list[dict[str, str]]:
            found = await _dead_requests(redis, run_id, chosen.request_ids)
            told = await dead.change_each(redis, found, change, done)
            gone = set(chosen.request_ids) - {one.letter.request_id for one in found}
            return told + [_no_longer_dead(run_id, request_id) for request_id in sorted(gone)]

        try:
            changed = await self._redis.read(change_chosen)
        except (RedisUnavailable, MalformedMessage) as error:
            await asyncio.to_thread(self._log.write, {"run": run_id, "action": action, "failed": str(error)})
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        await asyncio.to_thread(self._log.write, {"run": run_id, "action": action, "changed": changed})
        return json_reply({"changed": changed})


async def _dead_requests(
    redis: ArqRedis, run_id: str, only: Sequence[str] | None = None
) -> list[DeadRequest]:
    """The dead requests of both kinds, newest first."""
    wanted = set(only or ())
    found = [
        DeadRequest(run_id, kind, letter)
        for kind in KINDS
        for letter in (await deadletters.listed(redis, run_id, kind)).values()
        if only is None or letter.request_id in wanted
    ]
    return sorted(found, key=lambda one: -one.letter.died_at)


def _chosen(body: bytes) -> ChosenRequests:
    try:
        chosen = msgspec.json.decode(body, type=ChosenRequests)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise web.HTTPBadRequest(text=f"the body: {error}; give {{request_ids: [ID, ...]}}") from error
    if not 0 < len(chosen.request_ids) <= MAX_AT_ONCE:
        raise web.HTTPBadRequest(
            text=f"request_ids: there are {len(chosen.request_ids)}; give 1 to {MAX_AT_ONCE}"
        )
    return chosen


def _no_longer_dead(run_id: str, request_id: str) -> dict[str, Any]:
    reason = "it is not, or no longer, among the dead"
    return {"request_id": request_id, "run_id": run_id, "outcome": "left as it was", "reason": reason}
