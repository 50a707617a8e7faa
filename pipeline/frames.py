"""Messages over a pipe between two processes of one machine, for episodes that are played without a queue.

A frame is the length of its body in 4 big-endian bytes, then the body, as `message.encode_body` gives it. A process that
plays episodes reads requests, and writes a report at each turn and a trajectory at each end.
"""

import asyncio
import struct
from typing import TypeVar

from pipeline.message import MAX_BODY_BYTES, MalformedMessage, Message, decode_body, encode_body
from pipeline.trajectory import Trajectory

M = TypeVar("M")

_LENGTH = struct.Struct(">I")


class EpisodeReport(Message, frozen=True, kw_only=True):
    """The progress of an episode; with its trajectory, once it has finished or has failed for the last time."""

    request_id: str
    phase: str = ""  # a phase of EpisodeStatus
    turn: int = 0  # finished turns
    trajectory: Trajectory | None = None


def encode_frame(message: Message) -> bytes:
    body = encode_body(message)
    return _LENGTH.pack(len(body)) + body


def readable_frame(message: Message) -> bytes:
    """The frame of `message`.

    Raises whatever would keep `read_frame` from reading it, for example because a text or a number has no encoding, or because the frame is
    too large.
    """
    frame = encode_frame(message)
    decode_body(frame[_LENGTH.size :], type(message))
    return frame


async def read_frame(reader: asyncio.StreamReader, kind: type[M]) -> M | None:
    """The next message of `kind`; None at the end of the stream. Raises MalformedMessage, also for a truncated frame."""
    try:
        (num_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if num_bytes > MAX_BODY_BYTES:
            raise MalformedMessage(f"a frame claims to hold {num_bytes} bytes")
        return decode_body(await reader.readexactly(num_bytes), kind)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise MalformedMessage("the stream ends within a frame") from error
