"""Who replies in an episode: what its request names, an endpoint or the fleet's engines."""

from dataclasses import dataclass
from typing import Protocol

from pipeline.request import Claim
from workers.agent.loop import Policy


class Opener(Protocol):
    """Conversations with one kind of server."""

    async def open(self, claim: Claim) -> Policy: ...


@dataclass(frozen=True, slots=True)
class RequestedPolicies:
    """Opens the conversation of a claim with whoever its request names."""

    engines: Opener
    endpoints: Opener

    async def open(self, claim: Claim) -> Policy:
        """Raises RequestError."""
        return await (self.endpoints if claim.request.endpoint else self.engines).open(claim)
