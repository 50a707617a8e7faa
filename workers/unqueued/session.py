"""The time in which a command uses Docker: a signal cancels it, and its sandboxes are closed at the end."""

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from pipeline.errors import SandboxError
from workers.sandbox.protocol import Misconfigured, Sandboxes


@asynccontextmanager
async def session(sandboxes: Sandboxes) -> AsyncGenerator[str]:
    """Yields why no sandbox can be opened on this machine, "" if one can. Closes `sandboxes` at its end.

    SIGTERM and SIGHUP cancel the task within. Raises Misconfigured.
    """
    running = asyncio.current_task()
    assert running is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        yield await _outage(sandboxes)
    finally:
        await sandboxes.close()


async def _outage(sandboxes: Sandboxes) -> str:
    try:
        await sandboxes.check()
    except Misconfigured:
        raise
    except SandboxError as error:
        return f"no Docker host answers ({error}): start Docker, or set DOCKER_HOST"
    return ""
