"""What a worker and its processes for isolated calls say to each other: frames over two pipes, msgpack inside.

A frame is its length in eight bytes, big-endian, and as many bytes. A request is two frames, a `Request` and the call's arguments; a reply
is one. Nothing is pickled: arguments and results are messages, structs, dataclasses and plain values, and are encoded and decoded as the
type hints of the function say.
"""

import functools
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import msgspec

_LENGTH_BYTES = 8

# Exit statuses of a process that ended because a call exceeded a limit.
OUT_OF_MEMORY = 70
TOO_DEEP = 71
RESULT_TOO_LARGE = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """What one call may use."""

    cpu_s: int = 30
    memory_bytes: int = 2 * 1024**3  # of address space
    result_bytes: int = 64 * 1024**2  # encoded


class Request(msgspec.Struct, frozen=True):
    """Call `function` ("package.module:name") with the arguments in the next frame."""

    function: str
    cpu_s: int


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The call returned `value`. A process that is `spent` has grown, and takes no further call."""

    value: msgspec.Raw
    spent: bool


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """The call raised the error of this name of `pipeline.errors`."""

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
