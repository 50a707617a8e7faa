"""The census: which trainers and workers are alive, and how many requests and results are in which state.

Trainers and workers send heartbeats; `python -m pipeline status` reads them and counts the rest.
"""

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from redis.asyncio import Redis

from pipeline import keys, queue, request_store, stream, transitions, weights
from pipeline.judge import JudgementHead
from pipeline.kinds import JUDGE, ROLLOUT, AnyKind
from pipeline.message import MalformedMessage, Message, UnixSeconds, decode, encode
from pipeline.redis_calls import chunks, command, script
from pipeline.request import JobRequest
from pipeline.trajectory import TrajectoryHead

STATUS_EXPIRES_S = 15.0  # a worker or trainer without a heartbeat for this long counts as gone
KEEP_RUN_STATUS_S = 30 * 24 * 3600  # the last status of a trainer that is gone can be read for this long
BEAT_S = 2.0  # pause between two heartbeats of a worker
BEATS_PER_S = 100.0  # heartbeats of all workers together; a larger fleet sends each less often
MISSED_BEATS = 4  # the limit after which a worker of a large fleet counts as gone
RATE_S = 300.0  # the span over which arrivals a minute are counted
_FORGET_WORKER_S = 3600.0

_BEAT = """#!lua flags=allow-oom
-- KEYS: names, status; ARGV: name, when or nothing, status, seconds until it expires. It also runs in a full Redis.
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
if ARGV[2] == '' then return redis.call('SADD', KEYS[1], ARGV[1]) end
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
return redis.call('ZCARD', KEYS[1])
"""


class RunStatus(Message, frozen=True, kw_only=True):
    """The heartbeat of a run's trainer: its current activity, or how the run `ended`."""

    run_id: str
    phase: str  # e.g. "waiting for trajectories", "optimizer step", "publishing weights", "evaluating"
    detail: str = ""  # e.g. "step 7 waits for 19 more trajectories"
    step: int = 0
    num_steps: int = 0
    version: int = 0
    admission: str = ""  # why no request is enqueued at the moment, or how many more may be
    updated_at: UnixSeconds = 0.0
    journal: str = ""  # directory of the run's journal, as the trainer's machine names it
    quarantined: tuple[str, ...] = ()  # ids of tasks that are no longer enqueued
    ended: str = ""  # how the run ended, and how to continue, in one sentence; empty while it is running
    groups_without_signal: int = 0  # the latest in a row whose members all had the same reward
    max_groups_without_signal: int = 0  # the number in a row at which the trainer ends the run; 0: not known
    alarms: tuple[str, ...] = ()  # alarms that have begun and are not over, one sentence each
    # The time for which a group waits for its judgements. None: the run has no judge, or does not say.
    judge_wait_s: float | None = None
    judge_required: bool = False  # groups wait for their judgements as long as it takes


class HostStatus(Message, frozen=True, kw_only=True):
    """A machine on which a worker opens sandboxes."""

    name: str
    slots: int  # most episodes of this worker at once
    running: int
    out: str = ""  # why it takes no episode; empty if it does


class WorkerStatus(Message, frozen=True, kw_only=True):
    """The heartbeat of a worker process, of whichever kind of job."""

    name: str
    slots: int
    running: tuple[str, ...]  # request ids
    finished: int  # results published since its start
    failed: int
    started_at: UnixSeconds
    updated_at: UnixSeconds
    paused: str = ""  # why it claims nothing
    set_aside: str = ""  # a Docker host that it does not use for now, and why; it still claims for the others
    kind: str = ROLLOUT.name  # the kind of jobs that it claims (`kinds.py`)
    hosts: tuple[HostStatus, ...] = ()  # the hosts of a worker that plays rollouts


@dataclass(frozen=True, slots=True)
class Claimed:
    request_id: str
    task_id: str
    purpose: str
    lease: queue.Lease
    max_turns: int


