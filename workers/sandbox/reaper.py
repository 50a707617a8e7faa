"""Removes containers that nobody will come back for.

A container whose worker died ends by itself within its deadline, but "within" may be hours; the reaper looks
at the leases instead. Any worker may reap for any other: a lease says whether the try that a container was
made for is still going on.
"""

import time
from collections.abc import Awaitable, Callable

from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.engine import ATTEMPT, DEADLINE, REQUEST

Alive = Callable[[str, int], Awaitable[bool]]
"""Whether that attempt at that request still holds its lease."""


async def reap(sandboxes: DockerSandboxes, *, alive: Alive) -> list[str]:
    """Removes each of `orphans`; returns their names. Raises as that does."""
    found = await orphans(sandboxes, alive=alive)
    for name in found:
        await sandboxes.engine.remove(name)
    return found


async def orphans(sandboxes: DockerSandboxes, *, alive: Alive) -> list[str]:
    """Names of this fleet's containers that are past their deadline or whose try has ended.

    Containers that this process itself holds are left to it. Raises SandboxError if the engine does not
    answer, and whatever `alive` raises.
    """
    found: list[str] = []
    for name, labels in await sandboxes.engine.labelled(sandboxes.fleet):
        if sandboxes.is_open(name):
            continue
        if time.time() < float(labels[DEADLINE]) and await alive(labels[REQUEST], int(labels[ATTEMPT])):
            continue
        found.append(name)
    return found
