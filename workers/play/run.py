"""Plays one claim with the production loop, sandboxes and grader."""

from contextlib import AbstractAsyncContextManager

from pipeline.errors import SandboxError
from pipeline.request import Claim
from pipeline.trajectory import Trajectory
from workers.agent.loop import Watcher
from workers.grading.grade import Grader
from workers.rollout import Policies, run_rollout
from workers.sandbox.protocol import Sandboxes
from workers.status import EpisodeStatus
from workers.unqueued.session import session


async def play_claim(
    claim: Claim,
    *,
    policies: AbstractAsyncContextManager[Policies],
    sandboxes: Sandboxes,
    watcher: Watcher,
) -> Trajectory:
    """The finished episode. Closes `sandboxes`. Raises SandboxError if no sandbox can be opened on this machine."""
    async with session(sandboxes) as outage, policies as opened:
        if outage:
            raise SandboxError(outage)
        return await run_rollout(
            claim,
            EpisodeStatus(),
            policies=opened,
            sandboxes=sandboxes,
            grader=Grader(sandboxes),
            watcher=watcher,
        )
