"""`status`: all runs and workers, and why anything is unwell."""

from collections.abc import Iterator
from dataclasses import dataclass

from redis.asyncio import Redis

from pipeline import census
from pipeline.census import RunCensus, WorkerStatus
from pipeline.cli.ink import count

MIN_EPISODES = 50  # recent ones, below which nothing is concluded from how they ended
SPOILT_SHARE = 0.9
SPOILT = {"format_errors": "in format errors", "context": "with a full context"}
"""Limits at which an episode ends without having tried the task, as `complaints` names them."""

BARREN_SHARE = 0.25  # of the groups without signal that end a run


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCensus:
    """Everything that `status` shows."""

    workers: tuple[WorkerStatus, ...]
    silent: dict[str, float]  # worker name to its last heartbeat, Unix seconds
    runs: tuple[RunCensus, ...]


async def fleet_census(redis: Redis, run_ids: list[str]) -> FleetCensus:
    workers, silent = await census.workers(redis)
    return FleetCensus(
        workers=tuple(workers),
        silent=silent,
        runs=tuple([await census.run_census(redis, run_id) for run_id in run_ids]),
    )


def complaints(fleet: FleetCensus) -> list[str]:
    """Why the fleet is unwell, one sentence each; empty if it is well."""
    found = [complaint for run in fleet.runs for complaint in _complaints_of_run(run)]
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


def _complaints_of_run(run: RunCensus) -> Iterator[str]:
    name = f"run {run.run_id}"
    num_open = run.queued + len(run.claimed) + run.unread + run.unacknowledged
    if run.dead:
        yield f"{name} has {count(run.dead, 'dead request')}: `dead` lists them"
    if run.malformed:
        yield f"{name} has {count(run.malformed, 'result')} that could not be decoded"
    if run.unreadable:
        yield f"{name} published weights that cannot be decoded: {run.unreadable}"
    if run.has_trainer:
        yield from _useless(run, name)
    elif num_open:
        yield f"{name} has no trainer alive, but {count(num_open, 'open request')}"


def _useless(run: RunCensus, name: str) -> Iterator[str]:
    """A run that goes on and learns nothing."""
    num_recent = sum(run.outcomes.values())
    spoilt = {word: run.outcomes.get(f"exhausted:{limit}", 0) for limit, word in SPOILT.items()}
    if num_recent >= MIN_EPISODES and sum(spoilt.values()) >= SPOILT_SHARE * num_recent:
        how = " and ".join(f"{number} {word}" for word, number in spoilt.items() if number)
        yield f"{name} learns nothing: of its last {num_recent} episodes ended {how}"
    status = run.status
    if status is None or not status.max_groups_without_signal:
        return
    if status.groups_without_signal >= BARREN_SHARE * status.max_groups_without_signal:
        yield (
            f"{name} learns nothing: in {status.groups_without_signal} groups in a row all members had the same "
            f"reward; at {status.max_groups_without_signal} it ends"
        )
