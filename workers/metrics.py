"""What a worker or a judge process measures of itself: its slots, what its claims are doing, how they ended, why it claims nothing."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

from opentelemetry.metrics import CallbackOptions, Observation

from pipeline.metrics import meter
from workers.status import PHASES, EpisodeStatus


class Claims(Protocol):
    """The claims of a process. Read from the thread that exports metrics."""

    @property
    def running(self) -> Mapping[str, EpisodeStatus]: ...

    @property
    def finished(self) -> int: ...

    @property
    def failed(self) -> int: ...


class Pauses(Protocol):
    """Why nothing is claimed, or what is not used although claims are made; empty without a reason."""

    @property
    def paused(self) -> str: ...

    @property
    def set_aside(self) -> str: ...


def observe_worker(claims: Claims, pauses: Pauses, *, slots: int) -> None:
    """Measure this process whenever its metrics are exported."""

    def active(options: CallbackOptions) -> Iterable[Observation]:
        counts = Counter(status.phase for status in tuple(claims.running.values()))
        for phase in sorted({*PHASES, *counts}):
            yield Observation(counts[phase], {"swerve.phase": phase})

    def ended(options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(claims.finished, {"swerve.result": "published"})
        yield Observation(claims.failed, {"swerve.result": "failed"})

    metrics = meter()
    metrics.create_observable_up_down_counter(
        "swerve.worker.slots",
        [lambda options: [Observation(slots)]],
        unit="{slot}",
        description="Claims that the process may have at once",
    )
    metrics.create_observable_up_down_counter(
        "swerve.worker.claims.active", [active], unit="{claim}", description="Claims under way, by phase"
    )
    metrics.create_observable_counter(
        "swerve.worker.claims.ended",
        [ended],
        unit="{claim}",
        description="Claims that ended: published a result, or failed for an infrastructure reason",
    )
    metrics.create_observable_gauge(
        "swerve.worker.paused",
        [lambda options: [Observation(int(bool(pauses.paused)))]],
        description="1 while the process claims nothing, because something that it needs is out",
    )
    metrics.create_observable_gauge(
        "swerve.worker.reduced",
        [lambda options: [Observation(int(bool(pauses.set_aside)))]],
        description="1 while the process does without one of its Docker hosts",
    )
