"""The web server: its routes, the files of the pages, and its lifetime until a signal."""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from infra import ports
from infra.web import fleet, recipe_page, run_journal, runs, security, step_page, tasks
from infra.web.actions import ActionLog, DeadLetters
from infra.web.export import ExportChoice, export
from infra.web.fleet import RedisReader
from infra.web.rollout_page import RolloutPages, TurnQuery
from infra.web.rollout_table import RolloutQuery
from infra.web.run_journal import JsonRow
from infra.web.runs import ChangeFeed, OpenRun, RunCatalogue, RunChange, RunReader, marks_of
from infra.web.security import json_reply
from infra.web.where_page import WherePages
from pipeline import census
from pipeline.connection import RedisUnavailable
from pipeline.message import MalformedMessage
from pipeline.representation import represented
from pipeline.settings import redis_settings
from pipeline.taskfile import read_facts

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
DEFAULT_ROOT = Path("runs")
log = logging.getLogger("swerve.web")


class RunServer:
    """The replies about runs. Threads read the files, only one at a time for each run."""

    def __init__(self, catalogue: RunCatalogue, redis: RedisReader) -> None:
        self._catalogue = catalogue
        self._redis = redis
        self._rollouts = RolloutPages(redis)
        self._reader = RunReader()
        self._where_pages = WherePages()
        self.feed = ChangeFeed(self._look)

    def routes(self) -> list[web.RouteDef]:
        one_run = "/api/runs/{run}"
        return [
            web.get("/api/runs", self._list),
            web.get(f"{one_run}/series", self._series),
            web.get(f"{one_run}/where", self._where),
            web.get(f"{one_run}/recipe", self._recipe),
            web.get(f"{one_run}/logs/{{name}}", self._log),
            web.get(f"{one_run}/steps/{{step}}", self._step),
            web.get(f"{one_run}/steps/{{step}}/effects", self._effects),
            web.get(f"{one_run}/status", self._status),
            web.get(f"{one_run}/rollouts", self._table),
            web.get(f"{one_run}/rollouts/{{request}}", self._rollout),
            web.get(f"{one_run}/tasks", self._tasks),
            web.get(f"{one_run}/represented", self._represented),
            web.get("/events", self._events),
        ]

    async def close(self, _: web.Application) -> None:
        """Runs at the end of the application, as a signal handler of aiohttp."""
        await self._reader.close()

    async def _list(self, request: web.Request) -> web.Response:
        """Lists the runs, or the one that `only` names. Without Redis it is unknown whether a run is active, and the reply says so."""
        only = request.query.get("only")
        gone, found = "", JsonRow(by_run={}, complaints=[], pauses=[])
        try:
            statuses = await self._redis.read(fleet.last_statuses)
            found = await self._redis.read(lambda redis: fleet.unwell(redis, statuses))
        except (RedisUnavailable, MalformedMessage) as error:
            gone, statuses = str(error), {}
        known = await self._runs(statuses)
        only_in_redis = statuses.keys() - {run.id.partition("~")[0] for run in known.values()}

        def summaries() -> Iterator[JsonRow]:
            for run_id in (*known, *only_in_redis):
                if only not in (None, run_id):
                    continue
                status, is_live = statuses.get(run_id, (None, None if gone else False))
                row = runs.summary(run_id, known.get(run_id), status, is_live=is_live)
                yield row | {"complaints": found["by_run"].get(run_id, [])}

        rows = await asyncio.to_thread(lambda: [*summaries()])
        rows.sort(key=lambda row: (row["started_at"], row["updated_at"], row["id"]), reverse=True)
        shown = {name: found[name] for name in ("complaints", "pauses")}
        return json_reply({"runs": rows, "gone": gone, **shown})

    async def _series(self, request: web.Request) -> web.Response:
        run = await self._run(request)
        after = request.query.get("after")
        with _as_bad_request():
            step = None if not after else _whole("after", after)

        def series() -> JsonRow:
            if step is not None:
                return run_journal.series(run.journal, step)
            return run.kept.reply("series", run.journal.state, lambda: run_journal.series(run.journal))

        shown = await self._read(run, series)
        return json_reply(shown | {"num_steps": run.num_steps})

    async def _where(self, request: web.Request) -> web.Response:
        run = await self._run(request)
        return json_reply(await asyncio.to_thread(self._where_pages.page, run))

    async def _recipe(self, request: web.Request) -> web.Response:
        run, other = await self._run(request), None
        if request.query.get("with"):
            other = (await self._runs(await self._statuses())).get(request.query["with"])
            if other is None:
                raise web.HTTPNotFound(text=f"there is no directory of a run {request.query['with']!r}")
        page = recipe_page.recipe_page
        return json_reply(await asyncio.to_thread(page, run.directory, other and other.directory))

    async def _log(self, request: web.Request) -> web.Response:
        run, before = await self._run(request), request.query.get("before")
        with _as_bad_request():
            end = None if not before else max(0, _whole("before", before))
        with _as_not_found():
            return json_reply(
                await asyncio.to_thread(recipe_page.log_piece, run.directory, request.match_info["name"], end)
            )

    async def _step(self, request: web.Request) -> web.Response:
        run = await self._run(request)
        with _as_bad_request():
            number = _whole("step", request.match_info["step"])
        with _as_not_found():
            return json_reply(await self._read(run, lambda: step_page.step_page(run, number)))

    async def _effects(self, request: web.Request) -> web.Response:
        run = await self._run(request)
        with _as_bad_request():
            number = _whole("step", request.match_info["step"])
        await self._reader.catch_up(run)
        with _as_not_found():
            return json_reply(await asyncio.to_thread(step_page.effects, run, number))

    async def _status(self, request: web.Request) -> web.Response:
        run_id = request.match_info["run"]
        try:
            known = await self._redis.read(census.run_ids)
            if run_id not in known:
                await self._run(request)  # answers 404 unless a directory holds the run
                return json_reply({"gone": f"Redis knows nothing of run {run_id} any more, or never did."})
            return json_reply(await self._redis.read(lambda redis: fleet.run_and_fleet(redis, run_id)))
        except (RedisUnavailable, MalformedMessage) as error:
            return json_reply({"gone": str(error)})

    async def _table(self, request: web.Request) -> web.Response:
        run = await self._run(request)
        with _as_bad_request():
            query = RolloutQuery.of(request.query)
        return json_reply(await self._read(run, lambda: run.table.page(run.rollouts, query)))

    async def _rollout(self, request: web.Request) -> web.Response:
        run = await self._run(request)
        with _as_bad_request():
            part = TurnQuery.of(request.query)
        await self._reader.catch_up(run)
        with _as_not_found():
            shown = await self._rollouts.page(run, request.match_info["request"], part)
            return json_reply(shown | {"reading": run.reading})

    async def _tasks(self, request: web.Request) -> web.Response:
        run = await self._run(request)

        def of_tasks() -> JsonRow:
            facts = read_facts(run.directory)
            state = (run.journal.state, facts)
            return run.kept.reply("tasks", state, lambda: tasks.tasks(run.journal, facts))

        return json_reply(await self._read(run, of_tasks))

    async def _represented(self, request: web.Request) -> web.Response:
        run = await self._run(request)
        kept, journal = run.kept, run.journal
        reply = await self._read(
            run, lambda: kept.reply("represented", journal.state, lambda: _represented(journal))
        )
        return json_reply(reply)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with self.feed.listener() as changes:
            await response.prepare(request)
            await response.write(b": open\n\n")
            with contextlib.suppress(ConnectionError):
                while True:
                    await response.write(await _next_event(changes))
        return response

    async def _run(self, request: web.Request) -> OpenRun:
        run_id = request.match_info["run"]
        found = (await self._runs(await self._statuses())).get(run_id)
        if found is None:
            raise web.HTTPNotFound(text=f"there is no directory of a run {run_id!r}")
        return found

    async def _read(self, run: OpenRun, read: Callable[[], JsonRow]) -> JsonRow:
        """The result of `read` on the part of the run that has been read so far, and the progress of reading."""
        await self._reader.catch_up(run)

        def reading() -> JsonRow:
            with run.lock:
                return read() | {"reading": run.reading}

        return await asyncio.to_thread(reading)

    async def _runs(self, statuses: fleet.Statuses) -> dict[str, OpenRun]:
        heard = [status for status, _ in statuses.values() if status is not None]
        return await asyncio.to_thread(self._catalogue.runs, heard)

    async def _statuses(self) -> fleet.Statuses:
        """The last heartbeats of trainers; none without Redis."""
        try:
            return await self._redis.read(fleet.last_statuses)
        except RedisUnavailable:
            return {}

    async def _look(self) -> runs.Marks:
        statuses = await self._statuses()
        known = await self._runs(statuses)
        return await asyncio.to_thread(marks_of, known, statuses)


