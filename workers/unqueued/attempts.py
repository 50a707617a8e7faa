"""Work on a task that is tried again after a transient failure, as the queue would; a failure that remains is a value."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from pipeline.errors import ImageMissing, RolloutError
from pipeline.task import Task

RETRY_PAUSES_S = (1.0, 4.0)  # before the second and the third try

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Broken:
    """Why something could not be done; never a verdict."""

    why: str


async def tried(work: Callable[[], Awaitable[T]], task: Task, *, image_fix: str) -> T | Broken:
    """What `work` on `task` returns, or the failure that remained after all retries. `image_fix` says what to do about an image
    that is not on this host.
    """
    for pause_s in (*RETRY_PAUSES_S, None):
        try:
            return await work()
        except ImageMissing:
            return Broken(f"no image {task.image} on this host: {image_fix}")
        except RolloutError as error:
            if pause_s is None or not error.transient:
                return Broken(str(error))
            await asyncio.sleep(pause_s)
    raise AssertionError("the last try returns")
