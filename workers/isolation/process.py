"""One process for isolated calls: reads a request, carries it out within its limits, writes the reply, and begins again.

`workers/isolation/calls.py` starts it as `python -m workers.isolation.process`. It ends with the worker's thread that started it, also if
the worker is killed. A call that exceeds a limit ends the process; SIGXCPU or an exit status of `messages.py` says which limit.
"""

import ctypes
import importlib
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec

from pipeline.errors import RolloutError
from workers.isolation.messages import (
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

PR_SET_PDEATHSIG = 1
# A process that has kept this share of its memory after a call is replaced, because the next call would have that much less.
SPENT_SHARE = 0.25


def serve(limits: CallLimits, *, parent: int) -> None:
    """Carry out the requests that arrive on standard input, until it is closed."""
    _end_with(parent)
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = _take_standard_streams()
    while (content := read_frame(requests)) is not None:
        arguments = read_frame(requests)
        if arguments is None:
            return
        write_frame(replies, _carry_out(content, arguments, limits))


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def _take_standard_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Standard input and output. What a library prints goes to standard error instead, and it reads nothing."""
    taken = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return taken


def _carry_out(content: bytes, arguments: bytes, limits: CallLimits) -> bytes:
    try:
        reply = _reply(msgspec.msgpack.decode(content, type=Request), arguments, limits)
        encoded = msgspec.msgpack.encode(reply)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except RecursionError:
        os._exit(TOO_DEEP)
    if len(encoded) > limits.result_bytes:
        os._exit(RESULT_TOO_LARGE)
    return encoded


def _reply(request: Request, arguments: bytes, limits: CallLimits) -> Reply:
    module, _, name = request.function.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    expected, _ = types_of(function)
    _limit_cpu(request.cpu_s)
    try:
        value = function(*msgspec.msgpack.decode(arguments, type=expected))
    except RolloutError as error:
        return Raised(type(error).__name__, str(error))
    encoded = msgspec.Raw(msgspec.msgpack.encode(value))
    del value
    return Returned(encoded, spent=_address_space_bytes() > SPENT_SHARE * limits.memory_bytes)


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()


def _limit_cpu(cpu_s: int) -> None:
    """Have SIGXCPU end this process after `cpu_s` more seconds of CPU time, rounded up to a whole second of its total."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + cpu_s, hard))


if __name__ == "__main__":
    started_by, memory_bytes, result_bytes = map(int, sys.argv[1:])
    serve(CallLimits(memory_bytes=memory_bytes, result_bytes=result_bytes), parent=started_by)
