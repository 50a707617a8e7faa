"""`python -m tests.workers.judge.traced_rollout MODEL IMAGE COMMIT`: enqueues, plays and grades one rollout, and writes its spans.

The trainer's and the worker's part of a trace in a process of its own, because a process has one destination of spans.
"""

import asyncio
import secrets
import sys
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from pipeline import connection, queue
from pipeline.kinds import ROLLOUT
from pipeline.request import Claim
from pipeline.settings import redis_settings, telemetry_settings
from pipeline.task import ExitCode
from pipeline.telemetry import start_telemetry
from pipeline.tokenizer import read_bundle
from tests.workers.agent.episode import AGENT, SUBMIT, bash
from tests.workers.claims import make_claim, make_task
from trainer.rollouts.dispatch import enqueue
from workers.breaker import Breakers
from workers.claim import Claimer, Stage
from workers.grading.grade import Grader
from workers.policy.scripted import ScriptedPolicies
from workers.rollout import run_rollout
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.first_process import built_init

FIX = "sed -i 's/a - b/a + b/' calc.py"
SCRIPT = "python3 -c 'from calc import add; assert add(3, 1) == 4'\n"


async def main(model_dir: Path, image: str, commit: str) -> None:
    task = make_task(image, base_commit=commit, verdict=ExitCode(eval_script=SCRIPT))
    request = replace(make_claim(task, turns=2).request, id="traced", agent_config=AGENT)
    redis = await connection.connect(redis_settings().url)
    sandboxes = DockerSandboxes(fleet=secrets.token_hex(6), init=built_init())
    try:
        await enqueue(redis, request)
        (claim,) = await queue.take(redis, "test/1", 1)
        assert isinstance(claim, Claim)
        policies = ScriptedPolicies(read_bundle(model_dir), [bash(FIX), bash(SUBMIT)])
        stage: Stage = partial(run_rollout, policies=policies, sandboxes=sandboxes, grader=Grader(sandboxes))
        claimer = Claimer(kind=ROLLOUT, redis=redis, worker="test/1", stage=stage, breakers=Breakers({}))
        claimer.taken[claim.request.id] = claim
        await claimer.answer({"job_id": claim.request.id})
    finally:
        await sandboxes.close()
        await redis.aclose()


if __name__ == "__main__":
    provider = start_telemetry("worker", telemetry_settings())
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
    provider.shutdown()
