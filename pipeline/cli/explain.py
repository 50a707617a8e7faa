"""`explain`: the events of one request in order, and why it was or was not trained.

The events come from Redis, or, when Redis has forgotten them or is gone, from the rollout in the run's directory; what became of
the trajectory comes from the trainer's journal, which is read as JSON lines. The trainer need not be alive.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from redis.asyncio import Redis

from pipeline import census, events, keys, stream
from pipeline.cli import finding, stored
from pipeline.cli.finding import Found
from pipeline.cli.ink import Ink, age
from pipeline.cli.listing import State
from pipeline.message import UnixSeconds
from pipeline.visible import visible

EPISODES, STEPS = "episodes.jsonl", "steps.jsonl"

FATES = {
    "trained": "trained",
    "zero_variance": "not trained: all members of its group had the same reward, so there was nothing to learn",
    "too_few_valid": "not trained: too many members of its group failed",
    "late": "not trained: it arrived after its group had closed, or its weights were too old",
    "refused": "not trained: rejected, invalid samples",
    "failed": "not trained: it has no reward, because the infrastructure failed",
    "not_finite": "not trained: the loss or gradient of its batch was not finite, so the batch was skipped",
    "quarantined": "not trained: its task is in quarantine",
    "evaluated": "not for training: it counted in a held-out evaluation",
    "withdrawn": "not trained: it was withdrawn",
}


class _StepRequests(msgspec.Struct):
    """What is read of a step's row."""

    step: int
    version: int
    request_ids: frozenset[str]
    at: UnixSeconds = 0.0


class _EpisodeFate(msgspec.Struct):
    """What is read of an episode's row."""

    request_id: str
    fate: str
    evaluation: str = ""
    at: UnixSeconds = 0.0


