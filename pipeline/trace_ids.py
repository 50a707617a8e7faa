"""The ids of traces and of their spans, as far as they follow from names.

The trace of a rollout follows from its request id, and so do those of its spans that one process writes and others refer to. So
nobody keeps a span for another process: each writes its part of the trace as soon as it knows it. A span that is written twice,
because work was done again after a restart, has the same id both times. Everything here is a W3C `traceparent`.
"""

import hashlib


def rollout(request_id: str) -> str:
    """The root span of a rollout's trace."""
    return _made(_digest(f"rollout/{request_id}", 16), "rollout")


def step(run_id: str, number: int) -> str:
    """The root span of the trace of an optimizer step."""
    return _made(_digest(f"step/{run_id}/{number}", 16), "step")


def publication(run_id: str, version: int) -> str:
    """The root span of the trace of a weight version."""
    return _made(_digest(f"publication/{run_id}/{version}", 16), "publication")


def named(trace: str, name: str) -> str:
    """The span of this name in the trace of `trace`, which has only one of that name."""
    return _made(parts(trace)[0], name)


def queue_wait(trace: str, kind: str) -> str:
    """The wait for the attempt that ended a request of this kind of job; it holds the attempts before that."""
    return named(trace, f"{kind}/queue wait")


def attempt(trace: str, kind: str, number: int) -> str:
    """One claim of a request of this kind of job."""
    return named(trace, f"{kind}/attempt {number}")


def group_wait(request_id: str) -> str:
    """The wait of a rollout for its group; it holds its judging."""
    return named(rollout(request_id), "group wait")


def parts(traceparent: str) -> tuple[str, str]:
    """Trace id and span id, in hexadecimal. Raises ValueError."""
    words = traceparent.split("-")
    if len(words) < 4 or len(words[1]) != 32 or len(words[2]) != 16:
        raise ValueError(f"{traceparent!r} is no traceparent")
    return words[1], words[2]


def _made(trace_id: str, name: str) -> str:
    return f"00-{trace_id}-{_digest(f'{trace_id}/{name}', 8)}-01"


def _digest(name: str, num_bytes: int) -> str:
    return hashlib.blake2b(name.encode(), digest_size=num_bytes).hexdigest()