@dataclass(frozen=True, slots=True)
class Queued:
    request_id: str
    due_at: float  # Unix seconds; in the future while it waits out a back-off; 0 if it was never claimed
    enqueued_at: float  # Unix seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCensus:
    """Counts of one run's jobs of one kind.

    `unread` heads have not been delivered to the trainer; `unacknowledged` heads have been, but are in no checkpoint yet.
    """

    queued: int
    waiting_out: int  # those of `queued` that wait out a back-off
    # Unix seconds; the oldest enqueued request that is not claimed at the moment
    oldest_queued_at: float | None
    claimed: tuple[Claimed, ...]
    oldest_claim_at: float | None  # Unix seconds
    unread: int
    unacknowledged: int
    unacknowledged_bytes: int  # the size of unacknowledged bodies
    dead: int
    malformed: int
    outcomes: dict[str, int]  # counts of recent heads
    finished_per_min: float  # the rate over the last RATE_S, or as far back as recent heads go

    @property
    def num_outstanding(self) -> int:
        return self.queued + len(self.claimed) + self.unread + self.unacknowledged


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The scores of recent judgements."""

    num_steps: int
    num_scored: int
    num_votes: int
    num_valid_votes: int
    num_logprobs: int  # tokens that a teacher gave log-probs of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCensus:
    """Counts of one run."""

    run_id: str
    status: RunStatus | None  # the trainer's last, however old; None if it never sent any
    silent_s: float  # seconds since `status` was sent
    rollouts: KindCensus
    judging: KindCensus | None  # None: the run has never enqueued a judge request
    scoring: Scoring | None  # None if and only if `judging` is None
    learned: weights.WeightVersion | None
    served: weights.ServedWeights | None
    unreadable: str  # why the published weights cannot be decoded
    lags: tuple[int, ...]  # lags in versions of training trajectories that arrived since the newest version

    @property
    def has_trainer(self) -> bool:
        """Whether its trainer is alive."""
        return self.status is not None and not self.status.ended and self.silent_s < STATUS_EXPIRES_S

    @property
    def kinds(self) -> tuple[KindCensus, ...]:
        """The census of each kind of job that the run has."""
        return (self.rollouts,) if self.judging is None else (self.rollouts, self.judging)

    @property
    def num_open(self) -> int:
        """Requests that are not answered, or whose answers are in no checkpoint."""
        return sum(jobs.num_outstanding for jobs in self.kinds)


async def beat_run(redis: Redis, status: RunStatus) -> None:
    """Sends a trainer's heartbeat. The last one can be read for a month."""
    wanted = [keys.runs(), keys.run_status(status.run_id)]
    await script(redis, _BEAT, [status.run_id, "", encode(status), KEEP_RUN_STATUS_S], wanted=wanted)


async def beat_worker(redis: Redis, status: WorkerStatus, *, every_s: float = BEAT_S) -> float:
    """Send a worker's heartbeat, which expires after a few were missed. Returns the seconds until the next is due.

    It is one short script, however large the fleet. In a large fleet each worker sends fewer, because otherwise the
    heartbeats would cost more than the work.
    """
    wanted = [keys.workers(), keys.worker(status.name)]
    lasts_s = int(max(STATUS_EXPIRES_S, MISSED_BEATS * every_s))
    num_workers: int = await script(
        redis, _BEAT, [status.name, status.updated_at, encode(status), lasts_s], wanted=wanted
    )
    return max(BEAT_S, num_workers / BEATS_PER_S)


async def forget_worker(redis: Redis, name: str) -> None:
    """Remove a worker that ends in good order."""
    await redis.delete(keys.worker(name))
    await redis.zrem(keys.workers(), name)


async def run_ids(redis: Redis) -> list[str]:
    found: set[bytes] = await command(redis, "SMEMBERS", keys.runs())
    return sorted(raw.decode() for raw in found)


async def workers(redis: Redis) -> tuple[list[WorkerStatus], dict[str, float]]:
    """The live workers by name, and the time of each silent worker's last heartbeat.

    A worker whose status cannot be decoded counts as silent.
    """
    heard = await _heard(redis)
    alive: list[WorkerStatus] = []
    for names in chunks(list(heard)):
        rows: list[bytes | None] = await redis.mget([keys.worker(name) for name in names])
        for row in rows:
            with contextlib.suppress(MalformedMessage):
                alive += [decode(row, WorkerStatus)] if row else []
    for status in alive:
        heard.pop(status.name, None)
    return sorted(alive, key=lambda status: status.name), heard


async def _heard(redis: Redis) -> dict[str, float]:
    await redis.zremrangebyscore(keys.workers(), 0, time.time() - _FORGET_WORKER_S)
    rows: list[bytes] = await command(redis, "ZRANGE", keys.workers(), 0, -1, "WITHSCORES")
    return {name.decode(errors="replace"): float(at) for name, at in zip(rows[::2], rows[1::2], strict=True)}


