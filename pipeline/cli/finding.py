"""One request, as Redis knows it or as the directory of its run has it, and lists of the requests of a directory.

Redis is asked first, because it also has the log of grading; it forgets a request sooner than the directory does.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias

import msgspec
from redis.asyncio import Redis

from pipeline import census, deadletters, keys, queue, request_store, stream
from pipeline.cli.listing import LineFilter, RequestLine, State, head_line
from pipeline.deadletters import AttemptFailure, DeadLetter
from pipeline.journal.reading import found_journal, identity, mentioning
from pipeline.journal.rows import JUDGEMENT_FATES, EpisodeRow, JudgementRow, StepRow
from pipeline.judge import Judgement, JudgeRequest, judge_request_id, judged_rollout_id
from pipeline.kinds import JUDGE, ROLLOUT, AnyKind, H, JobKind, T
from pipeline.message import MalformedMessage
from pipeline.queue import Lease
from pipeline.request import R, RolloutRequest
from pipeline.rollout_store.reading import DIRECTORY, RolloutStore, Stored, stores_of
from pipeline.rollout_store.record import StoredHead, TrainedTokens
from pipeline.screen import count
from pipeline.trajectory import Trajectory, TrajectoryHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[R, T]):
    """Everything known about one request of one kind. `unreadable` says why its stored form cannot be shown."""

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
    """The request for a rollout, without its task's calibration. Raises LookupError if nothing is known about it."""
    return await _find(redis, request_id, ROLLOUT)


async def find_judging(redis: Redis, request_id: str) -> FoundJudging:
    """A judge request. Raises LookupError if nothing is known about it."""
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
    """The state of a request that is not dead."""
    if await redis.exists(keys.published(request_id, kind)):
        return "answered"  # true even if the body of the answer has been deleted
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


async def directories(redis: Redis, run_dir: Path | None) -> list[Path]:
    """The directories to search: `run_dir`, or else those on this machine of the runs that Redis knows."""
    if run_dir is not None:
        return [run_dir]
    statuses = [(await census.last_status(redis, run_id))[0] for run_id in await census.run_ids(redis)]
    journals = [Path(status.journal) for status in statuses if status is not None and status.journal]
    return [journal.parent for journal in journals if journal.is_dir()]


def stored_rollout(run_dirs: Collection[Path], request_id: str) -> FoundRollout:
    """The stored rollout. Raises LookupError if no store of these directories has the request."""
    kept = find_stored(run_dirs, request_id)
    if kept is None:
        raise unknown(run_dirs, request_id)
    return _found_in(*kept)


def find_stored(run_dirs: Collection[Path], request_id: str) -> tuple[Stored, Path] | None:
    """The rollout, and the directory that contains it."""
    for run_dir in run_dirs:
        for store in stores_of(run_dir):
            stored = store.find(request_id)
            if stored is not None:
                return stored, run_dir
    return None


def unknown(run_dirs: Collection[Path], request_id: str) -> LookupError:
    places = ", ".join(str(run_dir / DIRECTORY) for run_dir in run_dirs)
    return LookupError(f"nothing is known of request {request_id}{f' in {places}' if places else ''}")


def stored_lines(
    run_dir: Path, states: Collection[State], wanted: LineFilter, *, only_run: str | None
) -> Iterator[RequestLine]:
    """The stored requests of the run, then those of its evaluations, each newest first. Raises LookupError for a directory
    without rollouts.
    """
    stores = stores_of(run_dir)
    if not stores:
        raise LookupError(
            f"{run_dir} holds no rollouts: give a run's directory, as in runs/demo, whose recipe keeps them"
        )
    return _lines_of_stores(stores, states, wanted, only_run)


def _lines_of_stores(
    stores: Sequence[RolloutStore], states: Collection[State], wanted: LineFilter, only_run: str | None
) -> Iterator[RequestLine]:
    for store in stores:
        for stored in store.heads(newest_first=True):
            line = _stored_line(stored)
            of_run = only_run is None or only_run == line.run_id
            if of_run and line.state in states and wanted.matches(line):
                yield line


def _stored_line(stored: StoredHead) -> RequestLine:
    line = head_line(stored.head)
    return msgspec.structs.replace(line, state="dead", reward=None) if stored.is_dead else line


def _found_in(stored: Stored, run_dir: Path) -> FoundRollout:
    trajectory = stored.rollout.trajectory
    return Found(
        request_id=stored.head.head.request_id,
        state="dead" if stored.head.is_dead else "answered",
        request=None if trajectory is None else trajectory.claim.request,
        lease=None,
        result=trajectory,
        failures=stored.rollout.failures,
        unreadable=stored.fault,
        head=stored.head.head,
        source=str(run_dir),
    )


