"""`status` prints all runs and workers, and the reasons if anything is unwell. `top` redraws the same until q or Ctrl-C; into a pipe, it
prints once.

In `top` the verdict comes first and stays there; what does not fit below it is counted, and can be scrolled to.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from redis.asyncio import Redis
from redis.exceptions import RedisError

from pipeline import census, connection
from pipeline.census import Claimed, KindCensus, RunCensus, RunStatus, Scoring, WorkerStatus
from pipeline.cli import listing
from pipeline.cli.listing import where
from pipeline.journal.reading import RECIPE
from pipeline.kinds import JUDGE, KINDS
from pipeline.message import MalformedMessage
from pipeline.screen import Ink, age, count, cut, has_colours, lines, obeyed

MIN_EPISODES = 50  # with fewer recent episodes, nothing is concluded from how they ended
SPOILT_SHARE = 0.9
SPOILT = {"format_errors": "in format errors", "context": "with a full context"}
"""Limits that end an episode before it has tried the task, with their names in `complaints`."""

BARREN_SHARE = 0.25  # share of the number of groups without signal at which a run ends
JUDGE_WAIT_S = 600.0  # how long groups wait for judgements if the trainer does not say
# A judge request may wait this long for a judge even if groups wait less, because claiming takes a judge a moment.
MIN_BEHIND_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCensus:
    """Everything that `status` shows."""

    workers: tuple[WorkerStatus, ...]  # workers that play rollouts
    judges: tuple[WorkerStatus, ...]
    silent: dict[str, float]  # worker name -> its last heartbeat in Unix seconds
    runs: tuple[RunCensus, ...]
    forgets: str  # why a restart of Redis would lose what it holds; empty if it would not

    @property
    def is_empty(self) -> bool:
        """Whether Redis knows nothing: nobody has used it, or it has lost everything, so it may be the wrong one."""
        return not (self.workers or self.judges or self.silent or self.runs)


async def fleet_census(redis: Redis, run_ids: list[str]) -> FleetCensus:
    alive, silent = await census.workers(redis)
    return FleetCensus(
        workers=tuple(worker for worker in alive if worker.kind != JUDGE.name),
        judges=tuple(worker for worker in alive if worker.kind == JUDGE.name),
        silent=silent,
        runs=tuple([await census.run_census(redis, run_id) for run_id in run_ids]),
        forgets=await connection.forgets(redis),
    )


def complaints(fleet: FleetCensus) -> list[str]:
    """The reasons why the fleet is unwell, one sentence each; empty if it is well."""
    found = [complaint for run in fleet.runs for complaint in complaints_of_run(run)]
    num_rollouts = sum(run.rollouts.queued for run in fleet.runs)
    num_judgings = sum(run.judging.queued for run in fleet.runs if run.judging is not None)
    found += _complaints_of_workers(fleet.workers, "worker", num_rollouts, "request")
    found += _complaints_of_workers(fleet.judges, "judge", num_judgings, "judge request")
    # Only workers count: a judge without engines is healthy where rules judge.
    without = [worker for worker in fleet.workers if worker.set_aside]
    if without:
        first = f"the first because {without[0].set_aside}"
        found.append(f"{count(len(without), 'worker')} set something aside, {first}")
    return found


def pauses(fleet: FleetCensus) -> list[str]:
    """The workers that claim nothing, or leave something out, with the reason, one sentence each."""
    everybody = (*fleet.workers, *fleet.judges)
    paused = [
        f"{worker.kind} worker {worker.name} is paused: {worker.paused}"
        for worker in everybody
        if worker.paused
    ]
    return paused + [
        f"worker {worker.name} has set something aside: {worker.set_aside}"
        for worker in everybody
        if worker.set_aside
    ]


def _complaints_of_workers(
    alive: Sequence[WorkerStatus], noun: str, num_queued: int, queued_noun: str
) -> Iterator[str]:
    if num_queued and not alive:
        yield f"no {noun} is alive, but {count(num_queued, queued_noun)} queued"
    if alive and all(worker.paused for worker in alive):
        yield f"every {noun} is paused, the first because {alive[0].paused}"


def complaints_of_run(run: RunCensus) -> Iterator[str]:
    """The reasons why this run is unwell."""
    name = f"run {run.run_id}"
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
    elif run.num_open:
        yield f"{name} has no trainer alive, but {count(run.num_open, 'open request')}"


def _ill_judged(judging: KindCensus, status: RunStatus | None, name: str) -> Iterator[str]:
    """The reasons why a run's judging is unwell."""
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
    """Complaints about a run that continues without learning anything."""
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


MOST_WORKERS = 40  # number of workers shown; those that are paused or lack something come first
MOST_PAST_RUNS = 5
NOTHING_KNOWN = "this Redis knows neither a run nor a worker: start a run, or set SWERVE_REDIS_URL (or --redis) to the Redis of yours"


def text_of_fleet(fleet: FleetCensus, complaints: Sequence[str], ink: Ink) -> str:
    """The whole fleet: runs, then workers and judges with their claims, then what is wrong."""
    return f"{details(fleet, ink)}\n\n{verdict(fleet, complaints, ink)}"


