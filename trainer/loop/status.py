"""The reports of a run about itself: a status every second, metrics, samples of the workers' slots, and finally its end.

The status is for `python -m pipeline status` and the console, the samples are for `python -m pipeline.where`. The end of the run is a
row of the journal, for `trainer.report`, and the run's last status. A full disk must not prevent that: after an error, the reserved space
is freed, and what still cannot be written is left out.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

from arq.connections import ArqRedis
from msgspec.structs import replace
from opentelemetry.metrics import Meter

from pipeline import census, redis_calls
from pipeline.census import RunStatus
from pipeline.journal.rows import COMPLETE, ClosedBy, EndReason, EndRow, FleetRow
from pipeline.kinds import ROLLOUT
from trainer.learner import directories
from trainer.loop.run import Run
from trainer.loop.state import RunState
from trainer.recipe.schema import AlarmKind
from trainer.records import run_directory

HEARTBEAT_S = 1.0

WAITING = "waiting for trajectories"
"""The phase that has a detail text."""


async def beat(
    redis: ArqRedis,
    status: Callable[[], RunStatus],
    *,
    show: Callable[[str], None],
    measure: Callable[[], None] = lambda: None,
) -> None:
    """Writes the status every second until it is cancelled. `show` gets a line about the present; `measure` sets metrics."""
    while True:
        now = status()
        measure()
        with redis_calls.tolerating_outage():
            await census.beat_run(redis, now)
        show(line_of(now))
        await asyncio.sleep(HEARTBEAT_S)


def line_of(status: RunStatus) -> str:
    """A status as one line, for the console."""
    parts = (
        f"step {status.step}/{status.num_steps}" if status.num_steps else "",
        f"weights v{status.version}" if status.num_steps else "",
        status.phase,
        status.detail,
    )
    return "  ·  ".join(part for part in parts if part)


def status_of(run: Run) -> RunStatus:
    recipe, state, books = run.recipe, run.state, run.books
    return RunStatus(
        run_id=run.run_id,
        phase=state.phase,
        detail=_detail(run),
        step=state.step,
        num_steps=recipe.num_steps,
        version=max(0, state.served_version),
        admission=run.budget.sentence(),
        journal=str(run.journal.resolve()),
        quarantined=tuple(books.quarantine),
        updated_at=time.time(),
        groups_without_signal=books.ledger.groups_without_signal,
        max_groups_without_signal=recipe.batch.max_groups_without_signal,
        judge_wait_s=recipe.judge.wait_s if recipe.judge.is_on else None,
        judge_required=recipe.judge.is_on and recipe.judge.required,
        alarms=tuple(f"{row.kind} since step {row.step}: {row.text}" for row in run.alarms.firing),
    )


def _detail(run: Run) -> str:
    """The text of the status: what the next step waits for, and the reason why no engine serves the newest weights or nothing is judged."""
    groups, heldout = run.books.groups, run.books.heldout.progress
    if run.state.phase != WAITING:
        return heldout
    per_step, step = run.recipe.batch.groups_per_step, run.state.step + 1
    if groups.num_unjudged and groups.num_ready >= per_step:
        waits = (
            f"step {step} waits for the judgements of {groups.num_unjudged} groups that are ready otherwise"
        )
    elif groups.num_ready >= per_step:
        waits = f"step {step} waits for an older group, which would otherwise be trained too late"
    else:
        waits = (
            f"step {step} waits for {groups.needed} more trajectories; "
            f"{groups.num_ready} of {per_step} groups ready"
        )
        since = run.books.ledger.since_step
        if since.zero_variance + since.invalid:
            waits += f", {since.zero_variance} dropped without signal, {since.invalid} for failures"
    parts = (run.deliveries.trouble, run.books.judging.presence.trouble, waits, heldout)
    return "; ".join(one for one in parts if one)


class RunGauges:
    """The state of a run as metrics. Without an exporter the instruments do nothing."""

    def __init__(self, meter: Meter, run: Run) -> None:
        self._run = run
        self._step = meter.create_gauge("swerve.run.step", description="The newest optimizer step")
        self._version = meter.create_gauge(
            "swerve.weights.version",
            description="The newest weight version: published, and served by all engines in routing",
        )
        self._num_groups = meter.create_gauge(
            "swerve.groups",
            unit="{group}",
            description="Groups of rollouts: open, ready for a step, and of the ready those that wait for judgements",
        )
        self._outstanding = meter.create_gauge(
            "swerve.requests.outstanding",
            unit="{request}",
            description="Training rollouts that open groups wait for",
        )
        self._room = meter.create_gauge(
            "swerve.admission.room", unit="{group}", description="Groups that may be enqueued at the moment"
        )
        self._held = meter.create_gauge(
            "swerve.trajectories.size",
            unit="By",
            description="Trajectories that wait: in Redis for a checkpoint, in memory for a step",
        )
        self._firing = meter.create_gauge("swerve.alarm.active", description="1 while the alarm lasts")

    def measure(self) -> None:
        state, groups, budget = self._run.state, self._run.books.groups, self._run.budget
        self._step.set(state.step)
        self._version.set(state.version, {"swerve.state": "published"})
        self._version.set(state.served_version, {"swerve.state": "served"})
        self._num_groups.set(groups.num_open, {"swerve.state": "open"})
        self._num_groups.set(groups.num_ready, {"swerve.state": "ready"})
        self._num_groups.set(groups.num_unjudged, {"swerve.state": "unjudged"})
        self._outstanding.set(groups.num_awaited)
        self._room.set(budget.groups())
        self._held.set(budget.queue_bytes, {"swerve.place": "redis"})
        self._held.set(groups.held_bytes, {"swerve.place": "memory"})
        firing = {row.kind for row in self._run.alarms.firing}
        for kind in get_args(AlarmKind):
            self._firing.set(int(kind in firing), {"swerve.alarm": kind})


SAMPLE_S = 5.0
WORKERS_PER_S = 200.0
"""Heartbeats that are read per second at most: a larger fleet is sampled less often."""

_STAT = Path("/proc/stat")  # Linux only; on other systems, nothing is known about the processors


def pause_s(row: FleetRow) -> float:
    """The pause until the next sample."""
    return max(SAMPLE_S, row.num_workers / WORKERS_PER_S)


class Processors:
    """Measures how busy this machine's processors are."""

    def __init__(self) -> None:
        self._idle, self._total = _ticks()

    def used_share(self) -> float | None:
        """Returns the share of processor time used since the last call, or since construction; None if that is not known."""
        idle, total = _ticks()
        passed, unused = total - self._total, idle - self._idle
        self._idle, self._total = idle, total
        return 1 - unused / passed if passed else None


