"""Removes containers that nobody will come back for.

A container whose worker died ends by itself within its deadline, but "within" may be hours; the reaper looks
at the leases instead. Any worker may reap for any other: a lease says whether the try that a container was
made for is still going on.
"""

import time
from collections.abc import Awaitable, Callable

from workers.sandbox.docker import ATTEMPT, DEADLINE, REQUEST, DockerSandboxes


async def reap(
    sandboxes: DockerSandboxes,
    *,
    alive: Callable[[str, int], Awaitable[bool]],
) -> list[str]:
    """Removes each container of this fleet that is past its deadline or whose try has ended; returns their
    names.

    `alive(request_id, attempt)` says whether that try still holds its lease. Containers that this process
    itself holds are left to it. Raises SandboxError if the engine does not answer, and whatever `alive`
    raises.
    """
    reaped: list[str] = []
    for name, labels in await sandboxes.engine.labelled(sandboxes.fleet):
        if sandboxes.is_open(name):
            continue
        if time.time() < float(labels[DEADLINE]) and await alive(labels[REQUEST], int(labels[ATTEMPT])):
            continue
        await sandboxes.engine.remove(name)
        reaped.append(name)
    return reaped
