"""How `status` and `top` show runs and workers."""

import time
from collections.abc import Sequence
from pathlib import PurePath

from pipeline.census import Claimed, KindCensus, RunCensus, RunStatus, Scoring, WorkerStatus
from pipeline.cli.ink import Ink, age, count
from pipeline.cli.listing import where
from pipeline.cli.status import FleetCensus
from pipeline.visible import visible

MOST_WORKERS = 40  # shown; those that are paused or lack something first
MOST_PAST_RUNS = 5


def status(fleet: FleetCensus, complaints: Sequence[str], ink: Ink) -> str:
    """The whole fleet: runs, then workers and judges with their claims, then what is wrong."""
    now = time.time()
    past = [run for run in fleet.runs if _is_past(run)]
    blocks = [_run_block(run, ink) for run in fleet.runs if run not in past]
    if past:
        blocks.append(_past_block(past, ink))
    blocks += _worker_blocks(fleet, now, ink)
    if complaints:
        blocks.append("\n".join(ink.bad(f"unwell: {visible(complaint)}") for complaint in complaints))
    else:
        blocks.append(ink.good("well"))
    return "\n\n".join(blocks)


def _is_past(run: RunCensus) -> bool:
    is_open = any(jobs.num_outstanding or jobs.dead or jobs.malformed for jobs in run.kinds)
    return not (run.has_trainer or is_open)


def _past_block(past: Sequence[RunCensus], ink: Ink) -> str:
    """Runs with nothing open; the newest of those whose trainer ever reported."""
    newest = sorted(past, key=lambda run: run.silent_s if run.status else float("inf"))[:MOST_PAST_RUNS]
    rows = [f"{count(len(past), 'earlier run')} with nothing open"]
    rows += [f"  {ink.bold(run.run_id)}  {visible(_trainer(run))}" for run in newest]
    if len(newest) < len(past):
        rows.append(ink.faint(f"  and {len(past) - len(newest):,} more"))
    return "\n".join(rows)


def _trainer(run: RunCensus) -> str:
    """What the run's trainer does, or what became of it."""
    said = run.status
    if said is None:
        return "no trainer has reported"
    if said.ended:
        return f"ended {age(run.silent_s)} ago: {said.ended}"
    progress = f"step {said.step}" + (f" of {said.num_steps}" if said.num_steps else "")
    doing = f"{progress}, {said.phase}" + (f": {said.detail}" if said.detail else "")
    if run.has_trainer:
        return doing
    return f"the trainer stopped reporting {age(run.silent_s)} ago at {doing}; if it crashed, {_resume(said)}"


def _resume(said: RunStatus) -> str:
    run_dir = PurePath(said.journal).parent if said.journal else "RUN_DIR"
    return f"resume it with `python -m trainer.run {run_dir}/recipe.toml --run-dir {run_dir} --resume`"


def _run_block(run: RunCensus, ink: Ink) -> str:
    shade = str if run.has_trainer else ink.doubtful
    rows = [("trainer", shade(visible(_trainer(run))))]
    said = run.status if run.has_trainer else None
    if said is not None:
        if said.admission:
            rows.append(("admission", said.admission))
        if said.quarantined:
            tasks = f"{count(len(said.quarantined), 'task')}: {', '.join(said.quarantined)}"
            rows.append(("quarantine", ink.doubtful(tasks)))
    rows += [
        ("weights", _weights(run, ink)),
        ("requests", _requests(run.rollouts, ink)),
        ("results", _results(run.rollouts)),
        ("lag", _lag(run)),
    ]
    if run.rollouts.outcomes:
        outcomes = sorted(run.rollouts.outcomes.items(), key=lambda pair: -pair[1])
        rows.append(("outcomes", ", ".join(f"{number:,} {outcome}" for outcome, number in outcomes)))
    if run.judging is not None:
        rows += [("judging", _requests(run.judging, ink)), ("judgements", _results(run.judging))]
    if run.scoring is not None and run.scoring.num_steps:
        rows.append(("scores", _scores(run.scoring)))
    num_malformed = sum(jobs.malformed for jobs in run.kinds)
    if num_malformed:
        rows.append(("unreadable", ink.bad(count(num_malformed, "result"))))
    return "\n".join(
        [
            f"run {ink.bold(run.run_id)}",
            *(f"  {name:<11}{value}" for name, value in rows),
        ]
    )


def _requests(jobs: KindCensus, ink: Ink) -> str:
    waiting = f" ({jobs.waiting_out:,} waiting out a back-off)" if jobs.waiting_out else ""
    since = "" if jobs.oldest_claim_at is None else f" (oldest {age(time.time() - jobs.oldest_claim_at)})"
    dead = ink.bad(f"{jobs.dead:,} dead") if jobs.dead else "0 dead"
    return f"{jobs.queued:,} queued{waiting}, {len(jobs.claimed):,} claimed{since}, {dead}"


