"""The verbs of `python -m pipeline`: find, print, and for the last two, mend."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
from arq.connections import ArqRedis
from redis.exceptions import RedisError

from pipeline import queue
from pipeline.cli import finding, text
from pipeline.cli.finding import Found, State
from pipeline.message import MalformedMessage, unpack_float32s, unpack_int32s
from pipeline.settings import redis_settings

LISTED: tuple[State, ...] = ("dead", "claimed", "queued", "answered")


def run(arguments: argparse.Namespace) -> int:
    """Carry out one parsed command line; returns its exit status."""
    url = arguments.redis or redis_settings().url
    logging.getLogger("arq").setLevel(logging.ERROR)
    try:
        return asyncio.run(_run(arguments, url))
    except (
        BrokenPipeError
    ):  # whoever read has had enough; Python would complain about it once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RedisError, OSError, TimeoutError) as error:
        print(f"Redis at {_without_password(url)} does not answer: {error}", file=sys.stderr)
        return 1
    except MalformedMessage as error:
        print(f"written by another release, or not by this software: {error}", file=sys.stderr)
        return 1
    except (LookupError, ValueError) as error:
        print(error.args[0], file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


async def _run(arguments: argparse.Namespace, url: str) -> int:
    redis = await queue.connect(url, patience_s=0)
    try:
        status = await VERBS[arguments.verb](redis, arguments)
        sys.stdout.flush()
        return status
    finally:
        await redis.aclose()


async def _status(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    fleet = await finding.fleet(redis, await finding.runs(redis, arguments.run))
    complaints = finding.complaints(fleet)
    if arguments.json:
        _print_json({"well": not complaints, "complaints": complaints, "fleet": fleet})
    else:
        print(text.status(fleet, complaints, _ink()))
    return 1 if complaints else 0


async def _ls(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    states = (arguments.state,) if arguments.state else LISTED
    lines = [
        line
        for run_id in await finding.runs(redis, arguments.run)
        for state in states
        for line in await finding.lines(redis, run_id, state, arguments.limit)
    ]
    if arguments.json:
        for line in lines:
            _print_json(line)
    else:
        print(text.listing(lines, _ink()))
    return 0


async def _show(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    found = await finding.find(redis, arguments.id)
    if arguments.json:
        _print_json(_unpacked(found))
    else:
        print(text.found(found, _ink(), full=arguments.full))
    return 0


async def _tail(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    """Until interrupted."""
    following = asyncio.create_task(_follow(redis, arguments))
    # Not by KeyboardInterrupt: a cancellation that comes while Python code runs can get lost in redis-py's
    # time limits.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, following.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await following
    return 0


async def _follow(redis: ArqRedis, arguments: argparse.Namespace) -> None:
    ink = _ink()
    async for line in finding.arrivals(redis, arguments.run, arguments.past):
        if arguments.json:
            _print_json(line)
        else:
            print(text.row(line, ink), flush=True)


async def _requeue(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    return await _mend(redis, arguments, queue.requeue, "requeued")


async def _drop(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    return await _mend(redis, arguments, queue.drop, "dropped")


async def _mend(
    redis: ArqRedis,
    arguments: argparse.Namespace,
    change: Callable[[ArqRedis, str, str], Awaitable[None]],
    done: str,
) -> int:
    """Change one dead request or all of them, and say so.

    One that cannot be changed makes the exit status 1.
    """
    dead = [
        (run_id, letter)
        for run_id in await finding.runs(redis, arguments.run)
        for letter in await finding.dead_letters(redis, run_id)
        if arguments.all or letter.request_id == arguments.id
    ]
    if not (dead or arguments.all):
        raise LookupError(f"{arguments.id} is not among the dead; `ls --state dead` lists them")
    refused = 0
    for run_id, letter in dead:
        outcome, reason = done, ""
        try:
            await change(redis, run_id, letter.request_id)
        except ValueError as error:
            outcome, reason = "left as it was", str(error)
            refused += 1
        if arguments.json:
            _print_json(
                {"request_id": letter.request_id, "run_id": run_id, "outcome": outcome, "reason": reason}
            )
        else:
            tries = finding.count(len(letter.failures), "failed try", "failed tries")
            told = f"{outcome}: {letter.request_id}  {letter.task_id}  run {run_id}, {tries}"
            print(f"{told}; {reason}" if reason else told)
    if not (dead or arguments.json):
        print("nothing is dead")
    return 1 if refused else 0


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


def _ink() -> text.Ink:
    return text.Ink(coloured=sys.stdout.isatty())


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return url if parts.password is None else url.replace(f":{parts.password}@", ":***@")


VERBS = {"status": _status, "ls": _ls, "show": _show, "tail": _tail, "requeue": _requeue, "drop": _drop}
