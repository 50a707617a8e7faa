"""A worker without engines: it takes the requests that need none, and gives the others back."""

import asyncio
from typing import Any, NoReturn

from pipeline.errors import EngineError
from pipeline.request import Claim


class NoEngines:
    """In place of the fleet's engines, and of the breaker that watches them."""

    paused = ""

    def __init__(self, variable: str = "SWERVE_ROUTER_URL") -> None:
        """`variable` would say where the engines' router is."""
        self.set_aside = f"no engines ({variable} is empty): only requests that need none are taken"
        self._refusal = f"this worker has no engines; start one with {variable} for such requests"
        self._turned_away: set[str] = set()

    async def open(self, claim: Claim[Any]) -> NoReturn:
        """Raises EngineError."""
        self._turned_away.add(claim.request.id)
        raise EngineError(self._refusal)

    def room(self, free: int) -> int:
        return free

    def claimed(self, request_id: str) -> None:
        """Nothing is remembered of a claim until it is turned away."""

    def succeeded(self, request_id: str) -> None:
        """The server that the request names replied."""

    async def blamed(self, request_id: str, message: str) -> bool:
        """True for a request that needs engines: another worker may have some, so no try of it is spent."""
        return request_id in self._turned_away

    def ended(self, request_id: str) -> None:
        self._turned_away.discard(request_id)

    async def watch(self) -> None:
        """Nothing changes while the worker runs."""
        await asyncio.Event().wait()
