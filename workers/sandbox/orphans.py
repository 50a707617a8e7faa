"""Removes containers that nobody will come back for.

A container whose worker died ends by itself within its deadline, but "within" may be hours; the reaper looks
at the leases instead. Any worker may reap for any other: a lease says whether the try that a container was
made for is still going on.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from pipeline.queue import RENEW_S
from workers.sandbox.containers import ATTEMPT, DEADLINE, REQUEST
from workers.sandbox.docker import DockerSandboxes

SETTLE_S = 2 * RENEW_S

Alive = Callable[[str, int], Awaitable[bool]]
"""Whether that attempt at that request still holds its lease."""


async def reap(sandboxes: DockerSandboxes, *, alive: Alive, settle_s: float = SETTLE_S) -> list[str]:
    """Removes what is found to be an orphan twice, `settle_s` apart; returns the names. Raises as `orphans` does.

    Once is not enough: when Redis comes back from an outage longer than a lease, who still lives breathes again
    within RENEW_S.
    """
    found = await orphans(sandboxes, alive=alive)
    if found and settle_s:
        await asyncio.sleep(settle_s)
        still = set(await orphans(sandboxes, alive=alive))
        found = [name for name in found if name in still]
    for name in found:
        await sandboxes.engine.remove(name)
    return found


async def orphans(sandboxes: DockerSandboxes, *, alive: Alive) -> list[str]:
    """Names of this fleet's containers that are past their deadline, whose try has ended, or whose labels do not tell.

    Containers that this process itself holds are left to it. Raises SandboxError if the engine does not
    answer, and whatever `alive` raises.
    """
    found: list[str] = []
    for name, labels in await sandboxes.engine.labelled(sandboxes.fleet):
        if sandboxes.is_open(name):
            continue
        try:
            deadline, request_id, attempt = float(labels[DEADLINE]), labels[REQUEST], int(labels[ATTEMPT])
        except (KeyError, ValueError):
            found.append(name)
            continue
        if time.time() >= deadline or not await alive(request_id, attempt):
            found.append(name)
    return found
