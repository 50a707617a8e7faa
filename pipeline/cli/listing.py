"""`ls` and `tail`: lists of requests, one per line."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

import msgspec
from redis.asyncio import Redis

from pipeline import census, deadletters, request_store, stream
from pipeline.census import Claimed, Queued
from pipeline.deadletters import DeadLetter
from pipeline.judge import JudgementHead
from pipeline.kinds import JUDGE, ROLLOUT, AnyKind
from pipeline.queue import Lease
from pipeline.request_store import Label
from pipeline.screen import Ink, count, one_line
from pipeline.stream import Delivery
from pipeline.trajectory import JobHead, TrajectoryHead

State = Literal["queued", "claimed", "answered", "dead", "lost", "withdrawn"]


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request in a list. It is a msgspec struct because `ls` makes ten thousand of them while a person waits."""

    run_id: str
    request_id: str
    state: State
    task_id: str
    purpose: str
    at: float  # Unix seconds: enqueued, claimed, finished or died
    detail: str  # detail of its state: when due, phase and turn, outcome, last failure
    worker: str = ""
    attempt: int = 0
    reward: float | None = None
    group_id: str = ""
    outcome: str = ""
    head: JobHead | None = None
    kind: str = ROLLOUT.name


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFilter:
    """The filter for lines. Patterns are shell patterns; an empty one matches everything."""

    task: str = ""
    worker: str = ""
    group: str = ""
    outcome: str = ""
    before: float | None = None  # Unix seconds: only requests from before then
    # Only answered requests with this reward: "0", "1" or "none"; empty: any request.
    reward: str = ""

    def matches(self, line: RequestLine) -> bool:
        if self.reward and (line.state != "answered" or self.reward != reward_word(line.reward)):
            return False
        wanted = (
            (self.task, line.task_id),
            (self.worker, line.worker),
            (self.group, line.group_id),
            (self.outcome, line.outcome),
        )
        if self.before is not None and line.at >= self.before:
            return False
        return all(not pattern or fnmatchcase(value, pattern) for pattern, value in wanted)


ANYTHING = LineFilter()


def reward_word(reward: float | None) -> str:
    """The reward in the notation of `ls --reward`."""
    return "none" if reward is None else f"{reward:g}"


async def lines(
    redis: Redis,
    run_id: str,
    state: State,
    limit: int,
    wanted: LineFilter = ANYTHING,
    kind: AnyKind = ROLLOUT,
) -> list[RequestLine]:
    """The requests of a run and a kind in one state, `limit` at most: dead and answered ones newest first, others oldest first."""
    found: list[RequestLine] = []
    takes_all = wanted == ANYTHING
    async for line in _all_lines(redis, run_id, state, kind):
        if len(found) >= limit:
            break
        if takes_all or wanted.matches(line):
            found.append(line)
    return found


async def _all_lines(redis: Redis, run_id: str, state: State, kind: AnyKind) -> AsyncIterator[RequestLine]:
    match state:
        case "dead":
            letters = (await deadletters.listed(redis, run_id, kind)).values()
            for letter in sorted(letters, key=lambda letter: -letter.died_at):
                yield _dead(run_id, letter, kind)
        case "answered":
            async for delivery in stream.heads_backwards(redis, run_id, kind):
                yield head_line(delivery.head)
        case "claimed":
            for one in await census.open_requests(redis, run_id, kind):
                if isinstance(one, Claimed):
                    yield _claimed(run_id, one, kind)
        case _:
            outstanding = await census.open_requests(redis, run_id, kind)
            waiting = [one for one in outstanding if isinstance(one, Queued)]
            labels = await request_store.labels(redis, [one.request_id for one in waiting])
            for one, label in zip(waiting, labels, strict=True):
                yield _queued(run_id, one, label, kind)


def where(lease: Lease, max_turns: int) -> str:
    """The current part of a claim's stage."""
    if lease.phase == "judging":
        return f"judging, {count(lease.turn, 'turn')} done"
    return f"turn {lease.turn} of {max_turns}" if lease.phase == "agent" else lease.phase


def head_line(head: JobHead) -> RequestLine:
    """An answered request, by the head of its result."""
    assert isinstance(head, TrajectoryHead | JudgementHead), "there is no other kind"
    return RequestLine(
        run_id=head.run_id,
        request_id=head.request_id,
        state="answered",
        task_id=head.task_id,
        purpose=head.purpose,
        at=head.finished_at,
        detail=_judged(head) if isinstance(head, JudgementHead) else _played(head),
        worker=head.worker,
        attempt=head.attempt,
        reward=None if isinstance(head, JudgementHead) else head.reward,
        group_id=head.group_id,
        outcome=head.outcome,
        head=head,
        kind=JUDGE.name if isinstance(head, JudgementHead) else ROLLOUT.name,
    )


