"""SIGQUIT makes a process print its activity: its asyncio tasks, each with the line where it waits, and its threads.

The signal ends nothing. Python runs the handler in the main thread, so a loop that one of its tasks blocks is shown as well, unless the
task is in a C function that does not return.
"""

import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from pipeline.screen import visible

STDERR = 2


def print_tasks_on_sigquit() -> None:
    """Makes SIGQUIT print the tasks and threads of this process to standard error. Call this in the main thread."""
    signal.signal(signal.SIGQUIT, _print_running)


def _print_running(_: int, interrupted: FrameType | None) -> None:
    # sys.stderr is not used, because the signal may have interrupted its buffer in the middle of a line.
    os.write(STDERR, visible(running_text(interrupted)).encode(errors="backslashreplace"))


def running_text(interrupted: FrameType | None = None) -> str:
    """All tasks of the running event loop, then all threads, each with its name and its stack; the main thread's is `interrupted`."""
    try:
        tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    except RuntimeError:  # no event loop is running
        tasks = []
    current = asyncio.current_task() if tasks else None
    parts = [f"process {os.getpid()}: {len(tasks)} asyncio tasks, {threading.active_count()} threads\n"]
    for task in tasks:
        state = "runs in the main thread" if task is current else "waits"
        parts.append(f"task {task.get_name()!r} {state}\n{_shown(list(_awaited(task.get_coro())))}")
    frames: dict[int, FrameType | None] = {**sys._current_frames()}  # pyright: ignore[reportPrivateUsage]
    frames[threading.main_thread().ident or 0] = interrupted
    for thread in threading.enumerate():
        stack = [frame for frame, _ in traceback.walk_stack(frames.get(thread.ident or 0))][::-1]
        parts.append(f"thread {thread.name!r}\n{_shown(stack)}")
    return "".join(parts)


def _awaited(awaitable: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and of everything that it awaits, the innermost last.

    `Task.get_stack` returns only the outermost of them.
    """
    while awaitable is not None:
        for prefix in ("cr", "ag", "gi"):  # coroutine, asynchronous generator, generator
            if hasattr(awaitable, f"{prefix}_frame"):
                break
        else:
            return
        if frame := getattr(awaitable, f"{prefix}_frame"):
            yield frame
        awaitable = getattr(awaitable, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await")


def _shown(frames: list[FrameType]) -> str:
    places = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
    return "".join(places.format())
