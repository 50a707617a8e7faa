"""Where a run stands: shared by the asyncio tasks of rank 0, touched from the event loop only."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from trainer.loop.timeline import Timeline
from trainer.records.journal import PublicationRow
from trainer.rollouts.ledger import LedgerState


@dataclass(slots=True)
class RunState:
    """Three counts of optimizer steps since the run began: taken, begun, and contained in the newest served weights."""

    step: int
    begun_steps: int
    served_steps: int
    version: int  # the newest that was published; -1 before the first
    served_version: int  # the newest that all engines in routing serve; -1 before the first
    timeline: Timeline
    phase: str = "starting"  # for people
    gathered_groups: int = 0  # that the next step has taken and not begun to apply
    superseded_by: str = ""  # the run that took the engines over; from then on this one publishes nothing
    stopped_by_alarm: str = ""  # as a sentence; empty unless the recipe lets it stop the run
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set: end in good order
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set: something arrived, or `stop` was set

    @classmethod
    def resumed(cls, state: LedgerState, publications: Iterable[PublicationRow]) -> Self:
        """As a checkpoint left the run; `publications` are those in its journal."""
        timeline = Timeline()
        for row in publications:
            timeline.add(row.version, row.step)
        return cls(
            step=state.step,
            begun_steps=state.step,
            served_steps=state.step,
            version=state.version,
            served_version=state.version,
            timeline=timeline,
        )

    def publish(self, version: int) -> None:
        """The weights after `step` are published as `version`."""
        self.timeline.add(version, self.step)
        self.version = version

    def serve(self, version: int) -> None:
        """All engines in routing serve `version`, or one after it."""
        self.served_version = version
        self.served_steps = self.timeline.steps_in(version)
        self.changed.set()

    @property
    def is_stopping(self) -> bool:
        return self.stop.is_set()

    def supersede(self, other: str) -> None:
        """Another run has taken the engines over: publish no more, and end in good order."""
        self.superseded_by = other
        self.request_stop()

    def stop_by_alarm(self, sentence: str) -> None:
        """End in good order because of an alarm; the first one counts."""
        self.stopped_by_alarm = self.stopped_by_alarm or sentence
        self.request_stop()

    def request_stop(self) -> None:
        """End the run in good order, after what is under way."""
        self.stop.set()
        self.changed.set()
