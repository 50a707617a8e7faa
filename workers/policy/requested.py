"""Who replies in an episode: what its request names, an endpoint or the fleet's engines."""

from dataclasses import dataclass
from typing import Protocol

from pipeline.request import Claim
from workers.agent.loop import Policy


class EnginePolicies(Protocol):
    """Conversations with the fleet's engines, and whether these are there."""

    async def open(self, claim: Claim) -> Policy: ...

    async def check(self) -> None: ...


class EndpointOpener(Protocol):
    """Conversations with the endpoints that requests name."""

    async def open(self, claim: Claim) -> Policy: ...


@dataclass(frozen=True, slots=True)
class RequestedPolicies:
    """Opens the conversation of a claim with whoever its request names."""

    engines: EnginePolicies
    endpoints: EndpointOpener

    async def open(self, claim: Claim) -> Policy:
        """Raises RequestError."""
        return await (self.endpoints if claim.request.endpoint else self.engines).open(claim)

    async def check(self) -> None:
        """Raises EngineError unless the fleet's engines are there. An endpoint's outage holds nobody else's episodes back."""
        await self.engines.check()
