"""Where a run stands at the moment, for those who work on it side by side on rank 0. Touched from the event loop only."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from trainer.loop.timeline import Timeline
from trainer.records.journal import PublicationRow
from trainer.rollouts.ledger import LedgerState


@dataclass(slots=True)
class Standing:
    """Steps count optimizer steps since the run began: taken, begun, and contained in the newest served weights."""

    step: int
    begun_steps: int
    published_steps: int
    version: int  # of the newest weights that the engines took; -1 before the first
    timeline: Timeline
    phase: str = "starting"  # for people
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # end in good order
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # something came in, or it is time to stop

    @classmethod
    def at(cls, state: LedgerState, publications: Iterable[PublicationRow]) -> Self:
        """Where a checkpoint left the run; `publications` are those that it kept."""
        timeline = Timeline()
        for row in publications:
            timeline.add(row.version, row.step)
        return cls(
            step=state.step,
            begun_steps=state.step,
            published_steps=state.step,
            version=state.version,
            timeline=timeline,
        )

    @property
    def is_stopping(self) -> bool:
        return self.stop.is_set()