def _played(head: TrajectoryHead) -> str:
    return f"{head.outcome}, {count(head.num_turns, 'turn')}"


def _judged(head: JudgementHead) -> str:
    """The outcome of a judgement, and its scores or log-probs; a rule casts no votes."""
    if head.outcome != "judged":
        return head.outcome
    if head.num_logprobs:
        return f"judged, log-probs of {count(head.num_logprobs, 'token')}"
    mean = ""
    if head.score_mean is not None:  # NaN is in no range
        mean = f", mean {head.score_mean:+.2f}" if -1 <= head.score_mean <= 1 else ", scores outside -1 to 1"
    votes = f", {head.num_valid_votes} of {count(head.num_votes, 'vote')} valid" if head.num_votes else ""
    return f"judged, {head.num_scored} of {count(head.num_steps, 'step')} scored{mean}{votes}"


def _dead(run_id: str, letter: DeadLetter, kind: AnyKind) -> RequestLine:
    last = letter.failures[-1] if letter.failures else None
    return RequestLine(
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
        kind=kind.name,
    )


def _claimed(run_id: str, found: Claimed, kind: AnyKind) -> RequestLine:
    return RequestLine(
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
        kind=kind.name,
    )


def _queued(run_id: str, found: Queued, label: Label, kind: AnyKind) -> RequestLine:
    wait_s = found.due_at - time.time()
    return RequestLine(
        run_id=run_id,
        request_id=found.request_id,
        state="queued",
        task_id=label.task_id,
        purpose=label.purpose,
        at=found.enqueued_at,
        detail=f"next try in {wait_s:.0f} s" if wait_s > 0 else "",
        group_id=label.group_id,
        kind=kind.name,
    )


async def chosen_runs(redis: Redis, only: str | None) -> list[str]:
    """Ids of the runs to look at. Raises LookupError if there is no run of that name."""
    known = await census.run_ids(redis)
    if only is not None and only not in known:
        raise LookupError(f"no run {only}; there is {', '.join(known) or 'none at all'}")
    return known if only is None else [only]


async def arrivals(
    redis: Redis, only: str | None, past: int, kind: AnyKind, *, follow: bool
) -> AsyncIterator[RequestLine]:
    """The last `past` results of a kind, oldest first; then, with `follow`, each new one as it arrives, without end."""
    positions: dict[str, str] = {}
    newest_lines: list[RequestLine] = []
    for run_id in await chosen_runs(redis, only):
        newest = await stream.newest_heads(redis, run_id, max(past, 1), kind)
        positions[run_id] = newest[0].entry_id if newest else "0"
        newest_lines += [head_line(delivery.head) for delivery in newest]
    newest_lines.sort(key=lambda line: line.at)
    for line in newest_lines[max(0, len(newest_lines) - past) :]:
        yield line
    while follow:
        for run_id in await chosen_runs(redis, only):
            positions.setdefault(run_id, "0")
        if not positions:
            await asyncio.sleep(1)
            continue
        for run_id, arrived in await stream.heads_after(redis, positions, kind=kind):
            positions[run_id] = arrived.entry_id
            if isinstance(arrived, Delivery):
                yield head_line(arrived.head)


def text(lines: Sequence[RequestLine], ink: Ink) -> str:
    """A table with one request on each line."""
    if not lines:
        return "nothing to list"
    return "\n".join(row(line, ink) for line in lines)


def row(line: RequestLine, ink: Ink) -> str:
    """One request on one line, as `ls` and `tail` print it."""
    reward = "" if line.reward is None else f"  reward {line.reward:g}"
    shade = {"dead": ink.bad, "claimed": ink.bold}.get(line.state, str)
    attempt = f"  attempt {line.attempt}" if line.attempt > 1 else ""
    when = _time_of_day(int(line.at))
    detail = line.detail.replace("\n", " ")[:120]
    return one_line(
        f"{when}  {shade(f'{line.state:<8}')}  {line.request_id}  {line.task_id}  "
        f"{line.purpose if line.kind == ROLLOUT.name else line.kind:<5}  {detail}{_reward(reward, line.reward, ink)}{attempt}".rstrip()
    )


@lru_cache
def _time_of_day(at: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _reward(text: str, reward: float | None, ink: Ink) -> str:
    return ink.good(text) if reward else ink.faint(text)
