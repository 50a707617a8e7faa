"""The verbs of `python -m pipeline`: each reads Redis and prints; `requeue`, `drop` and `forget` also change it."""

import argparse
import asyncio
import contextlib
import gc
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
from arq.connections import ArqRedis
from redis.exceptions import RedisError

from pipeline import census, connection, forgetting, request_store
from pipeline.cli import dead, explain, finding, listing, runs, show, status_text, stored, top
from pipeline.cli.finding import Found
from pipeline.cli.ink import Ink, count
from pipeline.cli.listing import LineFilter, RequestLine, State
from pipeline.cli.status import complaints, fleet_census
from pipeline.connection import RedisUnavailable, RedisUnreachable
from pipeline.message import MalformedMessage, unpack_float32s, unpack_int32s
from pipeline.settings import redis_settings

LISTED: tuple[State, ...] = ("dead", "claimed", "queued", "answered")


def run(arguments: argparse.Namespace) -> int:
    """Carry out one parsed command line; returns its exit status."""
    url = arguments.redis or redis_settings().url
    logging.getLogger("arq").setLevel(logging.ERROR)
    try:
        return asyncio.run(_run(arguments, url))
    except BrokenPipeError:
        # The reader of our pipe has gone. Without this, Python complains again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RedisUnavailable as error:
        return _unavailable(error)
    except (RedisError, OSError, TimeoutError) as error:
        return _unavailable(connection.unavailable(url, error))
    except MalformedMessage as error:
        print(f"written by another release, or not by this software: {error}", file=sys.stderr)
        return 1
    except (LookupError, ValueError) as error:
        print(error.args[0], file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


async def _run(arguments: argparse.Namespace, url: str) -> int:
    run_dir: Path | None = getattr(arguments, "run_dir", None)
    try:
        redis = await connection.connect(url, patience_s=0)
    except RedisUnreachable as error:
        if run_dir is None:
            raise
        print(f"{error}\nonly {run_dir} is read", file=sys.stderr)
        return WITHOUT_REDIS[arguments.verb](arguments, run_dir)
    try:
        status = await VERBS[arguments.verb](redis, arguments)
        sys.stdout.flush()
        return status
    finally:
        await redis.aclose()


async def _status(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    fleet = await fleet_census(redis, await runs.chosen(redis, arguments.run))
    found = complaints(fleet)
    if arguments.json:
        _print_json({"well": not found, "complaints": found, "fleet": fleet})
    else:
        print(status_text.status(fleet, found, _ink()))
    return 1 if found else 0


async def _ls(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    """At most `limit` lines in all; a note on stderr says when there may be more. What only the run's directory has comes last."""
    wanted, states, run_dir = _line_filter(arguments), _states(arguments), arguments.run_dir
    run_ids = await runs.chosen(redis, None if run_dir else arguments.run)
    if run_dir is not None:
        stored.check(run_dir)
        only = arguments.run or stored.run_id_of(run_dir)
        run_ids = [run_id for run_id in run_ids if run_id == only]
    lines: list[RequestLine] = []
    gc.disable()  # otherwise it would walk over thousands of lines again and again
    try:
        for state, run_id in itertools.product(states, run_ids):
            lines += await listing.lines(redis, run_id, state, arguments.limit + 1 - len(lines), wanted)
    finally:
        gc.enable()
    if run_dir is not None:
        known = {line.request_id for line in lines}
        older = stored.lines(run_dir, states, wanted, only_run=arguments.run)
        unknown = (line for line in older if line.request_id not in known)
        lines += itertools.islice(unknown, arguments.limit + 1 - len(lines))
    return _print_lines(lines, arguments)


def _stored_ls(arguments: argparse.Namespace, run_dir: Path) -> int:
    stored.check(run_dir)
    found = stored.lines(run_dir, _states(arguments), _line_filter(arguments), only_run=arguments.run)
    return _print_lines(list(itertools.islice(found, arguments.limit + 1)), arguments)


def _line_filter(arguments: argparse.Namespace) -> LineFilter:
    return LineFilter(
        task=arguments.task,
        worker=arguments.worker,
        group=arguments.group,
        outcome=arguments.outcome,
        before=None if arguments.older_than is None else time.time() - arguments.older_than,
        reward=arguments.reward or "",
    )


def _states(arguments: argparse.Namespace) -> tuple[State, ...]:
    if arguments.state:
        return (arguments.state,)
    return ("answered",) if arguments.reward else LISTED


def _print_lines(lines: list[RequestLine], arguments: argparse.Namespace) -> int:
    is_cut, lines = len(lines) > arguments.limit, lines[: arguments.limit]
    if arguments.json:
        sys.stdout.write(msgspec.json.Encoder().encode_lines(lines).decode())
    else:
        print(listing.text(lines, _ink()))
    if is_cut:
        print(f"only the first {arguments.limit}: --limit, --state and patterns list others", file=sys.stderr)
    return 0


async def _show(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    """From Redis, which has the log of grading too; what it has forgotten, from the run's directory."""
    request_id = arguments.id
    try:
        found = await finding.find(redis, request_id)
    except LookupError:
        return _print_found(
            stored.find(await stored.directories(redis, arguments.run_dir), request_id), arguments
        )
    if found.trajectory is None and found.state in ("answered", "dead"):
        with contextlib.suppress(LookupError):
            kept = stored.find(await stored.directories(redis, arguments.run_dir), request_id)
            found = kept if kept.trajectory is not None else found
    return _print_found(found, arguments)


def _stored_show(arguments: argparse.Namespace, run_dir: Path) -> int:
    return _print_found(stored.find([run_dir], arguments.id), arguments)


def _print_found(found: Found, arguments: argparse.Namespace) -> int:
    if arguments.json:
        _print_json(_unpacked(found))
    else:
        print(show.text(found, _ink(), full=arguments.full))
    return 0


async def _tail(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    """To follow: until interrupted."""
    if not arguments.follow:
        await _follow(redis, arguments)
        return 0
    following = asyncio.create_task(_follow(redis, arguments))
    # Not by KeyboardInterrupt: a cancellation that comes while Python code runs can get lost in redis-py's
    # time limits.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, following.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await following
    return 0


async def _follow(redis: ArqRedis, arguments: argparse.Namespace) -> None:
    ink = _ink()
    async for line in listing.arrivals(redis, arguments.run, arguments.past, follow=arguments.follow):
        if arguments.json:
            _print_json(line)
        else:
            print(listing.row(line, ink), flush=True)


async def _explain(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    return _print_life(await explain.life(redis, arguments.id, arguments.run_dir), arguments)


def _stored_explain(arguments: argparse.Namespace, run_dir: Path) -> int:
    return _print_life(explain.stored_life(arguments.id, run_dir), arguments)


def _print_life(found: explain.Life, arguments: argparse.Namespace) -> int:
    if arguments.json:
        _print_json(found)
    else:
        print(explain.text(found, _ink()))
    return 0


async def _dead(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    letters = await dead.letters(redis, arguments)
    if not arguments.json:
        print(dead.text(letters, time.time(), _ink(), full=arguments.full))
    for run_id, letter in letters if arguments.json else ():
        row = dead.as_json(run_id, letter)
        try:
            request = await request_store.read(redis, letter.request_id)
            shown = request and request.without_calibration()
            row["request"] = _as_text(msgspec.to_builtins(shown, builtin_types=(bytes,)))
        except MalformedMessage as error:
            row |= {"request": None, "unreadable": str(error)}
        _print_json(row)
    return 0


async def _mend(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    """Requeue or drop dead requests, and say so. One that cannot be changed makes the exit status 1."""
    letters = await dead.letters(redis, arguments)
    change, done = dead.CHANGES[arguments.verb]
    told = await dead.change_each(redis, letters, change, done)
    for row, (_, letter) in zip(told, letters, strict=True):
        if arguments.json:
            _print_json(row)
            continue
        tries = count(len(letter.failures), "failed try", "failed tries")
        line = f"{row['outcome']}: {letter.request_id}  {letter.task_id}  run {row['run_id']}, {tries}"
        print(f"{line}; {row['reason']}" if row["reason"] else line)
    if not (letters or arguments.json):
        print("nothing is dead")
    return int(any(row["reason"] for row in told))


async def _forget(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    """Raises ValueError, before anything is deleted, if the trainer of one of the runs is alive."""
    run_ids = [run_id for only in arguments.runs for run_id in await runs.chosen(redis, only)]
    for run_id in () if arguments.force else run_ids:
        status = await census.run_status(redis, run_id)
        if status is not None and not status.ended:
            raise ValueError(f"the trainer of run {run_id} is alive: stop it first, or add --force")
    for run_id in run_ids:
        forgotten = await forgetting.forget(redis, run_id)
        if arguments.json:
            _print_json(forgotten)
        else:
            what = f"{count(forgotten.num_requests, 'request')}, {count(forgotten.num_keys, 'key')}"
            print(f"forgotten: {run_id}  {what}")
    return 0


async def _top(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    if arguments.json:
        return await _status(redis, arguments)
    if sys.stdin.isatty() and sys.stdout.isatty():
        await top.live(redis, arguments.run, every_s=arguments.every)
    else:
        print(await top.frame(redis, arguments.run, _ink()))
    return 0


def _unpacked(found: Found) -> dict[str, Any]:
    """Everything as JSON holds it: token arrays as lists, other bytes as text."""
    plain: dict[str, Any] = msgspec.to_builtins(found, builtin_types=(bytes,))
    for turn in (plain["trajectory"] or {"turns": ()})["turns"]:
        turn["fed"], turn["sampled"] = list(unpack_int32s(turn["fed"])), list(unpack_int32s(turn["sampled"]))
        turn["logprobs"] = list(unpack_float32s(turn["logprobs"]))
    return _as_text(plain)


def _as_text(value: Any) -> Any:
    match value:
        case bytes():
            return value.decode(errors="replace")
        case dict():
            return {name: _as_text(inner) for name, inner in cast(dict[str, Any], value).items()}
        case list() | tuple():
            return [_as_text(inner) for inner in cast(Iterable[Any], value)]
        case _:
            return value


def _print_json(value: Any) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)


def _ink() -> Ink:
    return Ink(coloured=sys.stdout.isatty())


def _unavailable(error: RedisUnavailable) -> int:
    print(error, file=sys.stderr)
    return 1 if isinstance(error, RedisUnreachable) else 2


VERBS = {
    "status": _status,
    "ls": _ls,
    "show": _show,
    "tail": _tail,
    "explain": _explain,
    "top": _top,
    "dead": _dead,
    "requeue": _mend,
    "drop": _mend,
    "forget": _forget,
}

# What a run's directory is enough for.
WITHOUT_REDIS = {"ls": _stored_ls, "show": _stored_show, "explain": _stored_explain}
