"""`explain`: the events of one request in order, and why it was or was not trained; for a judge request, whether it was used.

The events come from Redis, or, when Redis has forgotten them or is gone, from the rollout in the run's directory; the fates of a trajectory
and of its judgement come from the trainer's journal. The events of judging are listed among the rollout's.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from pipeline import census, keys, request_store, stream
from pipeline.cli import finding
from pipeline.cli.finding import Found, FoundJudging, FoundRollout
from pipeline.cli.listing import State
from pipeline.journal.reading import found_journal, identity, mentioning
from pipeline.journal.rows import FATES, JUDGEMENT_FATES, EpisodeRow, JudgementRow, StepRow
from pipeline.judge import judge_request_id, judged_rollout_id
from pipeline.kinds import JUDGE, ROLLOUT, AnyKind
from pipeline.screen import Ink, age, lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An event of a request of any kind."""

    at: float  # Unix seconds
    what: str
    attempt: int = 0
    worker: str = ""
    detail: str = ""
    kind: str = ROLLOUT.name


async def _redis_moments(redis: Redis, run_id: str, request_id: str, kind: AnyKind) -> list[Moment]:
    """The recorded events in Redis, in order. `run_id` is "" if it is not known."""
    found = [
        Moment(
            at=one.at,
            what=one.what,
            attempt=one.attempt,
            worker=one.worker,
            detail=one.detail,
            kind=kind.name,
        )
        for one in await request_store.events(redis, request_id, kind)
    ]
    return found + await _reading(redis, run_id, request_id, kind)


async def _reading(redis: Redis, run_id: str, request_id: str, kind: AnyKind) -> list[Moment]:
    """Returns the event of its delivery to the trainer. Redis keeps the time until the entry is acknowledged."""
    name = keys.stream(run_id, kind)
    entry = await redis.get(keys.published(request_id, kind))
    if entry is None or not run_id or not await redis.exists(name):
        return []
    if not await redis.xinfo_groups(name):
        return []
    at = await stream.delivered_at(redis, run_id, entry.decode(), kind)
    detail = f"entry {entry.decode()}"
    return [] if at is None else [Moment(at=at, what="read", detail=detail, kind=kind.name)]