def stored_judging(run_dirs: Collection[Path], request_id: str) -> FoundJudging:
    """The stored judge request. Raises LookupError if no store of these directories has the judgement."""
    rollout_id = judged_rollout_id(request_id)
    kept = find_stored(run_dirs, rollout_id) if rollout_id is not None else None
    judgement = kept[0].rollout.judgement if kept is not None else None
    if kept is None or judgement is None:
        raise unknown(run_dirs, request_id)
    return Found(
        request_id=request_id,
        state="answered" if judgement.failed is None else "dead",
        request=judgement.claim.request,
        lease=None,
        result=judgement,
        failures=(),
        source=str(kept[1]),
    )


def stored_judging_lines(
    run_dir: Path, states: Collection[State], wanted: LineFilter, *, only_run: str | None
) -> Iterator[RequestLine]:
    """The judge requests that the trainer has settled, newest first; withdrawn ones are not among them. Raises LookupError for a
    directory without a journal.
    """
    run_id = identity(run_dir).run_id
    rows = list(mentioning(found_journal(run_dir, EpisodeRow), JudgementRow, ""))
    settled = (_judging_line(run_id, row) for row in reversed(rows) if row.turns or row.fate == "failed")
    of_run = only_run is None or only_run == run_id
    return (line for line in settled if of_run and line.state in states and wanted.matches(line))


def _judging_line(run_id: str, row: JudgementRow) -> RequestLine:
    is_failed = row.fate == "failed"
    return RequestLine(
        run_id=run_id,
        request_id=judge_request_id(row.rollout_id),
        state="dead" if is_failed else "answered",
        task_id=row.task_id,
        purpose="train",
        at=row.at,
        detail=row.error if is_failed else f"{scored(row)}; {JUDGEMENT_FATES[row.fate]}",
        group_id=row.group_id,
        outcome=f"failed:{row.error.partition(':')[0]}" if is_failed else "judged",
        kind=JUDGE.name,
    )


async def rollout(redis: Redis, request_id: str, run_dirs: Collection[Path]) -> FoundRollout:
    """The rollout from Redis or else from a directory.

    Redis also has the log of grading. Raises LookupError if neither knows the request.
    """
    try:
        found = await find_rollout(redis, request_id)
    except LookupError:
        return stored_rollout(run_dirs, request_id)
    if found.result is None and found.state in ("answered", "dead"):
        with contextlib.suppress(LookupError):
            kept = stored_rollout(run_dirs, request_id)
            found = kept if kept.result is not None else found
    return found


async def judging(redis: Redis, request_id: str, run_dirs: Collection[Path]) -> FoundJudging:
    """A judge request. Raises LookupError if neither knows it."""
    try:
        found = await find_judging(redis, request_id)
    except LookupError:
        return stored_judging(run_dirs, request_id)
    if found.result is None and found.state == "answered":
        with contextlib.suppress(LookupError):
            return stored_judging(run_dirs, request_id)
    return found


def scored(row: JudgementRow) -> str:
    """The number of turns that have a score, or of tokens with a teacher's log-probs, as text; "" if no judgement arrived."""
    if row.num_taught_tokens:
        mean = row.reverse_kl_sum / row.num_taught_tokens
        return f"log-probs of {count(row.num_taught_tokens, 'token')}, reverse KL {mean:.4f} nats a token"
    scores = row.scores.values()
    mean = f", mean {sum(scores) / len(scores):+.2f}" if scores else ""
    return f"{len(scores)} of {count(len(row.turns), 'turn')} scored{mean}" if row.turns else ""


def trained_tokens(run_dirs: Collection[Path], request_id: str) -> TrainedTokens | None:
    """The trained tokens of the rollout;

    None if no store has them, or if another step than the journal's wrote them: a resume undid that step.
    """
    for run_dir in run_dirs:
        found = RolloutStore(run_dir / DIRECTORY).trained([request_id]).get(request_id)
        if found is not None and found.step == _step_of(run_dir, request_id):
            return found
    return None


def _step_of(run_dir: Path, request_id: str) -> int | None:
    try:
        rows = mentioning(found_journal(run_dir, EpisodeRow), StepRow, request_id)
        return next((row.step for row in rows if request_id in row.request_ids), None)
    except LookupError:
        return None
