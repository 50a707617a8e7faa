"""The state of a run, which its asyncio tasks share and only the event loop's thread accesses, and the times of its steps."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Self, get_args

from pipeline.journal.rows import PublicationRow
from pipeline.part_times import PartTimes
from trainer.rollouts.ledger import LedgerState

Part = Literal["wait", "train", "audit", "export", "engines", "checkpoint", "evaluation", "other"]
"""The activities of the loop. It waits for trajectories in "wait", and for the end of an evaluation in "evaluation"."""


class Timeline:
    """Every version published and kept, with the optimizer steps it contains; both only grow.

    Without a crash, each version has one step, and the lag is the difference of versions. After a crash, steps taken since the checkpoint
    are lost, but rollouts sampled by their weights are not: such weights count as those of the last step before them that the run kept.
    """

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._steps: list[int] = []

    def add(self, version: int, step: int) -> None:
        """Add `version` as the newest version. The newest version may be added again."""
        if self._versions[-1:] == [version]:
            return
        assert not self._versions or version > self._versions[-1], "versions are never used twice"
        self._versions.append(version)
        self._steps.append(step)

    def lag(self, version: int) -> int:
        """Returns the number of optimizer steps that the newest version contains and `version` does not."""
        return self._steps[-1] - self.steps_in(version)

    def steps_in(self, version: int) -> int:
        """Returns the number of optimizer steps that `version` contains."""
        return self._steps[max(bisect_right(self._versions, version) - 1, 0)]


@dataclass(slots=True)
class RunState:
    """Three counts of optimizer steps since the run began: taken, begun, and contained in the newest served weights."""

    step: int
    begun_steps: int
    served_steps: int
    version: int  # the newest published version; -1 before the first
    served_version: int  # the newest version that all engines in routing serve; -1 before the first
    timeline: Timeline
    phase: str = "starting"  # what the run is doing, for display
    gathered_groups: int = 0  # groups that the next step has taken and not begun to train
    superseded_by: str = ""  # the run that took the engines over; from then on this one publishes nothing
    stopped_by_alarm: str = ""  # sentence of the alarm that stopped the run; empty if none did
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set: the run ends in good order
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set: something arrived, or `stop` was set

    @classmethod
    def resumed(cls, state: LedgerState, publications: Iterable[PublicationRow]) -> Self:
        """The state in which a checkpoint left the run; `publications` are those in its journal."""
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
        """Record that the weights after `step` are published as `version`."""
        self.timeline.add(version, self.step)
        self.version = version

    def serve(self, version: int) -> None:
        """Record that every engine in routing serves `version` or a newer version."""
        self.served_version = version
        self.served_steps = self.timeline.steps_in(version)
        self.changed.set()

    @property
    def is_stopping(self) -> bool:
        return self.stop.is_set()

    def supersede(self, other: str) -> None:
        """Record that another run has taken over the engines, after which this run publishes no more and ends in good order."""
        self.superseded_by = other
        self.request_stop()

    def stop_by_alarm(self, sentence: str) -> None:
        """Request an orderly end because of an alarm; only the first alarm is recorded."""
        self.stopped_by_alarm = self.stopped_by_alarm or sentence
        self.request_stop()

    def request_stop(self) -> None:
        """Ends the run in good order, after the current work."""
        self.stop.set()
        self.changed.set()


class StepTimes(PartTimes[Part]):
    """The seconds that each part of a step took. Every moment is charged to exactly one part, so the parts sum up to the wall time.

    Only the loop's coroutine names the part.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(get_args(Part), "other", clock)
