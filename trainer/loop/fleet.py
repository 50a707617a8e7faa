"""Samples what the workers' slots do, for `python -m trainer.where`."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from arq.connections import ArqRedis

from pipeline import census, retry
from pipeline.kinds import ROLLOUT
from trainer.loop.run_status import WAITING, EvaluationProgress
from trainer.loop.state import RunState
from trainer.records.time_rows import ClosedBy, FleetRow

SAMPLE_S = 5.0
WORKERS_PER_S = 200.0
"""Heartbeats read a second at most: a larger fleet is sampled less often."""

_STAT = Path("/proc/stat")  # of Linux; elsewhere nothing is known of the processors


class Processors:
    """How busy this machine's processors are."""

    def __init__(self) -> None:
        self._idle, self._total = _ticks()

    def used_share(self) -> float | None:
        """Since the last call, or since this was made; None if nothing is known."""
        idle, total = _ticks()
        passed, unused = total - self._total, idle - self._idle
        self._idle, self._total = idle, total
        return 1 - unused / passed if passed else None


class FleetWatch:
    """Of one run. The fleet may work for other runs too."""

    def __init__(
        self,
        redis: ArqRedis,
        state: RunState,
        *,
        closed_by: Callable[[], ClosedBy],
        heldout: EvaluationProgress,
        record: Callable[[FleetRow], None],
    ) -> None:
        self._redis = redis
        self._state = state
        self._closed_by = closed_by
        self._heldout = heldout
        self._record = record
        self._sampled_at = time.monotonic()
        self._processors = Processors()

    async def run(self) -> None:
        """For ever."""
        pause_s = SAMPLE_S
        while True:
            await asyncio.sleep(pause_s)
            with retry.tolerating_outage():
                row = await self.sample()
                self._record(row)
                pause_s = max(SAMPLE_S, row.num_workers / WORKERS_PER_S)

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
        """Admission follows the served weights: while the newest are not served, what keeps them from the engines is the reason."""
        bound, state = self._closed_by(), self._state
        if bound != "lag" or state.served_steps >= state.step:
            return bound
        return "evaluation" if self._heldout.progress else "weights"


def _are_here(names: Iterable[str]) -> bool:
    """Whether all these workers run on this machine; their names begin with that of theirs."""
    return all(name.partition("/")[0] == socket.gethostname() for name in names)


def _ticks() -> tuple[int, int]:
    """Of all processors since the machine started: without work, and all. Time spent waiting for a disk is without work."""
    if not _STAT.exists():
        return 0, 0
    ticks = [int(number) for number in _STAT.read_text().partition("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
