"""How weights get from the learner into one engine: through a shared directory (`disk.py`), as changes to a receiver on the engine's host
(`delta.py`), or by broadcast (`distributed.py`).

Another way is another class with these methods in a file of its own, chosen in `selection.py`.
"""

from typing import Protocol

from pipeline.weights import WeightVersion
from trainer.weights.engines import Engines, PauseMode, Served


class WeightTransport(Protocol):
    """Used by one run. It makes one version ready at a time; deliveries to several engines, also of different versions,
    may go on at once.
    """

    async def prepare(self, version: int, step: int) -> WeightVersion:
        """Make the learner's present weights ready for delivery under a number, before anybody is told of them."""
        ...

    async def is_available(self, version: WeightVersion) -> bool:
        """Whether an earlier version can still be delivered, also one that a trainer before this one made ready."""
        ...

    def is_current(self, served: Served, version: WeightVersion) -> bool:
        """Whether an engine that reports the name of `version` was given it by this transport."""
        ...

    async def prefetch(self, engine_url: str, version: WeightVersion) -> None:
        """Bring the bytes of `version` to the engine's host while the engine still samples, so that the pause is short.

        Raises EngineFailure. `deliver` does what is missing if this was not called.
        """
        ...

    async def deliver(
        self, engines: Engines, engine_url: str, version: WeightVersion, mode: PauseMode
    ) -> None:
        """Make a paused engine load `version`. Raises EngineFailure."""
        ...

    async def discard_old(self, oldest_needed: int) -> None:
        """Free what older versions take up. Engines may still be told to load `oldest_needed` and those after it."""
        ...
