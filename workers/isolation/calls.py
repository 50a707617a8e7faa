"""Calls functions in separate processes, as `asyncio.to_thread` does in threads, but within limits.

This is for functions that read text from a policy or a patch. A regular expression that never ends would hold the interpreter's lock and
block the event loop, whichever thread it ran in. LimitExceeded means that the input is at fault. If a process ends otherwise during a call,
that is an infrastructure failure, ProcessLost. Processes start with the first calls, stay for the next ones, and end with the worker.
"""

import asyncio
import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import msgspec

from pipeline import errors
from pipeline.errors import RolloutError
from workers.isolation.process import (
    OUT_OF_MEMORY,
    RESULT_TOO_LARGE,
    TOO_DEEP,
    CallLimits,
    Raised,
    Reply,
    Request,
    Returned,
    read_frame,
    types_of,
    write_frame,
)

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

NUM_PROCESSES = 4
# On a loaded machine, a call may take its CPU limit times this factor by the clock, and START_S more for the start of its process.
PATIENCE = 10
START_S = 60.0
# The ways in which a C library ends on input that it cannot handle
CRASHES = (-signal.SIGSEGV, -signal.SIGABRT)
ROOT = Path(__file__).parent.parent.parent  # where `python -m` finds our packages


class LimitExceeded(Exception):
    """A call exceeded one of its limits. The message continues a sentence such as "the log could not be parsed"."""


class ProcessLost(RolloutError):
    """A process ended during a call without exceeding a limit, or could not be started."""


class Processes:
    """A pool of processes. Each carries out one call at a time; further calls wait for one."""

    def __init__(self, *, num_processes: int = NUM_PROCESSES, limits: CallLimits | None = None) -> None:
        self._limits = limits or CallLimits()
        # One thread for each process, because the kernel ends a process with the thread that started it.
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="isolation")
        self._own = threading.local()
        self._running: set[_Process] = set()

    async def call(
        self,
        function: Callable[[*Arguments], T],
        *arguments: *Arguments,
        cpu_s: int | None = None,
    ) -> T:
        """Returns the result of `function`, a function of one of our modules, for `arguments`. It may raise an error of `pipeline.errors`.

        `cpu_s` is the limit of this call if it differs from the others'. Raises LimitExceeded and ProcessLost. Cancelling a call
        ends its process.
        """
        request = Request(f"{function.__module__}:{function.__qualname__}", cpu_s or self._limits.cpu_s)
        call = _Call(request, msgspec.msgpack.encode(arguments))
        loop = asyncio.get_running_loop()
        try:
            reply = await loop.run_in_executor(self._threads, self._carry_out, call)
        except asyncio.CancelledError:
            call.abandon()
            raise
        if isinstance(reply, Raised):
            raise getattr(errors, reply.error)(reply.text)
        return msgspec.msgpack.decode(reply.value, type=types_of(function)[1])

    def close(self) -> None:
        """Ends all processes; running calls raise ProcessLost."""
        for process in tuple(self._running):
            process.kill()
        self._threads.shutdown()
        for process in tuple(self._running):
            self._end(process)

    def _carry_out(self, call: "_Call") -> Reply:
        """Runs in a thread of the pool and carries out the call in the process that belongs to this thread."""
        process = self._process()
        kept = False
        try:
            reply = call.by(process)
            kept = not (isinstance(reply, Returned) and reply.spent)
        finally:
            if not kept:
                self._end(process)
        return reply

    def _process(self) -> "_Process":
        """This thread's process; a new one if it has none or if it ended between two calls."""
        process: _Process | None = getattr(self._own, "process", None)
        if process is not None and process.ended:
            self._end(process)
            process = None
        if process is None:
            process = self._own.process = _Process(self._limits)
            self._running.add(process)
        return process

    def _end(self, process: "_Process") -> None:
        process.close()
        self._running.discard(process)
        self._own.process = None


@dataclass(slots=True)
class _Call:
    """A call that waits for a process or is carried out by one. Cancelling it kills that process and no other call's."""

    request: Request
    arguments: bytes
    _process: "_Process | None" = None
    _is_abandoned: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def by(self, process: "_Process") -> Reply:
        with self._lock:
            if self._is_abandoned:
                raise ProcessLost("the call was cancelled")
            self._process = process
        try:
            return process.ask(self.request, self.arguments)
        finally:
            with self._lock:
                self._process = None

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            if self._process is not None:
                self._process.kill()


class _Process:
    """The object with which a thread uses its process; `kill` may be called from any thread."""

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        sizes = (os.getpid(), limits.memory_bytes, limits.result_bytes)
        command = [sys.executable, "-m", "workers.isolation.process", *map(str, sizes)]
        try:
            self._popen = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise ProcessLost(f"no process for isolated calls could be started: {error}") from error

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    def ask(self, request: Request, arguments: bytes) -> Reply:
        """Carries the call out. Raises LimitExceeded or ProcessLost if the process ends before it has replied."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        deadline = threading.Timer(START_S + PATIENCE * request.cpu_s, self.kill)
        deadline.daemon = True
        deadline.start()
        reply = None
        try:
            with contextlib.suppress(BrokenPipeError):
                write_frame(self._popen.stdin, msgspec.msgpack.encode(request))
                write_frame(self._popen.stdin, arguments)
                reply = read_frame(self._popen.stdout)
        finally:
            deadline.cancel()
        if reply is None:
            raise self._ended_by(self._popen.wait(), request)
        return msgspec.msgpack.decode(reply, type=Reply)

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()

    def _ended_by(self, status: int, request: Request) -> LimitExceeded | ProcessLost:
        if status == -signal.SIGXCPU:
            return LimitExceeded(f"within {request.cpu_s} s of CPU time")
        if status == OUT_OF_MEMORY:
            return LimitExceeded(f"within {self._limits.memory_bytes / 1024**3:g} GiB of memory")
        if status == TOO_DEEP:
            return LimitExceeded("because it is nested too deeply")
        if status == RESULT_TOO_LARGE:
            return LimitExceeded(f"into at most {self._limits.result_bytes} bytes")
        if status in CRASHES:
            return LimitExceeded(f"without a crash of its parser ({signal.Signals(-status).name})")
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return ProcessLost(f"the process that carried out {request.function} ended with {how}")


_processes = Processes()
atexit.register(_processes.close)


async def call(function: Callable[[*Arguments], T], *arguments: *Arguments, cpu_s: int | None = None) -> T:
    """`Processes.call` on the worker's own processes."""
    return await _processes.call(function, *arguments, cpu_s=cpu_s)
