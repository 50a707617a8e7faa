"""What the command line finds in Redis, as plain values. Reads only."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import msgspec
from redis.asyncio import Redis

from pipeline import census, deadletters, keys, queue, request_store, stream
from pipeline.census import Claimed, Queued, RunCensus, WorkerStatus
from pipeline.deadletters import AttemptFailure, DeadLetter
from pipeline.message import MalformedMessage
from pipeline.queue import Lease
from pipeline.request import RolloutRequest
from pipeline.request_store import Label
from pipeline.stream import Delivery
from pipeline.trajectory import Trajectory, TrajectoryHead

State = Literal["queued", "claimed", "answered", "dead", "lost", "withdrawn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Everything `status` speaks of."""

    workers: tuple[WorkerStatus, ...]
    silent: dict[str, float]  # worker to when it was last heard, Unix seconds
    runs: tuple[RunCensus, ...]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One request in a list. Ten thousand are made while somebody waits."""

    run_id: str
    request_id: str
    state: State
    task_id: str
    purpose: str
    at: float  # Unix seconds: enqueued, claimed, finished or died
    detail: str  # of its state: when due, phase and turn, outcome, last failure
    worker: str = ""
    attempt: int = 0
    reward: float | None = None
    group_id: str = ""
    outcome: str = ""
    head: TrajectoryHead | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which lines to list: patterns as the shell has them; an empty one lets everything through."""

    task: str = ""
    worker: str = ""
    group: str = ""
    outcome: str = ""
    before: float | None = None  # Unix seconds: only what is older

    def lets_through(self, line: Line) -> bool:
        wanted = (
            (self.task, line.task_id),
            (self.worker, line.worker),
            (self.group, line.group_id),
            (self.outcome, line.outcome),
        )
        if self.before is not None and line.at >= self.before:
            return False
        return all(not pattern or fnmatchcase(value, pattern) for pattern, value in wanted)


