"""A function applied to many items by threads, with few results in memory at a time."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def bounded_map(pool: Executor, function: Callable[[T], R], items: Iterable[T], *, ahead: int) -> Iterator[R]:
    """The results in the order of the items, of which at most `ahead` are taken before their results are.

    Raises what the function or the iterable raises; the calls under way have ended by then.
    """
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for call in waiting:
            call.cancel()
        for call in waiting:
            if not call.cancelled():
                call.exception()
