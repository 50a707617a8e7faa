"""The verbs of `python -m pipeline`: each reads Redis and prints; `requeue`, `drop` and `forget` also change it."""

import argparse
import asyncio
import contextlib
import gc
import itertools
import logging
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arq.connections import ArqRedis
from redis.exceptions import RedisError

from pipeline import census, connection, request_store
from pipeline.cli import dead, explain, finding, listing, show, status
from pipeline.cli.finding import FoundJudging, FoundRollout
from pipeline.cli.listing import LineFilter, RequestLine, State
from pipeline.commandline import MISUSE, status_of
from pipeline.connection import RedisUnavailable, RedisUnreachable
from pipeline.journal.reading import identity
from pipeline.judge import judge_request_id, judged_rollout_id
from pipeline.kinds import JUDGE, KINDS, ROLLOUT, AnyKind
from pipeline.message import MalformedMessage, json_line
from pipeline.request import RolloutRequest
from pipeline.rollout_store.record import TrainedTokens
from pipeline.screen import Ink, count, has_colours, one_line
from pipeline.settings import check_variables, redis_settings

NOTHING_KNOWN = 3  # exit status of `status` where Redis knows neither a run nor a worker
LISTED: tuple[State, ...] = ("dead", "claimed", "queued", "answered")


def run(arguments: argparse.Namespace) -> int:
    """Carry out one parsed command line; returns its exit status."""
    try:
        check_variables()
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISUSE
    url = arguments.redis or redis_settings().url
    logging.getLogger("arq").setLevel(logging.ERROR)
    try:
        return asyncio.run(_run(arguments, url))
    except RedisUnavailable as error:
        return _unavailable(error)
    except (RedisError, OSError, TimeoutError) as error:
        return _unavailable(connection.unavailable(url, error))
    except MalformedMessage as error:
        print(one_line(f"written by another release, or not by this software: {error}"), file=sys.stderr)
        return 1
    except (LookupError, ValueError) as error:
        print(one_line(str(error.args[0])), file=sys.stderr)
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
    fleet = await status.fleet_census(redis, await listing.chosen_runs(redis, arguments.run))
    found = status.complaints(fleet)
    if arguments.json:
        well = not (found or fleet.is_empty)
        _print_json({"well": well, "complaints": found, "fleet": fleet})
    else:
        print(status.text_of_fleet(fleet, found, _ink()))
    return 1 if found else NOTHING_KNOWN if fleet.is_empty else 0


