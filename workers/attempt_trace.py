"""The spans of one claim: the attempt with everything in it, and the wait in the queue before it.

Where the attempt belongs is known at its end. One that is published stands beside the queue wait under the request's own span;
one that is not belongs into the queue wait, which lasts until the attempt that is published.
"""

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from pipeline import trace_ids
from pipeline.request import Claim
from pipeline.telemetry import inside, record


@dataclass(slots=True)
class AttemptTrace:
    """What is said of an attempt when it ends."""

    outcome: str = "given up"  # its lease was lost, or the worker ended
    is_published: bool = False


@contextlib.contextmanager
def attempt_trace(kind: str, claim: Claim[Any]) -> Generator[AttemptTrace]:
    """Spans of the block are in the attempt's. The span `claim` lasts from the claim to here."""
    request = claim.request
    above = request.traceparent or trace_ids.rollout(request.id)
    own, waiting = trace_ids.attempt(above, kind, claim.attempt), trace_ids.queue_wait(above, kind)
    said = AttemptTrace()
    try:
        with inside(own):
            record("claim", claim.claimed_at, time.time())
            yield said
    finally:
        if said.is_published:
            record("queue wait", request.enqueued_at, claim.claimed_at, parent=above, own=waiting)
        record(
            f"{kind} attempt",
            claim.claimed_at,
            time.time(),
            parent=above if said.is_published else waiting,
            own=own,
            error=said.outcome if said.outcome.startswith("failed") else "",
            request=request.id,
            task=request.task_id,
            attempt=claim.attempt,
            worker=claim.worker,
            outcome=said.outcome,
        )
