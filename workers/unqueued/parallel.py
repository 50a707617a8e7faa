"""Works off a list, several items at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from workers.unqueued.outputs import Unwritable

T = TypeVar("T")


async def side_by_side(items: Sequence[T], work: Callable[[T], Awaitable[None]], *, num_jobs: int) -> None:
    """Does `work` on each of `items`, `num_jobs` at a time, in order. Raises Unwritable, which ends all of it."""
    waiting = iter(items)

    async def work_off(waiting: Iterator[T]) -> None:
        for item in waiting:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(num_jobs, len(items))):
                group.create_task(work_off(waiting))
    except* Unwritable as unwritable:
        raise unwritable.exceptions[0] from None