async def _ls(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    """Prints `limit` lines at most; a note on stderr says when there may be more. Requests that only the run's directory has come last."""
    wanted, states, run_dir = _line_filter(arguments), _states(arguments), arguments.run_dir
    kind = _kind(arguments)
    run_ids = await listing.chosen_runs(redis, None if run_dir else arguments.run)
    if run_dir is not None:
        only = arguments.run or identity(run_dir).run_id
        run_ids = [run_id for run_id in run_ids if run_id == only]
    lines: list[RequestLine] = []
    gc.disable()  # otherwise it would walk over thousands of lines again and again
    try:
        for state, run_id in itertools.product(states, run_ids):
            room = arguments.limit + 1 - len(lines)
            lines += await listing.lines(redis, run_id, state, room, wanted, kind)
    finally:
        gc.enable()
    if run_dir is not None:
        known = {line.request_id for line in lines}
        older = _stored_lines(arguments, run_dir)
        unknown = (line for line in older if line.request_id not in known)
        lines += itertools.islice(unknown, arguments.limit + 1 - len(lines))
    return _print_lines(lines, arguments)


def _stored_ls(arguments: argparse.Namespace, run_dir: Path) -> int:
    found = _stored_lines(arguments, run_dir)
    return _print_lines(list(itertools.islice(found, arguments.limit + 1)), arguments)


def _stored_lines(arguments: argparse.Namespace, run_dir: Path) -> Iterator[RequestLine]:
    """The stored requests. Raises LookupError for a directory without any."""
    of_kind = finding.stored_judging_lines if arguments.kind == JUDGE.name else finding.stored_lines
    return of_kind(run_dir, _states(arguments), _line_filter(arguments), only_run=arguments.run)


def _kind(arguments: argparse.Namespace) -> AnyKind:
    return next(kind for kind in KINDS if kind.name == arguments.kind)


def _line_filter(arguments: argparse.Namespace) -> LineFilter:
    """Raises ValueError for a filter that no request of the kind can pass."""
    if arguments.reward and arguments.kind != ROLLOUT.name:
        raise ValueError("--reward: only rollouts have one; leave --kind out")
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
        sys.stdout.writelines(f"{json_line(line)}\n" for line in lines)
    else:
        print(listing.text(lines, _ink()))
    if is_cut:
        print(f"only the first {arguments.limit}: --limit, --state and patterns list others", file=sys.stderr)
    return 0


async def _show(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    request_id, run_dirs = arguments.id, await finding.directories(redis, arguments.run_dir)
    if judged_rollout_id(request_id) is not None:
        return _print_judging(await finding.judging(redis, request_id, run_dirs), arguments)
    found = await finding.rollout(redis, request_id, run_dirs)
    judging: FoundJudging | None = None
    with contextlib.suppress(LookupError):
        judging = await finding.judging(redis, judge_request_id(request_id), run_dirs)
    return _print_rollout(found, judging, finding.trained_tokens(run_dirs, request_id), arguments)


def _stored_show(arguments: argparse.Namespace, run_dir: Path) -> int:
    request_id = arguments.id
    if judged_rollout_id(request_id) is not None:
        return _print_judging(finding.stored_judging([run_dir], request_id), arguments)
    judging: FoundJudging | None = None
    with contextlib.suppress(LookupError):
        judging = finding.stored_judging([run_dir], judge_request_id(request_id))
    trained = finding.trained_tokens([run_dir], request_id)
    return _print_rollout(finding.stored_rollout([run_dir], request_id), judging, trained, arguments)


def _print_rollout(
    found: FoundRollout,
    judging: FoundJudging | None,
    trained: TrainedTokens | None,
    arguments: argparse.Namespace,
) -> int:
    if arguments.json:
        judged = None if judging is None else show.judging_json(judging)
        tokens = None if trained is None else show.tokens_json(trained)
        _print_json(show.rollout_json(found) | {"judging": judged, "trained": tokens})
        return 0
    print(show.rollout_text(found, judging, _ink(), full=arguments.full))
    if trained is not None and found.result is not None:
        print(f"\n{show.tokens_text(trained, found.result.turns, _ink())}")
    return 0


def _print_judging(found: FoundJudging, arguments: argparse.Namespace) -> int:
    if arguments.json:
        _print_json(show.judging_json(found))
    else:
        print(show.judging_text(found, _ink(), full=arguments.full))
    return 0


async def _tail(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    """Prints the last results; with --follow it continues until interrupted."""
    if not arguments.follow:
        await _follow(redis, arguments)
        return 0
    following = asyncio.create_task(_follow(redis, arguments), name="follow trajectories")
    # KeyboardInterrupt would not do: a cancellation that arrives while Python code runs can get lost in redis-py's
    # time limits.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, following.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await following
    return 0


async def _follow(redis: ArqRedis, arguments: argparse.Namespace) -> None:
    ink = _ink()
    newest = listing.arrivals(redis, arguments.run, arguments.past, _kind(arguments), follow=arguments.follow)
    async for line in newest:
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
    found = await dead.dead_requests(redis, arguments)
    if not arguments.json:
        print(dead.text(found, time.time(), _ink(), full=arguments.full))
    for one in found if arguments.json else ():
        row = dead.as_json(one)
        try:
            request = await request_store.read(redis, one.letter.request_id, one.kind)
            shown = request.without_calibration() if isinstance(request, RolloutRequest) else request
            row["request"] = show.plain(shown)
        except MalformedMessage as error:
            row |= {"request": None, "unreadable": str(error)}
        _print_json(row)
    return 0


async def _mend(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    """Requeues or drops dead requests, and reports it. One that cannot be changed makes the exit status 1."""
    found = await dead.dead_requests(redis, arguments)
    change, done = dead.CHANGES[arguments.verb]
    told = await dead.change_each(redis, found, change, done)
    for row, one in zip(told, found, strict=True):
        if arguments.json:
            _print_json(row)
            continue
        letter = one.letter
        tries = count(len(letter.failures), "failed try", "failed tries")
        line = f"{row['outcome']}: {letter.request_id}  {letter.task_id}  run {row['run_id']}, {tries}"
        print(one_line(f"{line}; {row['reason']}" if row["reason"] else line))
    if not (found or arguments.json):
        print("nothing is dead")
    return int(any(row["reason"] for row in told))


async def _forget(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    """Deletes runs. Raises ValueError, before anything is deleted, if the trainer of one of them is alive."""
    run_ids = [run_id for only in arguments.runs for run_id in await listing.chosen_runs(redis, only)]
    for run_id in () if arguments.force else run_ids:
        status = await census.run_status(redis, run_id)
        if status is not None and not status.ended:
            raise ValueError(f"the trainer of run {run_id} is alive: stop it first, or add --force")
    for run_id in run_ids:
        forgotten = await dead.forget(redis, run_id)
        if arguments.json:
            _print_json(forgotten)
        else:
            what = f"{count(forgotten.num_requests, 'request')}, {count(forgotten.num_keys, 'key')}"
            print(one_line(f"forgotten: {run_id}  {what}"))
    return 0


async def _top(redis: ArqRedis, arguments: argparse.Namespace) -> int:
    if arguments.json:
        return await _status(redis, arguments)
    if sys.stdin.isatty() and sys.stdout.isatty():
        await status.live(redis, arguments.run, every_s=arguments.every)
    else:
        print(await status.frame(redis, arguments.run, _ink()))
    return 0


def _print_json(value: Any) -> None:
    print(json_line(value), flush=True)


def _ink() -> Ink:
    return Ink(coloured=has_colours(sys.stdout))


def _unavailable(error: RedisUnavailable) -> int:
    print(error, file=sys.stderr)
    return status_of(error)


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

# The verbs that work with a run's directory alone.
WITHOUT_REDIS = {"ls": _stored_ls, "show": _stored_show, "explain": _stored_explain}
