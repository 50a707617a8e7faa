"""One request: everything that Redis knows of it. `stored.find` finds it in the directory of its run."""

from dataclasses import dataclass

from redis.asyncio import Redis

from pipeline import census, deadletters, keys, queue, request_store, stream
from pipeline.cli.listing import State
from pipeline.deadletters import AttemptFailure, DeadLetter
from pipeline.message import MalformedMessage
from pipeline.queue import Lease
from pipeline.request import RolloutRequest
from pipeline.trajectory import Trajectory, TrajectoryHead


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
    head: TrajectoryHead | None = None  # only from a directory: what is left if there is no trajectory
    source: str = ""  # the run's directory that the trajectory was read from; "": Redis


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
        request=request and request.without_calibration(),
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
    if await redis.zscore(keys.queue(), request_id) is not None:
        return "queued"
    return "lost" if is_stored else "withdrawn"


async def _letter(redis: Redis, request_id: str) -> DeadLetter | None:
    for run_id in await census.run_ids(redis):
        letter = await deadletters.find(redis, run_id, request_id)
        if letter is not None:
            return letter
    return None