class FleetWatch:
    """Samples the fleet of one run, which may work for other runs too."""

    def __init__(
        self,
        redis: ArqRedis,
        state: RunState,
        *,
        closed_by: Callable[[], ClosedBy],
        heldout: Callable[[], str],
    ) -> None:
        """`closed_by` returns what closes admission, `heldout` the state of the current evaluation."""
        self._redis = redis
        self._state = state
        self._closed_by = closed_by
        self._heldout = heldout
        self._sampled_at = time.monotonic()
        self._processors = Processors()

    async def sample(self) -> FleetRow:
        """The fleet at this moment."""
        alive, _ = await census.workers(self._redis)
        workers = [status for status in alive if status.kind == ROLLOUT.name]
        idle = {status.name: max(0, status.slots - len(status.running)) for status in workers}
        slots = sum(status.slots for status in workers)
        now = time.monotonic()
        span_s, self._sampled_at = now - self._sampled_at, now
        return FleetRow(
            span_s=span_s,
            num_workers=len(workers),
            slots=slots,
            running=slots - sum(idle.values()),
            paused=sum(idle[status.name] for status in workers if status.paused),
            closed_by=self._why_closed(),
            is_waiting=self._state.phase == WAITING,
            cpu_share=self._processors.used_share() if _are_here(idle) else None,
        )

    def _why_closed(self) -> ClosedBy:
        """The reason why admission is closed.

        Admission follows the served weights: while the newest are not served, the reason is what keeps them from the engines.
        """
        bound, state = self._closed_by(), self._state
        if bound != "lag" or state.served_steps >= state.step:
            return bound
        return "evaluation" if self._heldout() else "weights"