async def run_census(redis: Redis, run_id: str, *, recent: int = 200) -> RunCensus:
    """Counts everything of one run. The lags, outcomes and rate are those of the newest `recent` heads of each kind."""
    rollouts = await stream.newest_heads(redis, run_id, recent)
    judgements = await stream.newest_heads(redis, run_id, recent, JUDGE)
    # The stream itself proves nothing: every trainer opens it, with a judge or without.
    traces = [key(run_id, JUDGE) for key in (keys.requests, keys.dead, keys.malformed)]
    is_judged = bool(judgements) or await redis.exists(*traces)
    learned, served, unreadable = await _weights(redis, run_id)
    status, silent_s = await last_status(redis, run_id)
    return RunCensus(
        run_id=run_id,
        status=status,
        silent_s=silent_s,
        rollouts=await _kind_census(redis, run_id, rollouts, ROLLOUT, is_all=len(rollouts) < recent),
        judging=await _kind_census(redis, run_id, judgements, JUDGE, is_all=len(judgements) < recent)
        if is_judged
        else None,
        scoring=_scoring([delivery.head for delivery in judgements]) if is_judged else None,
        learned=learned,
        served=served,
        unreadable=unreadable,
        lags=tuple(_lags([delivery.head for delivery in rollouts], learned)) if learned else (),
    )


async def _kind_census(
    redis: Redis, run_id: str, newest: Sequence[stream.Delivery[Any]], kind: AnyKind, *, is_all: bool
) -> KindCensus:
    """Counts the jobs of one kind. `is_all`: `newest` contains every head."""
    outstanding = await open_requests(redis, run_id, kind)
    queued = [found for found in outstanding if isinstance(found, Queued)]
    claimed = tuple(found for found in outstanding if isinstance(found, Claimed))
    unread, unacknowledged = await _stream_depths(redis, run_id, kind)
    now = time.time()
    return KindCensus(
        queued=len(queued),
        waiting_out=sum(found.due_at > now for found in queued),
        oldest_queued_at=min((found.enqueued_at for found in queued), default=None),
        claimed=claimed,
        oldest_claim_at=min((found.lease.claimed_at for found in claimed), default=None),
        unread=unread,
        unacknowledged=unacknowledged,
        unacknowledged_bytes=await stream.unacknowledged_bytes(redis, run_id, kind),
        dead=await command(redis, "HLEN", keys.dead(run_id, kind)),
        malformed=await command(redis, "LLEN", keys.malformed(run_id, kind)),
        outcomes=dict(Counter(delivery.head.outcome for delivery in newest)),
        finished_per_min=_per_min(newest, now, whole=is_all),
    )


def _scoring(heads: Sequence[JudgementHead]) -> Scoring:
    return Scoring(
        num_steps=sum(head.num_steps for head in heads),
        num_scored=sum(head.num_scored for head in heads),
        num_votes=sum(head.num_votes for head in heads),
        num_valid_votes=sum(head.num_valid_votes for head in heads),
        num_logprobs=sum(head.num_logprobs for head in heads),
    )


async def _weights(
    redis: Redis, run_id: str
) -> tuple[weights.WeightVersion | None, weights.ServedWeights | None, str]:
    """The published weights and the weights that engines serve, or the reason why they cannot be decoded."""
    try:
        return await weights.newest_version(redis, run_id), await weights.served_weights(redis, run_id), ""
    except MalformedMessage as error:
        return None, None, str(error)


async def run_status(redis: Redis, run_id: str) -> RunStatus | None:
    """The status of a run whose trainer is alive, or which has ended; None for any other."""
    status, silent_s = await last_status(redis, run_id)
    return status if status is not None and (status.ended or silent_s < STATUS_EXPIRES_S) else None


