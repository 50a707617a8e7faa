"""A bounded number of threads over a list, in a way that does not keep a process from ending.

They are daemons: who is interrupted need not wait for an engine that says nothing, and may leave at any moment, for
everything done here can be killed.
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
    """`work` of each item, `jobs` at a time; answers in the order of `items`. Raises what the first failing one raised."""
    waiting: queue.SimpleQueue[tuple[int, T]] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[int, R] | BaseException] = queue.SimpleQueue()
    for numbered in enumerate(items):
        waiting.put(numbered)

    def take() -> None:
        try:
            while True:
                number, item = waiting.get_nowait()
                answers.put((number, work(item)))
        except queue.Empty:
            return
        except BaseException as error:  # it belongs to the caller, whatever it is
            answers.put(error)

    for _ in range(min(jobs, len(items))):
        threading.Thread(target=take, daemon=True).start()
    done: dict[int, R] = {}
    while len(done) < len(items):
        answer = answers.get()
        if isinstance(answer, BaseException):
            raise answer
        done[answer[0]] = answer[1]
    return [done[number] for number in range(len(items))]


async def in_daemon(work: Callable[[], T]) -> T:
    """`work` in a daemon thread. Cancelled, the caller goes on at once and the thread goes on, unheard."""
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
        except BaseException as raised:  # it belongs to the caller, whatever it is
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await answer
