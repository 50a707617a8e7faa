"""`python -m tests.journeys.scripted_worker MODEL`: a worker with real containers and a policy that replays replies, until SIGTERM.

Members with an even number fix the bug, the others submit nothing. Spans go where the environment says.
"""

import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline import connection
from pipeline.kinds import ROLLOUT
from pipeline.request import Claim, EpisodeStatus
from pipeline.settings import redis_settings
from pipeline.tokenizer import read_bundle
from pipeline.trajectory import Trajectory
from tests.workers.agent.episode import SUBMIT, bash
from workers.breaker import Breakers
from workers.claim import Claimer
from workers.grading.grade import Grader
from workers.policy.conversation import Conversation
from workers.policy.scripted import ScriptedPolicies
from workers.policy.speaker import Voice
from workers.process import run_process, work
from workers.rollout import run_rollout
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.first_process import built_init

FIX = "sed -i 's/a - b/a + b/' calc.py"
SLOTS = 2


class ByMember:
    """Replies by the parity of a request's member."""

    def __init__(self, model_dir: Path) -> None:
        self._by_parity = [self._replies(model_dir, [bash(FIX), bash(SUBMIT)])]
        self._by_parity.append(self._replies(model_dir, [bash("ls"), bash(SUBMIT)]))

    async def open(self, claim: Claim) -> Conversation:
        return await self._by_parity[claim.request.member % 2].open(claim)

    async def voice(self, claim: Claim) -> Voice:
        return await self._by_parity[claim.request.member % 2].voice(claim)

    def _replies(self, model_dir: Path, replies: Sequence[str]) -> ScriptedPolicies:
        return ScriptedPolicies(read_bundle(model_dir), replies)


async def serve(model_dir: Path) -> None:
    redis = await connection.connect(redis_settings().url)
    sandboxes = DockerSandboxes(fleet=secrets.token_hex(6), init=built_init())
    policies, grader = ByMember(model_dir), Grader(sandboxes)

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        return await run_rollout(claim, status, policies=policies, sandboxes=sandboxes, grader=grader)

    claimer = Claimer(kind=ROLLOUT, redis=redis, worker="scripted/1", stage=stage, breakers=Breakers({}))
    try:
        await work(claimer, slots=SLOTS, drain_s=0.0)
    finally:
        await sandboxes.close()
        await redis.aclose()


if __name__ == "__main__":
    sys.exit(run_process("worker", lambda: serve(Path(sys.argv[1]))))