def _are_here(names: Iterable[str]) -> bool:
    """Whether all these workers run on this machine; a worker's name begins with its machine's name."""
    return all(name.partition("/")[0] == socket.gethostname() for name in names)


def _ticks() -> tuple[int, int]:
    """Clock ticks of all processors since the machine started: idle ones, and all. Time spent waiting for a disk counts as idle."""
    if not _STAT.exists():
        return 0, 0
    ticks = [int(number) for number in _STAT.read_text().partition("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


class EndRecorder:
    """Records the end of one process of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._state = run.state
        self._root = run.root
        self._num_steps = run.recipe.num_steps

    async def write_error(self, error: BaseException) -> None:
        """Writes row and status of a run that an error ends. If the disk is full, the error gets a note about what was kept."""
        run_directory.free_space(self._root)
        if full := directories.disk_full_in(error):
            full.add_note(f"{self._kept()}; {self._go_on(error)}")
        with contextlib.suppress(OSError):
            await self.write_row("error", error)
        await self.write_status("error", error)

    async def write_row(self, reason: EndReason, error: BaseException | None = None) -> None:
        """Writes the row: before the last checkpoint if the run is complete, so that the checkpoint contains it; otherwise afterwards, so
        that a resume cuts the row off.
        """
        num_open = None if reason in COMPLETE else await self._num_open()
        state, detail = self._state, self._how(reason, error)
        seconds = {**self._run.times.lap()}
        self._run.record(
            EndRow(
                step=state.step,
                version=state.version,
                reason=reason,
                detail=detail,
                seconds=seconds,
                num_open=num_open,
            )
        )

    async def _num_open(self) -> int | None:
        """The number of open requests, which `status` also shows; None if Redis does not answer."""
        with redis_calls.tolerating_outage():
            return (await census.run_census(self._run.redis, self._run.run_id)).num_open
        return None

    async def write_status(self, reason: EndReason, error: BaseException | None = None) -> None:
        """Writes the last status of this process; no heartbeat may follow."""
        how = self._how(reason, error)
        if reason not in COMPLETE:
            how += f"; {self._go_on(error)}"
        ended = replace(status_of(self._run), phase=reason, detail="", admission="", ended=how)
        with redis_calls.tolerating_outage():
            await census.beat_run(self._run.redis, ended)

    def _go_on(self, error: BaseException | None) -> str:
        is_full = error is not None and directories.disk_full_in(error) is not None
        resume = f"python -m trainer.run {self._root}/recipe.toml --run-dir {self._root} --resume"
        return f"{'make room and ' if is_full else ''}resume with `{resume}`"

    def _kept(self) -> str:
        """The data that a run which filled its disk has kept."""
        step, _ = self._run.checkpoints.before(self._state.step + 1)
        kept = f"the checkpoint of step {step}" if step else "no checkpoint, for none was written yet,"
        return f"kept: {kept} and, in Redis, the trajectories since"

    def _how(self, reason: EndReason, error: BaseException | None) -> str:
        place = f"step {self._state.step} of {self._num_steps}"
        match reason:
            case "finished":
                return f"finished all {self._num_steps} steps"
            case "nothing to learn":
                return f"ended at {place}: there was nothing more to learn"
            case "failing":
                return f"gave up at {place} after too many groups in a row failed"
            case "stopped":
                if self._state.superseded_by:
                    return f"stopped at {place}: {self._state.superseded_by} took the engines over"
                if self._state.stopped_by_alarm:
                    return f"stopped at {place} by an alarm, {self._state.stopped_by_alarm}"
                return f"stopped by a signal at {place}"
            case "error":
                if error is not None and (full := directories.disk_full_in(error)):
                    return f"ended at {place}: {full}; {self._kept()}"
                return f"ended by an error at {place}: {_innermost(error)}"


def _innermost(error: BaseException | None) -> str:
    """The first error of a group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, asyncio.CancelledError):
        return "interrupted at once"
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