ANYTHING = Wanted()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything known of one request. `unreadable` says why its stored form cannot be shown."""

    request_id: str
    state: State
    request: RolloutRequest | None
    lease: Lease | None
    trajectory: Trajectory | None
    failures: tuple[AttemptFailure, ...]
    unreadable: str = ""


async def fleet(redis: Redis, run_ids: list[str]) -> Fleet:
    workers, silent = await census.workers(redis)
    return Fleet(
        workers=tuple(workers),
        silent=silent,
        runs=tuple([await census.run_census(redis, run_id) for run_id in run_ids]),
    )


def complaints(fleet: Fleet) -> list[str]:
    """Why the fleet is unwell, a sentence each; empty if it is well."""
    found: list[str] = []
    for run in fleet.runs:
        num_open = run.queued + len(run.claimed) + run.unread + run.unacknowledged
        if run.dead:
            found.append(f"run {run.run_id} has {count(run.dead, 'dead request')}: `dead` lists them")
        if run.malformed:
            found.append(f"run {run.run_id} has {count(run.malformed, 'answer')} that could not be read")
        if run.unreadable:
            found.append(f"run {run.run_id} announced weights that cannot be read: {run.unreadable}")
        if (run.status is None or run.status.ended) and num_open:
            found.append(f"run {run.run_id} has no trainer alive, but {count(num_open, 'open request')}")
    num_queued = sum(run.queued for run in fleet.runs)
    if num_queued and not fleet.workers:
        found.append(f"no worker is alive, but {count(num_queued, 'request')} queued")
    if fleet.workers and all(worker.paused for worker in fleet.workers):
        found.append(f"every worker is paused, the first because {fleet.workers[0].paused}")
    without = [worker for worker in fleet.workers if worker.set_aside]
    if without:
        first = f"the first because {without[0].set_aside}"
        found.append(f"{count(len(without), 'worker')} set something aside, {first}")
    return found


def count(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


async def runs(redis: Redis, only: str | None) -> list[str]:
    """Ids of the runs to look at. Raises LookupError if there is no run of that name."""
    known = await census.run_ids(redis)
    if only is not None and only not in known:
        raise LookupError(f"no run {only}; there is {', '.join(known) or 'none at all'}")
    return known if only is None else [only]


async def lines(redis: Redis, run_id: str, state: State, limit: int, wanted: Wanted = ANYTHING) -> list[Line]:
    """At most `limit` requests of a run in one state: dead and answered newest first, others oldest first."""
    found: list[Line] = []
    takes_all = wanted == ANYTHING
    async for line in _all_lines(redis, run_id, state):
        if takes_all or wanted.lets_through(line):
            found.append(line)
        if len(found) >= limit:
            break
    return found


async def _all_lines(redis: Redis, run_id: str, state: State) -> AsyncIterator[Line]:
    match state:
        case "dead":
            letters = await dead_letters(redis, run_id)
            for letter in sorted(letters, key=lambda letter: -letter.died_at):
                yield _dead(run_id, letter)
        case "answered":
            async for delivery in stream.heads_backwards(redis, run_id):
                yield head_line(delivery.head)
        case "claimed":
            for owed in await census.open_requests(redis, run_id):
                if isinstance(owed, Claimed):
                    yield _claimed(run_id, owed)
        case _:
            waiting = [one for one in await census.open_requests(redis, run_id) if isinstance(one, Queued)]
            labels = await request_store.labels(redis, [one.request_id for one in waiting])
            for one, label in zip(waiting, labels, strict=True):
                yield _queued(run_id, one, label)


async def dead_letters(redis: Redis, run_id: str) -> list[DeadLetter]:
    return list((await deadletters.listed(redis, run_id)).values())


def head_line(head: TrajectoryHead) -> Line:
    return Line(
        run_id=head.run_id,
        request_id=head.request_id,
        state="answered",
        task_id=head.task_id,
        purpose=head.purpose,
        at=head.finished_at,
        detail=f"{head.outcome}, {count(head.num_turns, 'turn')}",
        worker=head.worker,
        attempt=head.attempt,
        reward=head.reward,
        group_id=head.group_id,
        outcome=head.outcome,
        head=head,
    )


def _dead(run_id: str, letter: DeadLetter) -> Line:
    last = letter.failures[-1] if letter.failures else None
    return Line(
        run_id=run_id,
        request_id=letter.request_id,
        state="dead",
        task_id=letter.task_id,
        purpose=letter.purpose,
        group_id=letter.group_id,
        at=letter.died_at,
        detail=f"{letter.kind}, {last.boundary}: {last.message}" if last else "no failure was recorded",
        worker=last.worker if last else "",
        attempt=last.attempt if last else 0,
        outcome=f"failed:{last.boundary}" if last else "",
    )


def _claimed(run_id: str, found: Claimed) -> Line:
    return Line(
        run_id=run_id,
        request_id=found.request_id,
        state="claimed",
        task_id=found.task_id,
        purpose=found.purpose,
        at=found.lease.claimed_at,
        detail=where(found.lease, found.max_turns),
        worker=found.lease.worker,
        attempt=found.lease.attempt,
        group_id=found.lease.group_id,
    )


def _queued(run_id: str, found: Queued, label: Label) -> Line:
    wait_s = found.due_at - time.time()
    return Line(
        run_id=run_id,
        request_id=found.request_id,
        state="queued",
        task_id=label.task_id,
        purpose=label.purpose,
        at=found.enqueued_at,
        detail=f"next try in {wait_s:.0f} s" if wait_s > 0 else "",
        group_id=label.group_id,
    )


def where(lease: Lease, max_turns: int) -> str:
    """Where in the episode a claim is."""
    return f"turn {lease.turn} of {max_turns}" if lease.phase == "agent" else lease.phase


async def find(redis: Redis, request_id: str) -> Found:
    """One request, wherever it is. Raises LookupError if nothing is known of it."""
    unreadable, request, trajectory = "", None, None
    try:
        request = await request_store.read(redis, request_id)
        trajectory = await stream.read_body(redis, request_id)
    except MalformedMessage as error:
        unreadable = str(error)
    lease = await queue.current_lease(redis, request_id)
    failures = await deadletters.failures(redis, request_id)
    letter = await _letter(redis, request_id)
    if not (request or trajectory or letter or unreadable):
        raise LookupError(
            f"nothing is known of request {request_id}; answered ones are forgotten after a while"
        )
    if letter is not None:
        state: State = "dead"
        failures = letter.failures
    else:
        state = await _state(redis, request_id, lease, is_stored=request is not None or bool(unreadable))
    if request is None and trajectory is not None:
        request = trajectory.claim.request
    return Found(
        request_id=request_id,
        state=state,
        request=request,
        lease=lease,
        trajectory=trajectory,
        failures=failures,
        unreadable=unreadable,
    )


async def _state(redis: Redis, request_id: str, lease: Lease | None, *, is_stored: bool) -> State:
    """Of one that is not dead."""
    if await redis.exists(keys.published(request_id)):
        return "answered"  # although its body may be kept no longer
    if lease is not None:
        return "claimed"
    if await redis.zscore(keys.QUEUE, request_id) is not None:
        return "queued"
    return "lost" if is_stored else "withdrawn"


async def _letter(redis: Redis, request_id: str) -> DeadLetter | None:
    for run_id in await census.run_ids(redis):
        letter = await deadletters.find(redis, run_id, request_id)
        if letter is not None:
            return letter
    return None


async def arrivals(redis: Redis, only: str | None, past: int, *, follow: bool) -> AsyncIterator[Line]:
    """The last `past` finished trajectories, oldest first; then, to `follow`, each as it arrives, for ever."""
    positions: dict[str, str] = {}
    heads: list[TrajectoryHead] = []
    for run_id in await runs(redis, only):
        newest = await stream.newest_heads(redis, run_id, max(past, 1))
        positions[run_id] = newest[0].entry_id if newest else "0"
        heads += [delivery.head for delivery in newest]
    heads.sort(key=lambda head: head.finished_at)
    for head in heads[max(0, len(heads) - past) :]:
        yield head_line(head)
    while follow:
        for run_id in await runs(redis, only):
            positions.setdefault(run_id, "0")
        if not positions:
            await asyncio.sleep(1)
            continue
        for run_id, arrived in await stream.heads_after(redis, positions):
            positions[run_id] = arrived.entry_id
            if isinstance(arrived, Delivery):
                yield head_line(arrived.head)