def verdict(fleet: FleetCensus, complaints: Sequence[str], ink: Ink) -> str:
    """Whether the fleet is well: a line, or one for each complaint."""
    if complaints:
        return lines([ink.bad(f"unwell: {complaint}") for complaint in complaints])
    return ink.doubtful(NOTHING_KNOWN) if fleet.is_empty else ink.good("well")


def details(fleet: FleetCensus, ink: Ink) -> str:
    """Runs, then workers and judges with their claims."""
    now = time.time()
    past = [run for run in fleet.runs if _is_past(run)]
    blocks = [_run_block(run, ink) for run in fleet.runs if run not in past]
    if past:
        blocks.append(_past_block(past, ink))
    blocks += _worker_blocks(fleet, now, ink)
    if fleet.forgets:
        blocks.append(ink.doubtful(fleet.forgets))
    return "\n\n".join(blocks)


def _is_past(run: RunCensus) -> bool:
    is_open = any(jobs.num_outstanding or jobs.dead or jobs.malformed for jobs in run.kinds)
    return not (run.has_trainer or is_open)


def _past_block(past: Sequence[RunCensus], ink: Ink) -> str:
    """Runs with nothing open. Only the newest of those whose trainer ever reported are listed."""
    newest = sorted(past, key=lambda run: run.silent_s if run.status else float("inf"))[:MOST_PAST_RUNS]
    rows = [f"{count(len(past), 'earlier run')} with nothing open"]
    rows += [f"  {ink.bold(run.run_id)}  {_trainer(run)}" for run in newest]
    if len(newest) < len(past):
        rows.append(ink.faint(f"  and {len(past) - len(newest):,} more"))
    return lines(rows)


def _trainer(run: RunCensus) -> str:
    """The activity of the run's trainer, or how the run ended."""
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
    return f"resume it with `python -m trainer.run {run_dir}/{RECIPE} --run-dir {run_dir} --resume`"