R = TypeVar("R", _StepRequests, _EpisodeFate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An event of the request."""

    at: float  # Unix seconds
    what: str
    attempt: int = 0
    worker: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """`verdict` says in a sentence whether the request was trained and why, or what it waits for."""

    request_id: str
    run_id: str
    state: State | None  # None: Redis has forgotten it
    moments: tuple[Moment, ...]
    verdict: str


async def life(redis: Redis, request_id: str, run_dir: Path | None) -> Life:
    """Raises LookupError if neither Redis nor a directory knows the request."""
    found: Found | None = None
    with contextlib.suppress(LookupError):
        found = await finding.find(redis, request_id)
    run_id = found.request.run_id if found and found.request else ""
    moments = [
        Moment(at=one.at, what=one.what, attempt=one.attempt, worker=one.worker, detail=one.detail)
        for one in await events.events(redis, request_id)
    ]
    moments += await _reading(redis, run_id, request_id)
    if found is None and not moments:
        return _past_life(request_id, await stored.directories(redis, run_dir), journal_of=run_dir)
    journal = _journal(run_dir) if run_dir else await _known_journal(redis, run_id)
    return _life(request_id, run_id, found, moments, journal)


def stored_life(request_id: str, run_dir: Path) -> Life:
    """The same from the run's directory alone."""
    return _past_life(request_id, [run_dir], journal_of=run_dir)


def _past_life(request_id: str, run_dirs: Sequence[Path], *, journal_of: Path | None) -> Life:
    """Of a request that Redis does not know."""
    found: Found | None = None
    with contextlib.suppress(LookupError):
        found = stored.find(run_dirs, request_id)
    directory = Path(found.source) if found else journal_of
    journal = _journal(directory) if directory else None
    moments = list(_stored_moments(found)) if found else []
    head = found.head if found else None
    return _life(request_id, head.run_id if head else "", found, moments, journal)


def _life(
    request_id: str, run_id: str, found: Found | None, moments: Sequence[Moment], journal: Path | None
) -> Life:
    told = list(_told(journal, request_id)) if journal else []
    moments = sorted([*moments, *told], key=lambda moment: moment.at)
    if not moments and found is None:
        raise LookupError(
            f"nothing is known of request {request_id}; with --run-dir the run's directory is searched too"
        )
    return Life(
        request_id=request_id,
        run_id=run_id,
        state=found.state if found else None,
        moments=tuple(moments),
        verdict=_verdict(found, moments, told, journal),
    )


def _stored_moments(found: Found) -> Iterator[Moment]:
    """What its head and its failures tell."""
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


async def _reading(redis: Redis, run_id: str, request_id: str) -> list[Moment]:
    """When it was delivered to the trainer. Redis knows this until it is acknowledged."""
    entry = await redis.get(keys.published(request_id))
    if entry is None or not run_id or not await redis.exists(keys.stream(run_id)):
        return []
    if not await redis.xinfo_groups(keys.stream(run_id)):
        return []
    at = await stream.delivered_at(redis, run_id, entry.decode())
    return [] if at is None else [Moment(at=at, what="read", detail=f"entry {entry.decode()}")]


async def _known_journal(redis: Redis, run_id: str) -> Path | None:
    """The journal that the trainer's last status names, if it is on this machine."""
    status, _ = await census.last_status(redis, run_id) if run_id else (None, 0.0)
    directory = Path(status.journal) if status and status.journal else None
    return directory if directory and directory.is_dir() else None


def _journal(run_dir: Path) -> Path:
    """Raises LookupError for a directory that holds none."""
    for directory in (run_dir / "journal", run_dir):
        if (directory / EPISODES).is_file():
            return directory
    raise LookupError(f"{run_dir} holds no journal: give a run's directory, as in runs/demo")


def _told(journal: Path, request_id: str) -> Iterator[Moment]:
    """The step that trained the request, and its episode's row."""
    for step in _rows(journal / STEPS, request_id, _StepRequests):
        if request_id in step.request_ids:
            detail = f"step {step.step}, from weights v{step.version}"
            yield Moment(at=step.at, what="trained", detail=detail)
    for episode in _rows(journal / EPISODES, request_id, _EpisodeFate):
        fate = episode.fate
        if episode.request_id == request_id and fate != "trained":
            yield Moment(at=episode.at, what=fate, detail=episode.evaluation or FATES.get(fate, fate))


def _rows(path: Path, request_id: str, kind: type[R]) -> Iterator[R]:
    """The rows of one file of a journal that mention the id. An incomplete last line is skipped."""
    if not path.is_file():
        return
    wanted, decoder = request_id.encode(), msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for line in file:
            if wanted in line and line.endswith(b"\n"):
                with contextlib.suppress(msgspec.DecodeError):
                    yield decoder.decode(line)


def _verdict(
    found: Found | None, moments: Sequence[Moment], told: Sequence[Moment], journal: Path | None
) -> str:
    if told:
        last = told[-1] if all(moment.what != "trained" for moment in told) else told[0]
        return f"trained in {last.detail}" if last.what == "trained" else FATES.get(last.what, last.what)
    match found.state if found else None:
        case "queued":
            waits = found.failures if found else ()
            return (
                f"not yet: it waits for try {len(waits) + 1}" if waits else "not yet: it waits for a worker"
            )
        case "claimed":
            return "not yet: a worker has claimed it"
        case "lost":
            return "not yet: Redis lost its place in the queue; the trainer will re-enqueue it"
        case "dead":
            last = found.failures[-1] if found and found.failures else None
            return (
                f"not trained: dead-lettered, {last.kind}: {last.message}"
                if last
                else "not trained: dead-lettered"
            )
        case "answered":
            if moments and moments[-1].what == "acknowledged":
                return "settled by the trainer; its journal, with --run-dir, says how"
            read = bool(found and found.source) or any(moment.what == "read" for moment in moments)
            whose = (
                "the journal does not have it yet" if journal else "with --run-dir the journal may say more"
            )
            return f"answered, {'read' if read else 'not yet read'} by the trainer; {whose}"
        case _:
            return FATES["withdrawn"]


def text(life: Life, ink: Ink) -> str:
    """For a person: one event on each line, with the time since the one before."""
    rows = [ink.bold(f"request {life.request_id}") + (f"  run {life.run_id}" if life.run_id else "")]
    before = life.moments[0].at if life.moments else 0.0
    for moment in life.moments:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment.at))
        whose = f"attempt {moment.attempt}" if moment.attempt else ""
        what = (
            ink.bad(f"{moment.what:<13}")
            if moment.what in ("failed", "dead-lettered")
            else f"{moment.what:<13}"
        )
        parts = [whose, visible(moment.worker), visible(moment.detail.replace("\n", " "))[:200]]
        rest = "  ".join(part for part in parts if part)
        rows.append(f"  {clock}  {'+' + age(moment.at - before):>8}  {what} {rest}".rstrip())
        before = moment.at
    return "\n".join([*rows, f"{visible(life.verdict)}"])
