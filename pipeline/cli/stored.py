"""Requests as the directory of their run has them, when Redis has forgotten them or is gone."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from pipeline import census
from pipeline.cli.finding import Found, FoundRollout
from pipeline.cli.listing import LineFilter, RequestLine, State, head_line
from pipeline.rollout_store.reading import DIRECTORY, RolloutStore, Stored, stores_of
from pipeline.rollout_store.record import StoredHead

RUN_FILE = "run.json"


class _RunFile(msgspec.Struct):
    """What is read of it."""

    run_id: str


async def directories(redis: Redis, run_dir: Path | None) -> list[Path]:
    """Where to look: `run_dir`, or else the directories on this machine of the runs that Redis knows."""
    if run_dir is not None:
        return [run_dir]
    statuses = [(await census.last_status(redis, run_id))[0] for run_id in await census.run_ids(redis)]
    journals = [Path(status.journal) for status in statuses if status is not None and status.journal]
    return [journal.parent for journal in journals if journal.is_dir()]


def find(run_dirs: Collection[Path], request_id: str) -> FoundRollout:
    """Raises LookupError if no store of these directories has the request."""
    kept = find_stored(run_dirs, request_id)
    if kept is None:
        raise unknown(run_dirs, request_id)
    return _found(*kept)


def find_stored(run_dirs: Collection[Path], request_id: str) -> tuple[Stored, Path] | None:
    """The rollout, with the directory that has it."""
    for run_dir in run_dirs:
        for store in stores_of(run_dir):
            stored = store.find(request_id)
            if stored is not None:
                return stored, run_dir
    return None


def unknown(run_dirs: Collection[Path], request_id: str) -> LookupError:
    places = ", ".join(str(run_dir / DIRECTORY) for run_dir in run_dirs)
    return LookupError(f"nothing is known of request {request_id}{f' in {places}' if places else ''}")


def lines(
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
    return _lines(stores, states, wanted, only_run)


def _lines(
    stores: Sequence[RolloutStore], states: Collection[State], wanted: LineFilter, only_run: str | None
) -> Iterator[RequestLine]:
    for store in stores:
        for stored in store.heads(newest_first=True):
            line = _line(stored)
            of_run = only_run is None or only_run == line.run_id
            if of_run and line.state in states and wanted.matches(line):
                yield line


def run_id_of(run_dir: Path) -> str:
    """The run whose directory it is; an evaluation's directory has its id as a name."""
    try:
        return msgspec.json.decode((run_dir / RUN_FILE).read_bytes(), type=_RunFile).run_id
    except (FileNotFoundError, msgspec.DecodeError):
        return run_dir.resolve().name


def _line(stored: StoredHead) -> RequestLine:
    line = head_line(stored.head)
    if not stored.is_dead:
        return line
    return RequestLine(
        run_id=line.run_id,
        request_id=line.request_id,
        state="dead",
        task_id=line.task_id,
        purpose=line.purpose,
        at=line.at,
        detail=line.detail,
        worker=line.worker,
        attempt=line.attempt,
        group_id=line.group_id,
        outcome=line.outcome,
        head=line.head,
    )


def _found(stored: Stored, run_dir: Path) -> FoundRollout:
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
