"""Where the seconds of a step went. Every moment is charged to exactly one part, so the parts sum up to the wall time."""

import time
from collections.abc import Callable
from typing import Literal, get_args

from pipeline.part_times import PartTimes

Part = Literal["wait", "train", "audit", "export", "engines", "checkpoint", "evaluation", "other"]
"""What the loop does, or waits for. Trajectories are waited for in "wait", the end of an evaluation in "evaluation"."""


class StepTimes(PartTimes[Part]):
    """A clock that the coroutine of the loop tells what it does; nobody else may."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(get_args(Part), "other", clock)
