"""`status`: all runs and workers, and why anything is unwell."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from pipeline import census
from pipeline.census import KindCensus, RunCensus, RunStatus, WorkerStatus
from pipeline.cli.ink import age, count
from pipeline.kinds import JUDGE

MIN_EPISODES = 50  # recent ones, below which nothing is concluded from how they ended
SPOILT_SHARE = 0.9
SPOILT = {"format_errors": "in format errors", "context": "with a full context"}
"""Limits at which an episode ends without having tried the task, as `complaints` names them."""

BARREN_SHARE = 0.25  # of the groups without signal that end a run
JUDGE_WAIT_S = 600.0  # how long groups wait for judgements if the trainer does not say
# A judge request may wait for a judge for so long even if groups wait less: judges claim at once, but not in no time.
MIN_BEHIND_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCensus:
    """Everything that `status` shows."""

    workers: tuple[WorkerStatus, ...]  # that play rollouts
    judges: tuple[WorkerStatus, ...]
    silent: dict[str, float]  # worker name to its last heartbeat, Unix seconds
    runs: tuple[RunCensus, ...]


async def fleet_census(redis: Redis, run_ids: list[str]) -> FleetCensus:
    alive, silent = await census.workers(redis)
    return FleetCensus(
        workers=tuple(worker for worker in alive if worker.kind != JUDGE.name),
        judges=tuple(worker for worker in alive if worker.kind == JUDGE.name),
        silent=silent,
        runs=tuple([await census.run_census(redis, run_id) for run_id in run_ids]),
    )


def complaints(fleet: FleetCensus) -> list[str]:
    """Why the fleet is unwell, one sentence each; empty if it is well."""
    found = [complaint for run in fleet.runs for complaint in _complaints_of_run(run)]
    num_rollouts = sum(run.rollouts.queued for run in fleet.runs)
    num_judgings = sum(run.judging.queued for run in fleet.runs if run.judging is not None)
    found += _complaints_of_workers(fleet.workers, "worker", num_rollouts, "request")
    found += _complaints_of_workers(fleet.judges, "judge", num_judgings, "judge request")
    # Of workers only: a judge without engines is as it should be where rules judge.
    without = [worker for worker in fleet.workers if worker.set_aside]
    if without:
        first = f"the first because {without[0].set_aside}"
        found.append(f"{count(len(without), 'worker')} set something aside, {first}")
    return found


def _complaints_of_workers(
    alive: Sequence[WorkerStatus], noun: str, num_queued: int, queued_noun: str
) -> Iterator[str]:
    if num_queued and not alive:
        yield f"no {noun} is alive, but {count(num_queued, queued_noun)} queued"
    if alive and all(worker.paused for worker in alive):
        yield f"every {noun} is paused, the first because {alive[0].paused}"


def _complaints_of_run(run: RunCensus) -> Iterator[str]:
    name = f"run {run.run_id}"
    num_open = sum(jobs.num_outstanding for jobs in run.kinds)
    if run.rollouts.dead:
        yield f"{name} has {count(run.rollouts.dead, 'dead request')}: `dead` lists them"
    if run.rollouts.malformed:
        yield f"{name} has {count(run.rollouts.malformed, 'result')} that could not be decoded"
    if run.judging is not None:
        yield from _ill_judged(run.judging, run.status, name)
    if run.unreadable:
        yield f"{name} published weights that cannot be decoded: {run.unreadable}"
    if run.has_trainer and run.status is not None:
        yield from (f"{name}, alarm {alarm}" for alarm in run.status.alarms)
    if run.has_trainer:
        yield from _useless(run, name)
    elif num_open:
        yield f"{name} has no trainer alive, but {count(num_open, 'open request')}"


def _ill_judged(judging: KindCensus, status: RunStatus | None, name: str) -> Iterator[str]:
    """Why a run's judging is unwell."""
    if judging.dead:
        yield f"{name} has {count(judging.dead, 'dead judge request')}: `dead --kind judge` lists them"
    if judging.malformed:
        yield f"{name} has {count(judging.malformed, 'judgement')} that could not be decoded"
    oldest = judging.oldest_queued_at
    wait_s = JUDGE_WAIT_S if status is None or status.judge_wait_s is None else status.judge_wait_s
    if oldest is not None and time.time() - oldest > max(wait_s, MIN_BEHIND_S):
        waits = (
            f"the oldest of {count(judging.queued, 'judge request')} has waited {age(time.time() - oldest)}"
        )
        is_required = status is not None and status.judge_required
        follows = "groups wait for their scores" if is_required else "groups may train without scores"
        yield f"{name} is judged too slowly: {waits}, and {follows}"


def _useless(run: RunCensus, name: str) -> Iterator[str]:
    """A run that goes on and learns nothing."""
    num_recent = sum(run.rollouts.outcomes.values())
    spoilt = {word: run.rollouts.outcomes.get(f"exhausted:{limit}", 0) for limit, word in SPOILT.items()}
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
