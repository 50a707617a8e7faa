"""One process for isolated calls: it reads a request, carries it out within its limits, writes the reply, and begins again.

`workers/isolation/calls.py` starts it as `python -m workers.isolation.process`. It ends with the worker's thread that started it, even if
the worker is killed. A call that exceeds a limit ends the process; SIGXCPU or one of the exit statuses below shows which limit.

Both sides write frames to two pipes: the length in eight bytes, big-endian, and as many bytes of msgpack. A request is two frames, a
`Request` and the call's arguments; a reply is one. Nothing is pickled: arguments and results are messages, structs, dataclasses and plain
values, and are encoded and decoded according to the type hints of the function.
"""

import ctypes
import functools
import importlib
import math
import os
import resource
import signal
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from pipeline.errors import RolloutError

_LENGTH_BYTES = 8

# Exit statuses of a process that ended because a call exceeded a limit.
OUT_OF_MEMORY = 70
TOO_DEEP = 71
RESULT_TOO_LARGE = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The limits of one call."""

    cpu_s: int = 30
    memory_bytes: int = 2 * 1024**3  # limit of its address space
    result_bytes: int = 64 * 1024**2  # limit of an encoded result


class Request(msgspec.Struct, frozen=True):
    """Call `function` ("package.module:name") with the arguments in the next frame."""

    function: str
    cpu_s: int


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The call returned `value`. A process that is `spent` has used too much memory, and takes no further call."""

    value: msgspec.Raw
    spent: bool


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """The call raised the error with this name in `pipeline.errors`."""

    error: str
    text: str


Reply = Returned | Raised


@functools.cache
def types_of(function: Callable[..., object]) -> tuple[Any, Any]:
    """The types of the function's arguments, as one tuple type, and of its result."""
    hints = typing.get_type_hints(function)
    result = hints.pop("return")
    return tuple.__class_getitem__(tuple(hints.values())), result


def write_frame(file: IO[bytes], content: bytes) -> None:
    file.write(len(content).to_bytes(_LENGTH_BYTES, "big"))
    file.write(content)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """The next frame's content; None at the end of the file, also within a frame."""
    length = file.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    num_bytes = int.from_bytes(length, "big")
    content = file.read(num_bytes)
    return content if len(content) == num_bytes else None


PR_SET_PDEATHSIG = 1
# A process that keeps at least this share of its memory after a call is replaced, because the next call would have that much less.
SPENT_SHARE = 0.25


def serve(limits: CallLimits, *, parent: int) -> None:
    """Carries out the requests that arrive on standard input, until it is closed."""
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
    """Makes the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def _take_standard_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Standard input and output, for frames only. Libraries then print to standard error, and read nothing."""
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
    """Makes SIGXCPU end this process after `cpu_s` more seconds of CPU time, rounded up to a whole second of its total."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + cpu_s, hard))


if __name__ == "__main__":
    started_by, memory_bytes, result_bytes = map(int, sys.argv[1:])
    serve(CallLimits(memory_bytes=memory_bytes, result_bytes=result_bytes), parent=started_by)
