"""What the workers' slots did while the trainer waited for groups: why it had to wait."""

from collections.abc import Sequence

import msgspec

from trainer.records.time_rows import FleetRow
from trainer.where.slots import idle_of

BUSY, NO_WORKER = "slots have claims", "no worker is alive"
BUSY_PROCESSORS = 0.9
"""From this share on, more processes on the same machine make nothing faster."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """The time that the trainer waited for groups, divided by what slots did meanwhile."""

    parts_s: dict[str, float]  # their sum is the time that the trainer waited
    # Of the machine's processors, meanwhile; None if workers run elsewhere, or nothing is known.
    cpu_share: float | None

    @property
    def are_processors_busy(self) -> bool:
        return self.cpu_share is not None and self.cpu_share >= BUSY_PROCESSORS


def waiting_of(wait_s: float, samples: Sequence[FleetRow]) -> Waiting | None:
    """Samples taken while the trainer waited divide `wait_s`; None without any."""
    taken = [row for row in samples if row.is_waiting and row.span_s > 0]
    if not taken:
        return None
    weights = {BUSY: 0.0, NO_WORKER: 0.0}
    for row in taken:
        shares = {NO_WORKER: 1.0} if row.slots == 0 else {BUSY: row.running / row.slots}
        shares |= {
            name: seconds / row.slots / row.span_s for name, seconds in idle_of([row]).items() if seconds
        }
        for name, share in shares.items():
            weights[name] = weights.get(name, 0.0) + share * row.span_s
    whole = sum(weights.values())
    known = [(row.cpu_share, row.span_s) for row in taken if row.cpu_share is not None]
    return Waiting(
        parts_s={name: wait_s * weight / whole for name, weight in weights.items()},
        cpu_share=sum(share * s for share, s in known) / sum(s for _, s in known) if known else None,
    )
