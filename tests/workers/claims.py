"""Claims for tests that need one and do not care what else it says."""

import time
from typing import Any

from pipeline.request import Claim, Limits, RolloutRequest, Sampling
from pipeline.task import ExitCode, Resources, Task


def make_task(image: str, **changes: Any) -> Task:
    fields: dict[str, Any] = {
        "id": "test:task",
        "repo": "test/repo",
        "base_commit": "",
        "image": image,
        "workdir": "/workspace",
        "problem": "Mend it.",
        "verdict": ExitCode(eval_script="true\n"),
        "resources": Resources(memory_bytes=512 * 1024**2, cpus=1.5, pids=64),
    }
    return Task(**fields | changes)


def make_claim(task: Task, *, request_id: str = "request", attempt: int = 1, **limits: Any) -> Claim:
    request = RolloutRequest(
        id=request_id,
        run_id="run",
        purpose="train",
        task=task,
        group_id="group",
        member=0,
        group_size=1,
        version_at_enqueue=0,
        sampling=Sampling(),
        limits=Limits(**limits),
        agent_config="",
        tokenizer="",
        enqueued_at=0.0,
    )
    return Claim(request=request, attempt=attempt, worker="test/1", claimed_at=time.time())
