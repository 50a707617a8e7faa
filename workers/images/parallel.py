"""Runs work in threads that do not keep the process from ending.

They are daemon threads: an interrupted command need not wait for a Docker host that does not answer. That is safe because all work done
here may be killed at any moment.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(work: Callable[[T], R], items: Sequence[T], *, jobs: int) -> list[R]:
    """`work` of each item, `jobs` at a time; results in the order of `items`. Raises what the first failing call raised."""
    waiting: queue.SimpleQueue[tuple[int, T]] = queue.SimpleQueue()
    results: queue.SimpleQueue[tuple[int, R] | BaseException] = queue.SimpleQueue()
    for numbered in enumerate(items):
        waiting.put(numbered)

    def take() -> None:
        try:
            while True:
                number, item = waiting.get_nowait()
                results.put((number, work(item)))
        except queue.Empty:
            return
        except BaseException as error:  # whatever it is, the caller gets it
            results.put(error)

    for _ in range(min(jobs, len(items))):
        threading.Thread(target=take, daemon=True).start()
    done: dict[int, R] = {}
    while len(done) < len(items):
        result = results.get()
        if isinstance(result, BaseException):
            raise result
        done[result[0]] = result[1]
    return [done[number] for number in range(len(items))]


async def in_daemon(work: Callable[[], T]) -> T:
    """`work` in a daemon thread. If the caller is cancelled it returns at once; the thread goes on and its result is dropped."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(cast(T, result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # whatever it is, the caller gets it
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await answer
