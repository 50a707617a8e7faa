"""Requests, claims and trajectories to test with: each a plain value, any field of which may be given."""

import itertools
import time
from typing import Any

from pipeline.message import pack_float32s, pack_int32s
from pipeline.request import Claim, Limits, RolloutRequest, Sampling
from pipeline.task import ExitCode, Task
from pipeline.trajectory import Action, Observation, Reward, Submitted, Trajectory, Turn, VersionSpan

RUN = "laptop"
_numbers = itertools.count(1)

TASK = Task(
    id="demo:calc-7",
    repo="demo/calc",
    base_commit="",
    image="swerve/task-base:1",
    workdir="/workspace",
    problem="add() drops its second argument",
    verdict=ExitCode(eval_script="pytest -q"),
)


def request(**fields: Any) -> RolloutRequest:
    """A request with an id of its own."""
    number = next(_numbers)
    given: dict[str, Any] = {
        "id": f"{RUN}-{number:04d}",
        "run_id": RUN,
        "purpose": "train",
        "task": TASK,
        "group_id": f"{RUN}-g{number // 4}",
        "member": number % 4,
        "group_size": 4,
        "version_at_enqueue": 3,
        "sampling": Sampling(),
        "limits": Limits(turns=20),
        "agent_config": "agent: {}",
        "tokenizer": "0" * 16,
        "enqueued_at": time.time() - 60,
    }
    return RolloutRequest(**(given | fields))


def action(command: str, output: str) -> Action:
    """A command that ended well."""
    seen = Observation(exit_code=0, output=output, dropped_chars=0, wall_s=0.1)
    return Action(command=command, observation=seen)


def turn(**fields: Any) -> Turn:
    """A turn of three sampled tokens, the last drawn by the next version."""
    given: dict[str, Any] = {
        "kept_tokens": 0,
        "fed": pack_int32s([1, 2, 3, 4]),
        "sampled": pack_int32s([5, 6, 7]),
        "logprobs": pack_float32s([-0.5, -0.25, -1.0]),
        "versions": (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)),
        "stop": "stop",
        "text": "THOUGHT: look at the file\n\n```bash\ncat calc.py\n```",
        "actions": (action("cat calc.py", "def add(a, b):\n    return a\n"),),
        "generate_s": 0.4,
    }
    return Turn(**(given | fields))


def reward(**fields: Any) -> Reward:
    """Of a solved task."""
    given: dict[str, Any] = {"value": 1.0, "resolved": True, "decided_by": "exit_code 0", "grade_s": 2.0}
    return Reward(**(given | fields))


def trajectory(claim: Claim, **fields: Any) -> Trajectory:
    """A solved one, of one turn."""
    given: dict[str, Any] = {
        "claim": claim,
        "turns": (turn(),),
        "outcome": Submitted(patch=b"--- a/calc.py\n+++ b/calc.py\n-    return a\n+    return a + b\n"),
        "reward": reward(),
        "started_at": claim.claimed_at,
        "finished_at": time.time(),
    }
    return Trajectory(**(given | fields))
