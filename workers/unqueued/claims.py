"""Claims for commands that open sandboxes without a queue. Such a claim has no lease."""

import secrets
import time

from pipeline.request import Claim, Limits, RolloutRequest, Sampling
from pipeline.task import Task


def unqueued_claim(task: Task, *, command: str, limits: Limits | None = None) -> Claim:
    """A claim of `task` for `command`, whose name the labels of its containers show."""
    now = time.time()
    request = RolloutRequest(
        id=f"{command}-{secrets.token_hex(8)}",
        run_id=command,
        purpose="eval",
        task=task,
        group_id=command,
        member=0,
        group_size=1,
        version_at_enqueue=0,
        sampling=Sampling(),
        limits=limits or Limits(),
        agent_config="",
        tokenizer="",
        enqueued_at=now,
    )
    return Claim(request=request, attempt=1, worker=command, claimed_at=now)