async def last_status(redis: Redis, run_id: str) -> tuple[RunStatus | None, float]:
    """The last status of the run's trainer, or None, and the seconds since it was sent, on Redis's clock."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.get(keys.run_status(run_id))
        pipe.pttl(keys.run_status(run_id))
        raw, left_ms = await pipe.execute()
    try:
        status = decode(raw, RunStatus) if raw else None
    except MalformedMessage:
        status = None
    return status, max(0.0, KEEP_RUN_STATUS_S - left_ms / 1000) if status else 0.0


def _per_min(newest: Sequence[stream.Delivery[Any]], now: float, *, whole: bool) -> float:
    """Arrivals per minute over the last RATE_S. `whole`: `newest` contains every head."""
    times = [arrived_at(delivery) for delivery in newest]
    late = [at for at in times if at > now - RATE_S]
    if not late:
        return 0.0
    reaches_back = whole or len(late) < len(times)
    return 60.0 * len(late) / (RATE_S if reaches_back else max(now - late[-1], 1.0))


def arrived_at(delivery: stream.Delivery[Any]) -> float:
    """The time when Redis received the head (Unix seconds)."""
    return int(delivery.entry_id.partition("-")[0]) / 1000


def _lags(heads: list[TrajectoryHead], learned: weights.WeightVersion) -> Iterator[int]:
    """The lag of each head that arrived since the newest version; older ones were mostly trained under earlier versions."""
    for head in heads:
        if (
            head.purpose == "train"
            and head.version_first is not None
            and head.finished_at >= learned.published_at
        ):
            yield max(0, learned.version - head.version_first)


async def open_requests(redis: Redis, run_id: str, kind: AnyKind = ROLLOUT) -> list[Claimed | Queued]:
    """The run's outstanding requests that are not published yet, oldest first. Each thousand costs one round trip."""
    found: list[Claimed | Queued] = []
    ledger: list[bytes] = await command(
        redis, "ZRANGE", keys.open_requests(run_id, kind), 0, -1, "WITHSCORES"
    )
    for pairs in chunks(list(zip(ledger[::2], ledger[1::2], strict=True))):
        ids = [name.decode(errors="replace") for name, _ in pairs]
        async with redis.pipeline(transaction=False) as pipe:
            pipe.mget([keys.lease(request_id, kind) for request_id in ids])
            pipe.zmscore(keys.queue(kind), list(ids))
            pipe.mget([keys.published(request_id, kind) for request_id in ids])
            leases, scores, published = await pipe.execute()
        rows = zip(ids, pairs, leases, scores, published, strict=True)
        for request_id, (_, enqueued_at), lease, score, entry in rows:
            if entry is not None:
                continue
            claimed = await _claimed(redis, request_id, lease, kind) if lease else None
            if claimed is not None:
                found.append(claimed)
            elif score is not None:
                found.append(Queued(request_id, transitions.due_at(score), float(enqueued_at)))
    return found


async def _claimed(redis: Redis, request_id: str, data: bytes, kind: AnyKind) -> Claimed | None:
    """The claim; None if the request was withdrawn in the meantime, or cannot be decoded: then its worker is about to dead-letter it."""
    try:
        lease = decode(data, queue.Lease)
        if lease.task_id:  # the lease has it from its first renewal on
            return Claimed(request_id, lease.task_id, lease.purpose, lease, lease.max_turns)
        request: JobRequest | None = await request_store.read(redis, request_id, kind)
    except MalformedMessage:
        return None
    if request is None:
        return None
    lease = replace(lease, group_id=request.group_id)
    return Claimed(request_id, request.task_id, request.purpose, lease, request.max_turns)


async def _stream_depths(redis: Redis, run_id: str, kind: AnyKind) -> tuple[int, int]:
    """The number of entries not yet delivered to the learner, and of those delivered but not acknowledged."""
    name = keys.stream(run_id, kind)
    if not await redis.exists(name):
        return 0, 0
    groups: list[dict[str, Any]] = await redis.xinfo_groups(name)
    if not groups:
        return await command(redis, "XLEN", name), 0
    unread = groups[0].get("lag")
    if unread is None:  # Redis loses this count when an entry is deleted
        after = f"({groups[0]['last-delivered-id'].decode()}"
        unread = len(await command(redis, "XRANGE", name, after, "+"))
    return unread, groups[0]["pending"]


async def fleet_id(redis: Redis) -> str:
    """The name of the fleet on this Redis; the first caller makes it."""
    name = await redis.get(keys.fleet())
    if name is None:  # read first: a full Redis answers GET, but refuses SET even for a key that exists
        await redis.set(keys.fleet(), secrets.token_hex(6), nx=True)
        name = await redis.get(keys.fleet())
    assert name is not None
    return name.decode()