def make_app(
    server: RunServer, dead_letters: DeadLetters, *, token: str | None, checks_host: bool
) -> web.Application:
    """The application. `token` and `checks_host` decide who may send requests, and `dead_letters` whether anything can be changed."""
    guard = security.guard(token=token, checks_host=checks_host, allows_actions=dead_letters.allows_actions)
    app = web.Application(middlewares=[guard])
    app.on_response_prepare.append(security.add_headers)
    app.on_cleanup.append(server.close)
    app.add_routes([*server.routes(), *dead_letters.routes()])
    app.router.add_get("/", _index)
    app.router.add_static("/static", STATIC)
    return app


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal, or export; returns the exit status."""
    logging.basicConfig(format="%(message)s")
    try:
        token = security.token_from(arguments.token_file, arguments.host)
        if arguments.export is not None:
            return asyncio.run(_export(arguments))
        if arguments.port:
            fix = "stop it or give another --port"
            ports.check_free(arguments.port, host=arguments.host, needed_by="web", fix=fix)
        action_log = None if arguments.allow_actions is None else ActionLog(arguments.allow_actions)
        return asyncio.run(_serve(arguments, token, action_log))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


async def _serve(arguments: argparse.Namespace, token: str | None, action_log: ActionLog | None) -> int:
    async with _listening(arguments, arguments.host, arguments.port, token, action_log) as port:
        name = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        print(f"http://{name}:{port}/{'' if token is None else '?token=... (from --token-file)'}", flush=True)
        await _until_signal()
    return 0


async def _export(arguments: argparse.Namespace) -> int:
    choice = ExportChoice.of(arguments.export, arguments.run, arguments.where, arguments.rollouts)
    async with (
        _listening(arguments, "127.0.0.1", 0, None, None) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        print(await export(session, choice, STATIC))
    return 0


@contextlib.asynccontextmanager
async def _listening(
    arguments: argparse.Namespace, host: str, port: int, token: str | None, action_log: ActionLog | None
) -> AsyncGenerator[int, None]:
    """Serves during the block; yields the port."""
    redis = RedisReader(arguments.redis or redis_settings().url)
    server = RunServer(RunCatalogue(arguments.run_dir or [DEFAULT_ROOT]), redis)
    app = make_app(
        server, DeadLetters(redis, action_log), token=token, checks_host=security.is_loopback(host)
    )
    # Open event streams never end by themselves.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
        await redis.close()


async def _until_signal() -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    await stop.wait()


def _represented(journal: run_journal.RunJournal) -> JsonRow:
    found = represented(journal.episodes.rows)
    return msgspec.structs.asdict(found) | {"warnings": found.warnings}


async def _index(_: web.Request) -> web.StreamResponse:
    return web.FileResponse(STATIC / INDEX)


async def _next_event(changes: asyncio.Queue[RunChange]) -> bytes:
    """The next change, or a comment that keeps the connection open."""
    try:
        change = await asyncio.wait_for(changes.get(), runs.KEEP_OPEN_S)
    except TimeoutError:
        return b": still here\n\n"
    data = msgspec.json.encode({"run": change.run, "kind": change.kind})
    return b"event: change\ndata: " + data + b"\n\n"


def _whole(parameter: str, text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 15):
        raise ValueError(f"{parameter}: {text!r} is not a whole number; give one such as 3")
    return int(text)


@contextlib.contextmanager
def _as_not_found() -> Any:
    try:
        yield
    except LookupError as error:
        raise web.HTTPNotFound(text=str(error.args[0])) from error


@contextlib.contextmanager
def _as_bad_request() -> Any:
    try:
        yield
    except ValueError as error:
        raise web.HTTPBadRequest(text=str(error)) from error
