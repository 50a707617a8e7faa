"""The base of all messages: frozen, msgpack on the wire, token arrays packed as little-endian bytes.

A message accepts unknown fields, so that releases can differ; new fields go at the end, with a default. Configuration
is the opposite and refuses unknown fields. Bodies are compressed; messages that are listed by the thousand are not.
"""

from __future__ import annotations  # array is generic for type checkers only

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec
import zstandard

Int32s = bytes  # packed little-endian int32, 4 bytes each: see pack_int32s
Float32s = bytes  # packed little-endian float32, 4 bytes each: see pack_float32s

# Checked when a message is decoded, so that no later arithmetic or date conversion can overflow.
UnixSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]

MAX_BODY_BYTES = 256 * 1024 * 1024  # refuses a decompression bomb; a 128k-token trajectory is about 2 MB


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of everything that travels.

    msgspec does not inherit `kw_only`, type checkers do not see an inherited `frozen`: say both.
    """


class MalformedMessage(ValueError):
    """Bytes that cannot be decoded as the message they should be; the text names the field and the reason."""


M = TypeVar("M")
N = TypeVar("N", int, float)


def encode(message: Message) -> bytes:
    """msgpack, field names included."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[M]) -> M:
    """The message of `kind` in `data`. Raises MalformedMessage naming the field that does not fit."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"not a {getattr(kind, '__name__', kind)}: {error}") from error


def encode_body(message: Message) -> bytes:
    """msgpack under zstd level 1: a quarter of the size, for a third of a millisecond per 16k tokens."""
    return zstandard.ZstdCompressor(level=1).compress(encode(message))


def decode_body(data: bytes, kind: type[M]) -> M:
    """Inverse of encode_body. Raises MalformedMessage."""
    try:
        # Without this check zstd allocates what the frame claims.
        if zstandard.frame_content_size(data) > MAX_BODY_BYTES:
            raise MalformedMessage(f"body claims to hold more than {MAX_BODY_BYTES} bytes")
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_BODY_BYTES)
    except zstandard.ZstdError as error:
        raise MalformedMessage(f"body is not zstd: {error}") from error
    return decode(plain, kind)


def pack_int32s(values: Iterable[int]) -> Int32s:
    """4 bytes each, little-endian. Raises OverflowError for a value outside int32."""
    return _little_endian(array("i", values))


def unpack_int32s(packed: Int32s) -> Sequence[int]:
    """The ints in `packed`. Raises MalformedMessage if the length is no multiple of 4."""
    values: array[int] = array("i")
    return _filled(values, packed)


def pack_float32s(values: Iterable[float]) -> Float32s:
    """4 bytes each, little-endian; rounded to float32."""
    return _little_endian(array("f", values))


def unpack_float32s(packed: Float32s) -> Sequence[float]:
    """The floats in `packed`. Raises MalformedMessage if the length is no multiple of 4."""
    values: array[float] = array("f")
    return _filled(values, packed)


def _little_endian(values: array[N]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _filled(values: array[N], packed: bytes) -> Sequence[N]:
    if len(packed) % 4:
        raise MalformedMessage(f"packed array of {len(packed)} bytes: not a multiple of 4")
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values
