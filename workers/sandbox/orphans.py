"""Finds and removes orphans: containers that still exist although their try at a request is over.

A container whose worker died ends by itself at its deadline, but that may be hours away. So workers compare containers with leases: a lease
shows whether the try for which a container was made is still running. Any worker may remove another worker's orphans.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from pipeline.queue import RENEW_S
from workers.docker.host import ATTEMPT, DEADLINE, REQUEST
from workers.sandbox.docker import DockerSandboxes

SETTLE_S = 2 * RENEW_S

HasLease = Callable[[str, int], Awaitable[bool]]
"""Whether that attempt at that request still holds its lease."""


async def remove_orphans(
    sandboxes: DockerSandboxes, *, has_lease: HasLease, settle_s: float = SETTLE_S
) -> list[str]:
    """Removes the containers that are orphans in two checks, `settle_s` apart; returns their names. Raises the errors of `orphans`.

    One check is not enough: when Redis comes back from an outage longer than a lease, living workers renew within RENEW_S.
    """
    found = await orphans(sandboxes, has_lease=has_lease)
    if found and settle_s:
        await asyncio.sleep(settle_s)
        still = set(await orphans(sandboxes, has_lease=has_lease))
        found = [name for name in found if name in still]
    for name in found:
        await sandboxes.api.remove(name)
    return found


async def orphans(sandboxes: DockerSandboxes, *, has_lease: HasLease) -> list[str]:
    """Names of this fleet's containers that are past their deadline, whose try is over, or whose labels are unreadable.

    Containers that this process uses are not among them. Raises SandboxError if the Docker host does not answer, and the errors of
    `has_lease`.
    """
    found: list[str] = []
    for name, labels in await sandboxes.api.labelled(sandboxes.fleet):
        if sandboxes.is_open(name):
            continue
        try:
            deadline, request_id, attempt = float(labels[DEADLINE]), labels[REQUEST], int(labels[ATTEMPT])
        except (KeyError, ValueError):
            found.append(name)
            continue
        if time.time() >= deadline or not await has_lease(request_id, attempt):
            found.append(name)
    return found