def _results(jobs: KindCensus) -> str:
    held = f", {jobs.unacknowledged_bytes / 1e6:,.1f} MB of bodies" if jobs.unacknowledged_bytes else ""
    rate = f", {jobs.finished_per_min:.1f} a minute"
    return f"{jobs.unread:,} unread, {jobs.unacknowledged:,} unacknowledged{held}{rate}"


def _scores(scoring: Scoring) -> str:
    """What recent judgements scored; a rule casts no votes."""
    steps = f"{scoring.num_scored:,} of {count(scoring.num_steps, 'recent step')} scored"
    if not scoring.num_votes:
        return steps
    return f"{steps}, {scoring.num_valid_votes:,} of {count(scoring.num_votes, 'vote')} valid"


def _weights(run: RunCensus, ink: Ink) -> str:
    if run.learned is None:
        return "none published yet"
    learned = f"v{run.learned.version} learned (step {run.learned.step})"
    if run.served is None:
        return f"{learned}, not yet confirmed by any engine"
    engines = count(len(run.served.engines), "engine")
    behind = run.served.version < run.learned.version
    served = f"v{run.served.version} served by {engines}"
    if run.served.quarantined:
        served += ", " + ink.doubtful(f"quarantined: {', '.join(run.served.quarantined)}")
    return f"{learned}, {ink.doubtful(served) if behind else served}"


def _lag(run: RunCensus) -> str:
    if not run.lags:
        return "nothing has arrived since the newest version"
    ordered = sorted(run.lags)
    over = count(len(ordered), "arrival")
    return f"median {ordered[len(ordered) // 2]}, max {ordered[-1]} versions, over {over}"


def _worker_blocks(fleet: FleetCensus, now: float, ink: Ink) -> list[str]:
    """Workers, judges if there are any or should be, and those that are silent."""
    rollouts = [claim for run in fleet.runs for claim in run.rollouts.claimed]
    judgings = [claim for run in fleet.runs if run.judging is not None for claim in run.judging.claimed]
    blocks = [_workers_block("worker", fleet.workers, rollouts, now, ink)]
    if fleet.judges or any(run.judging is not None and run.judging.num_outstanding for run in fleet.runs):
        blocks.append(_workers_block("judge", fleet.judges, judgings, now, ink))
    live = {worker.name for worker in (*fleet.workers, *fleet.judges)}
    held = _by_worker([*rollouts, *judgings])
    rows: list[str] = []
    for name in sorted(fleet.silent.keys() | held.keys() - live)[:MOST_WORKERS]:
        silence = f"silent for {age(now - fleet.silent[name])}" if name in fleet.silent else "never heard"
        rows += [f"  {ink.bold(name)}  {ink.doubtful(silence)}", *_claim_rows(held.get(name, []), now, ink)]
    return [*blocks, "\n".join(["not heard from", *rows])] if rows else blocks


def _by_worker(claims: Sequence[Claimed]) -> dict[str, list[Claimed]]:
    held: dict[str, list[Claimed]] = {}
    for claim in claims:
        held.setdefault(claim.lease.worker, []).append(claim)
    return held


def _workers_block(
    noun: str, alive: Sequence[WorkerStatus], claims: Sequence[Claimed], now: float, ink: Ink
) -> str:
    held = _by_worker(claims)
    slots = sum(worker.slots for worker in alive)
    busy = sum(len(held.get(worker.name, ())) for worker in alive)
    rows = [f"{count(len(alive), noun)}, {busy} of {count(slots, 'slot')} busy"]
    if claims:
        oldest = min(claims, key=lambda claim: claim.lease.claimed_at)
        rows[0] += f", oldest claim {age(now - oldest.lease.claimed_at)}: {oldest.request_id}"
    told = sorted(alive, key=lambda worker: not (worker.paused or worker.set_aside))[:MOST_WORKERS]
    for worker in sorted(told, key=lambda worker: worker.name):
        record = f"{worker.finished:,} finished, {worker.failed:,} failed, up {age(now - worker.started_at)}"
        mine = held.get(worker.name, [])
        rows.append(f"  {ink.bold(worker.name)}  {len(mine)} of {worker.slots} busy, {ink.faint(record)}")
        if worker.paused:
            rows.append(f"    {ink.doubtful(f'paused: {visible(worker.paused)}')}")
        if worker.set_aside:
            rows.append(f"    {ink.doubtful(f'set aside: {visible(worker.set_aside)}')}")
        rows += _claim_rows(mine, now, ink)
    if len(told) < len(alive):
        rows.append(ink.faint(f"  and {len(alive) - len(told):,} more"))
    return "\n".join(rows)


def _claim_rows(mine: Sequence[Claimed], now: float, ink: Ink) -> list[str]:
    rows: list[str] = []
    for claim in sorted(mine, key=lambda claim: claim.lease.claimed_at):
        again = f"  attempt {claim.lease.attempt}" if claim.lease.attempt > 1 else ""
        rows.append(
            f"    {where(claim.lease, claim.max_turns):<16}{age(now - claim.lease.claimed_at):>8}"
            f"  {claim.task_id}  {ink.faint(claim.request_id)}{ink.doubtful(again)}"
        )
    return rows
