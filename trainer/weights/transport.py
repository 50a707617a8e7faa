"""How weights get from the learner into one engine. Today through a directory that both can read (`disk.py`).

Another way, such as NCCL or deltas, is another class with these methods in a file of its own.
"""

from typing import Protocol

from pipeline.weights import WeightVersion
from trainer.weights.engines import Engines, PauseMode, Served


class WeightTransport(Protocol):
    """Used by one `Publisher`, which makes one publication at a time."""

    async def prepare(self, version: int, step: int) -> WeightVersion:
        """Make the learner's present weights ready for delivery under a number, before anybody is told of them."""
        ...

    async def is_available(self, version: WeightVersion) -> bool:
        """Whether an earlier version can still be delivered, also one that a trainer before this one made ready."""
        ...

    def is_current(self, served: Served, version: WeightVersion) -> bool:
        """Whether an engine that reports the name of `version` was given it by this transport."""
        ...

    async def deliver(
        self, engines: Engines, engine_url: str, version: WeightVersion, mode: PauseMode
    ) -> None:
        """Make a paused engine load `version`. Raises EngineFailure."""
        ...

    async def discard_old(self) -> None:
        """Free what older versions take up."""
        ...
