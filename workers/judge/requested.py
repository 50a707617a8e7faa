"""Who votes: what a request names, an endpoint or the judge's engines."""

from dataclasses import dataclass
from typing import Any

from pipeline.judge import JudgeRequest
from pipeline.request import Claim
from workers.judge.votes import Voter, Voters


@dataclass(frozen=True, slots=True)
class RequestedVoters:
    """Opens the model that a claim's request names."""

    engines: Voters
    endpoints: Voters

    async def open(self, claim: Claim[JudgeRequest]) -> Voter[Any]:
        """Raises RequestError, EngineError."""
        return await (self.endpoints if claim.request.judge.endpoint else self.engines).open(claim)