def _run_block(run: RunCensus, ink: Ink) -> str:
    shade = str if run.has_trainer else ink.doubtful
    rows = [("trainer", shade(_trainer(run)))]
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
    return lines(
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
    """The scores of recent judgements, or a teacher's log-probs; a rule casts no votes."""
    if scoring.num_logprobs:
        return f"log-probs of {count(scoring.num_logprobs, 'token')} in {count(scoring.num_steps, 'recent step')}"
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
    """Workers, judges if there are any or should be, and silent workers."""
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
    return [*blocks, lines(["not heard from", *rows])] if rows else blocks


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
            rows.append(f"    {ink.doubtful(f'paused: {worker.paused}')}")
        if worker.set_aside:
            rows.append(f"    {ink.doubtful(f'set aside: {worker.set_aside}')}")
        rows += _claim_rows(mine, now, ink)
    if len(told) < len(alive):
        rows.append(ink.faint(f"  and {len(alive) - len(told):,} more"))
    return lines(rows)


def _claim_rows(mine: Sequence[Claimed], now: float, ink: Ink) -> list[str]:
    rows: list[str] = []
    for claim in sorted(mine, key=lambda claim: claim.lease.claimed_at):
        again = f"  attempt {claim.lease.attempt}" if claim.lease.attempt > 1 else ""
        rows.append(
            f"    {where(claim.lease, claim.max_turns):<16}{age(now - claim.lease.claimed_at):>8}"
            f"  {claim.task_id}  {ink.faint(claim.request_id)}{ink.doubtful(again)}"
        )
    return rows


ARRIVALS = 8  # newest trajectories and judgements shown
ANSWER_S = 10.0  # time within which Redis must answer

_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_END_KEYS = {b"q", b"Q", b"\x03"}
# Keys that scroll, as a terminal sends them: by a line, or by half a screen.
_LINE_KEYS = {b"\x1b[A": -1, b"\x1bOA": -1, b"k": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"j": 1}
_PAGE_KEYS = {b"\x1b[5~": -1, b"b": -1, b"\x1b[6~": 1, b" ": 1}

# Escape sequences that open the terminal's alternate screen, without cursor and line wrapping, and close it again.
_BEGIN, _END = obeyed("\x1b[?1049h\x1b[?25l\x1b[?7l"), obeyed("\x1b[?7h\x1b[?25h\x1b[?1049l")
_HOME, _CLEAR_LINE, _CLEAR_REST = obeyed("\x1b[H"), obeyed("\x1b[K"), obeyed("\x1b[J")


@dataclass(frozen=True, slots=True)
class _Told:
    """Redis's data as rows."""

    verdict: list[str]
    details: list[str]
    at: float = field(default_factory=time.time)


@dataclass(slots=True)
class _View:
    """The content of the screen. `trouble` says why nothing newer than `told` is known; empty if nothing is wrong."""

    told: _Told
    trouble: str = ""
    above: int = 0  # rows of the details that were scrolled off the top

    def rows(self, ink: Ink, size: os.terminal_size) -> list[str]:
        """The rows that fit: first the verdict, then as much of the rest as there is room for, and the number of rows cut off."""
        head = [
            _title(self.told, ink),
            *([ink.bad(self.trouble)] if self.trouble else []),
            *self.told.verdict,
        ]
        most = max(2, size.lines // 2)
        if len(head) > most:
            head = [*head[: most - 1], ink.bad(f"and {len(head) - most + 1} more; `status` has all of them")]
        room = max(0, size.lines - len(head) - 2)  # one row for the blank line and one for the last line
        self.above = max(0, min(self.above, len(self.told.details) - room))
        below = max(0, len(self.told.details) - room - self.above)
        shown = self.told.details[self.above : self.above + room]
        cut_rows = [
            f"{number} more {word}" for number, word in ((self.above, "above"), (below, "below")) if number
        ]
        last = (
            [ink.faint(f"{', '.join(cut_rows)}: arrow keys, Page Up and Page Down scroll")]
            if cut_rows
            else []
        )
        return [cut(row, size.columns) for row in [*head, "", *shown, *last]][: size.lines]

    def scroll(self, key: bytes, lines: int) -> None:
        page = max(1, lines // 2)
        self.above += {**_LINE_KEYS, **{key: page * sign for key, sign in _PAGE_KEYS.items()}}.get(key, 0)


def _title(told: _Told, ink: Ink) -> str:
    return (
        f"{ink.bold('swerve')}  {time.strftime('%H:%M:%S', time.localtime(told.at))}  {ink.faint('q quits')}"
    )


async def _told(redis: Redis, only: str | None, ink: Ink) -> _Told:
    run_ids = await listing.chosen_runs(redis, only)
    fleet = await fleet_census(redis, run_ids)
    arrived = [
        line
        for run_id in run_ids
        for kind in KINDS
        for line in await listing.lines(redis, run_id, "answered", ARRIVALS, kind=kind)
    ]
    newest = sorted(arrived, key=lambda line: -line.at)[:ARRIVALS]
    rows = [
        *details(fleet, ink).split("\n"),
        "",
        ink.bold("newest results") if newest else ink.faint("no results yet"),
        *(listing.row(line, ink) for line in newest),
    ]
    return _Told(verdict(fleet, complaints(fleet), ink).split("\n"), rows)


async def frame(redis: Redis, only: str | None, ink: Ink) -> str:
    """The whole output once: the verdict, the status and the newest results."""
    told = await _told(redis, only, ink)
    return "\n".join([_title(told, ink), *told.verdict, "", *told.details])


async def live(redis: Redis, only: str | None, *, every_s: float) -> None:
    """Redraws until q or Ctrl-C. It needs a terminal for input and output. If Redis becomes unavailable, it waits."""
    ink = Ink(coloured=has_colours(sys.stdout))
    view = _View(await _told(redis, only, ink))
    stop, changed = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    keyboard = sys.stdin.fileno()

    def pressed() -> None:
        # A key that is held down arrives several times in one read
        keys = _KEY.findall(os.read(keyboard, 64))
        if not keys or not _END_KEYS.isdisjoint(keys):
            stop.set()
        for key in keys:
            view.scroll(key, shutil.get_terminal_size().lines)
        changed.set()

    def interrupted() -> None:
        stop.set()
        changed.set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    loop.add_reader(keyboard, pressed)
    watching = asyncio.create_task(
        _watch(redis, only, view, changed, ink, every_s=every_s), name="read status"
    )
    watching.add_done_callback(lambda _: changed.set())
    try:
        with _screen(keyboard):
            while not stop.is_set():
                if watching.done():
                    watching.result()  # raises the error that ended the task
                changed.clear()
                rows = view.rows(ink, shutil.get_terminal_size())
                sys.stdout.write(_HOME + f"{_CLEAR_LINE}\n".join(rows) + _CLEAR_LINE + _CLEAR_REST)
                sys.stdout.flush()
                await changed.wait()
    finally:
        watching.cancel()
        loop.remove_reader(keyboard)
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGWINCH)


async def _watch(
    redis: Redis, only: str | None, view: _View, changed: asyncio.Event, ink: Ink, *, every_s: float
) -> None:
    """Reads Redis again and again. Data that a restarted Redis does not have yet, such as the run, is no reason to end."""
    while True:
        await asyncio.sleep(every_s)
        try:
            async with asyncio.timeout(ANSWER_S):
                view.told, view.trouble = await _told(redis, only, ink), ""
        except (RedisError, OSError, TimeoutError) as error:
            view.trouble = f"Redis does not answer ({str(error) or type(error).__name__}); it is asked again"
        except (LookupError, MalformedMessage) as error:
            view.trouble = str(error.args[0])
        changed.set()


@contextlib.contextmanager
def _screen(keyboard: int) -> Generator[None]:
    """Switches to the terminal's alternate screen with unbuffered keys, and back at the end."""
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    sys.stdout.write(_BEGIN)
    try:
        yield
    finally:
        sys.stdout.write(_END)
        sys.stdout.flush()
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
