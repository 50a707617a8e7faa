"""One request: everything that Redis knows of it. `stored.find` finds it in the directory of its run."""

import contextlib
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias

from redis.asyncio import Redis

from pipeline import census, deadletters, keys, queue, request_store, stream
from pipeline.cli.listing import State
from pipeline.deadletters import AttemptFailure, DeadLetter
from pipeline.judge import Judgement, JudgeRequest, judge_request_id
from pipeline.kinds import JUDGE, ROLLOUT, AnyKind, H, JobKind, T
from pipeline.message import MalformedMessage
from pipeline.queue import Lease
from pipeline.request import R, RolloutRequest
from pipeline.trajectory import Trajectory, TrajectoryHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[R, T]):
    """Everything known of one request of one kind. `unreadable` says why its stored form cannot be shown."""

    request_id: str
    state: State
    request: R | None
    lease: Lease | None
    result: T | None
    failures: tuple[AttemptFailure, ...]
    unreadable: str = ""
    head: TrajectoryHead | None = None  # only from a directory: what is left if there is no trajectory
    source: str = ""  # the run's directory that the result was read from; "": Redis


FoundRollout: TypeAlias = Found[RolloutRequest, Trajectory]
FoundJudging: TypeAlias = Found[JudgeRequest, Judgement]


async def find_rollout(redis: Redis, request_id: str) -> FoundRollout:
    """The request for a rollout, without its task's calibration. Raises LookupError if nothing is known of it."""
    return await _find(redis, request_id, ROLLOUT)


async def find_judging(redis: Redis, request_id: str) -> FoundJudging:
    """A judge request. Raises LookupError if nothing is known of it."""
    return await _find(redis, request_id, JUDGE)


async def judging_of(redis: Redis, rollout_id: str) -> FoundJudging | None:
    """The request to judge a rollout; None if there is none."""
    with contextlib.suppress(LookupError):
        return await find_judging(redis, judge_request_id(rollout_id))
    return None


async def _find(redis: Redis, request_id: str, kind: JobKind[R, T, H]) -> Found[R, T]:
    unreadable, request, result = "", None, None
    try:
        request = await request_store.read(redis, request_id, kind)
        result = await stream.read_body(redis, request_id, kind)
    except MalformedMessage as error:
        unreadable = str(error)
    lease = await queue.current_lease(redis, request_id, kind)
    failures = await deadletters.failures(redis, request_id, kind)
    letter = await _letter(redis, request_id, kind)
    if not (request or result or letter or unreadable):
        raise LookupError(
            f"nothing is known of request {request_id}; answered ones are forgotten after a while"
        )
    if letter is not None:
        state: State = "dead"
        failures = letter.failures
    else:
        is_stored = request is not None or bool(unreadable)
        state = await _state(redis, request_id, lease, kind, is_stored=is_stored)
    if request is None and result is not None:
        request = result.claim.request
    return Found(
        request_id=request_id,
        state=state,
        request=_without_calibration(request),
        lease=lease,
        result=result,
        failures=failures,
        unreadable=unreadable,
    )


def _without_calibration(request: Any) -> Any:
    return request.without_calibration() if isinstance(request, RolloutRequest) else request


async def _state(
    redis: Redis, request_id: str, lease: Lease | None, kind: AnyKind, *, is_stored: bool
) -> State:
    """Of one that is not dead."""
    if await redis.exists(keys.published(request_id, kind)):
        return "answered"  # although its body may be kept no longer
    if lease is not None:
        return "claimed"
    if await redis.zscore(keys.queue(kind), request_id) is not None:
        return "queued"
    return "lost" if is_stored else "withdrawn"


async def _letter(redis: Redis, request_id: str, kind: AnyKind) -> DeadLetter | None:
    for run_id in await census.run_ids(redis):
        letter = await deadletters.find(redis, run_id, request_id, kind)
        if letter is not None:
            return letter
    return None