def _stored_moments(found: FoundRollout) -> Iterator[Moment]:
    """Yields the events that the stored head and the failures contain."""
    head = found.head
    assert head is not None, "what comes from a store has one"
    yield Moment(at=head.enqueued_at, what="enqueued")
    for failure in found.failures:
        yield Moment(
            at=failure.failed_at,
            what="failed",
            attempt=failure.attempt,
            worker=failure.worker,
            detail=f"{failure.boundary}: {failure.message}",
        )
    yield Moment(at=head.claimed_at, what="claimed", attempt=head.attempt, worker=head.worker)
    yield Moment(
        at=head.finished_at,
        what="dead-lettered" if found.state == "dead" else "published",
        attempt=head.attempt,
        worker=head.worker,
        detail=head.outcome,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """`verdict` is a sentence that says whether the request was trained and why, or what it waits for.

    `judging` is the same for the request that judges it, and empty if there is none.
    """

    request_id: str
    run_id: str
    state: State | None  # None: Redis no longer has the request
    moments: tuple[Moment, ...]
    verdict: str
    judging: str = ""


async def life(redis: Redis, request_id: str, run_dir: Path | None) -> Life:
    """The life of a request. Raises LookupError if neither Redis nor a directory knows it."""
    rollout_id = judged_rollout_id(request_id)
    if rollout_id is not None:
        return await _judge_life(redis, request_id, rollout_id, run_dir)
    found: FoundRollout | None = None
    with contextlib.suppress(LookupError):
        found = await finding.find_rollout(redis, request_id)
    run_id = found.request.run_id if found and found.request else ""
    events = await _redis_moments(redis, run_id, request_id, ROLLOUT)
    if found is None and not events:
        return _past_life(request_id, await finding.directories(redis, run_dir), journal_of=run_dir)
    judging = await finding.judging_of(redis, request_id)
    judged = await _redis_moments(redis, run_id, judge_request_id(request_id), JUDGE)
    where = found_journal(run_dir, EpisodeRow) if run_dir else await _known_journal(redis, run_id)
    return _life(request_id, run_id, found, events, where, judging=judging, judged=judged)


async def _judge_life(redis: Redis, request_id: str, rollout_id: str, run_dir: Path | None) -> Life:
    """The life of a judge request."""
    found: FoundJudging | None = None
    with contextlib.suppress(LookupError):
        found = await finding.find_judging(redis, request_id)
    run_id = found.request.run_id if found and found.request else ""
    events = await _redis_moments(redis, run_id, request_id, JUDGE)
    where = found_journal(run_dir, EpisodeRow) if run_dir else await _known_journal(redis, run_id)
    return _life_of_judging(request_id, rollout_id, run_id, found, events, where)


def stored_life(request_id: str, run_dir: Path) -> Life:
    """Returns the life of a request from the run's directory alone."""
    rollout_id = judged_rollout_id(request_id)
    if rollout_id is not None:
        where = found_journal(run_dir, EpisodeRow)
        return _life_of_judging(request_id, rollout_id, identity(run_dir).run_id, None, (), where)
    return _past_life(request_id, [run_dir], journal_of=run_dir)


def _past_life(request_id: str, run_dirs: Sequence[Path], *, journal_of: Path | None) -> Life:
    """The life of a rollout that Redis does not know."""
    found: FoundRollout | None = None
    with contextlib.suppress(LookupError):
        found = finding.stored_rollout(run_dirs, request_id)
    directory = Path(found.source) if found else journal_of
    where = found_journal(directory, EpisodeRow) if directory else None
    events = list(_stored_moments(found)) if found else []
    head = found.head if found else None
    return _life(request_id, head.run_id if head else "", found, events, where)


def _life(
    request_id: str,
    run_id: str,
    found: FoundRollout | None,
    events: Sequence[Moment],
    where: Path | None,
    *,
    judging: FoundJudging | None = None,
    judged: Sequence[Moment] = (),
) -> Life:
    """The life of a rollout.

    `where` is the journal's directory; `judging` and `judged` are what Redis knows about the request that judges it.
    """
    told = list(_told_of_rollout(where, request_id)) if where else []
    told_of_judging = list(_told_of_judging(where, request_id)) if where else []
    own = sorted([*events, *told], key=lambda moment: moment.at)
    if not own and found is None:
        raise _unknown(request_id)
    is_judged = bool(judging or judged or told_of_judging)
    return Life(
        request_id=request_id,
        run_id=run_id,
        state=found.state if found else None,
        moments=tuple(sorted([*own, *judged, *told_of_judging], key=lambda moment: moment.at)),
        verdict=_verdict(found, own, told, where),
        judging=_judging_verdict(judging, judged, told_of_judging, where) if is_judged else "",
    )


def _life_of_judging(
    request_id: str,
    rollout_id: str,
    run_id: str,
    found: FoundJudging | None,
    events: Sequence[Moment],
    where: Path | None,
) -> Life:
    told = list(_told_of_judging(where, rollout_id)) if where else []
    if not (found or events or told):
        raise _unknown(request_id)
    return Life(
        request_id=request_id,
        run_id=run_id,
        state=found.state if found else None,
        moments=tuple(sorted([*events, *told], key=lambda moment: moment.at)),
        verdict=_judging_verdict(found, events, told, where),
    )


async def _known_journal(redis: Redis, run_id: str) -> Path | None:
    """The journal that the trainer's last status names, if it is on this machine."""
    status, _ = await census.last_status(redis, run_id) if run_id else (None, 0.0)
    directory = Path(status.journal) if status and status.journal else None
    return directory if directory and directory.is_dir() else None


def _told_of_rollout(journal: Path, request_id: str) -> Iterator[Moment]:
    """Yields the journal's events about the request: the step that trained it, or how its episode was settled."""
    for step in mentioning(journal, StepRow, request_id):
        if request_id in step.request_ids:
            detail = f"step {step.step}, from weights v{step.version}"
            yield Moment(at=step.at, what="trained", detail=detail)
    for row in mentioning(journal, EpisodeRow, request_id):
        if row.request_id == request_id and row.fate != "trained":
            yield Moment(at=row.at, what=row.fate, detail=row.evaluation or FATES[row.fate])


def _told_of_judging(journal: Path, rollout_id: str) -> Iterator[Moment]:
    """Yields the journal's event about the request that judges the rollout."""
    for row in mentioning(journal, JudgementRow, rollout_id):
        if row.rollout_id == rollout_id:
            waited = f"waited {age(row.waited_s)}"
            detail = ", ".join(part for part in (finding.scored(row) or row.error, waited) if part)
            yield Moment(at=row.at, what=row.fate, detail=detail, kind=JUDGE.name)


def _unknown(request_id: str) -> LookupError:
    return LookupError(
        f"nothing is known of request {request_id}; with --run-dir the run's directory is searched too"
    )


def _verdict(
    found: FoundRollout | None, own: Sequence[Moment], told: Sequence[Moment], where: Path | None
) -> str:
    if told:
        last = told[-1] if all(moment.what != "trained" for moment in told) else told[0]
        return f"trained in {last.detail}" if last.what == "trained" else FATES[last.what]
    match found.state if found else None:
        case "dead":
            return f"not trained: {_death(found)}"
        case "answered":
            return _answered(found, own, where)
        case "queued" | "claimed" | "lost":
            return _not_yet(found, "worker")
        case _:
            return FATES["withdrawn"]


def _judging_verdict(
    found: FoundJudging | None, own: Sequence[Moment], told: Sequence[Moment], where: Path | None
) -> str:
    if told:
        return f"{JUDGEMENT_FATES[told[-1].what]}; {told[-1].detail}"
    match found.state if found else None:
        case "dead":
            return f"not judged: {_death(found)}"
        case "answered":
            return _answered(found, own, where)
        case "queued" | "claimed" | "lost":
            return _not_yet(found, "judge")
        case _:
            return "not judged: the request was withdrawn"


def _not_yet(found: Found[Any, Any] | None, worker: str) -> str:
    """The state of a request that has no result."""
    assert found is not None
    if found.state == "claimed":
        return f"not yet: a {worker} has claimed it"
    if found.state == "lost":
        return "not yet: Redis lost its place in the queue; the trainer will re-enqueue it"
    if found.failures:
        return f"not yet: it waits for try {len(found.failures) + 1}"
    return f"not yet: it waits for a {worker}"


def _death(found: Found[Any, Any] | None) -> str:
    last = found.failures[-1] if found and found.failures else None
    return f"dead-lettered, {last.kind}: {last.message}" if last else "dead-lettered"


def _answered(found: Found[Any, Any] | None, own: Sequence[Moment], where: Path | None) -> str:
    """The fate of a request that no available journal mentions."""
    if own and own[-1].what == "acknowledged":
        return "settled by the trainer; its journal, with --run-dir, says how"
    read = bool(found and found.source) or any(moment.what == "read" for moment in own)
    whose = "the journal does not have it yet" if where else "with --run-dir the journal may say more"
    return f"answered, {'read' if read else 'not yet read'} by the trainer; {whose}"


def text(life: Life, ink: Ink) -> str:
    """The printed form of a life: one event on each line, with the time since the one before."""
    rows = [ink.bold(f"request {life.request_id}") + (f"  run {life.run_id}" if life.run_id else "")]
    # An event of the request itself is shown by its name; in the life of a rollout, an event of its judging also shows the kind.
    is_rollout = judged_rollout_id(life.request_id) is None
    names = [
        f"{moment.kind} {moment.what}" if is_rollout and moment.kind == JUDGE.name else moment.what
        for moment in life.moments
    ]
    width = max(13, *(len(name) + 1 for name in names))
    before = life.moments[0].at if life.moments else 0.0
    for moment, name in zip(life.moments, names, strict=True):
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment.at))
        whose = f"attempt {moment.attempt}" if moment.attempt else ""
        what = f"{name:<{width}}"
        what = ink.bad(what) if moment.what in ("failed", "dead-lettered") else what
        parts = [whose, moment.worker, moment.detail.replace("\n", " ")[:200]]
        rest = "  ".join(part for part in parts if part)
        rows.append(f"  {clock}  {'+' + age(moment.at - before):>8}  {what} {rest}".rstrip())
        before = moment.at
    rows.append(life.verdict)
    if life.judging:
        rows.append(f"judging: {life.judging}")
    return lines(rows)
