"""The base of all messages: frozen, msgpack on the wire, token arrays packed as little-endian bytes.

A message accepts unknown fields, so that releases can differ; new fields go at the end, with a default. Configuration
is the opposite and refuses unknown fields. Bodies are compressed; messages that are listed by the thousand are not.
"""

from __future__ import annotations  # array is generic for type checkers only

import re
import sys
import threading
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import zstandard

from pipeline.screen import visible

Int32s = bytes  # packed little-endian int32, 4 bytes each: see pack_int32s
Float32s = bytes  # packed little-endian float32, 4 bytes each: see pack_float32s

# Checked when a message is decoded, so that no later arithmetic or date conversion can overflow.
UnixSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=3e38)]  # finite, in fp32 too
PositiveAmount = Annotated[float, msgspec.Meta(gt=0, le=3e38)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
PartShare = Annotated[float, msgspec.Meta(gt=0, lt=1)]  # a share that is neither 0 nor 1
# msgspec looks for a pattern anywhere in a text, so this one has both ends. The description says the same in words.
Line = Annotated[
    str,
    msgspec.Meta(
        pattern=r"\A[^\x00-\x1f\x7f-\x9f]*\Z", description="text without line breaks and control characters"
    ),
]

MAX_BODY_BYTES = 256 * 1024 * 1024  # refuses a decompression bomb; a 128k-token trajectory is about 2 MB


_UNPRINTED_IN_JSON = re.compile(r"[^\x00-~]")  # JSON itself escapes characters below 32


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """The base of all messages that travel.

    msgspec does not inherit `kw_only`, and type checkers do not see an inherited `frozen`: declare both.
    """


class MalformedMessage(ValueError):
    """Bytes that cannot be decoded as the expected message; the text names the field and the reason."""


M = TypeVar("M")
N = TypeVar("N", int, float)


def encode(message: Message) -> bytes:
    """The message as msgpack, with field names."""
    return msgspec.msgpack.encode(message)


_prepared: set[object] = set()
_preparing = threading.Lock()


def prepared(kind: type[M]) -> type[M]:
    """Returns `kind`, which any thread may now decode.

    msgspec collects the fields of a type when the type is first decoded. If two threads do that at once, the process may die of
    a segmentation fault (seen with msgspec 0.22).
    """
    if kind not in _prepared:
        with _preparing:
            msgspec.msgpack.Decoder(kind)
            _prepared.add(kind)
    return kind


def decode(data: bytes, kind: type[M]) -> M:
    """The message of `kind` in `data`. Raises MalformedMessage naming the field that does not fit."""
    try:
        return msgspec.msgpack.decode(data, type=prepared(kind))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"not a {getattr(kind, '__name__', kind)}: {error}") from error


def json_line(value: Any) -> str:
    """JSON for a screen, on one line: a character that a terminal would obey, or show as nothing, becomes an escape of JSON."""
    return _UNPRINTED_IN_JSON.sub(_escaped, msgspec.json.encode(value).decode())


def _escaped(found: re.Match[str]) -> str:
    if visible(found[0]) == found[0]:
        return found[0]
    units = found[0].encode("utf-16-be")
    return "".join(f"\\u{unit.hex()}" for unit in (units[:2], units[2:]) if unit)


def encode_body(message: Message) -> bytes:
    """The message as msgpack under zstd level 1: a quarter of the size, for a third of a millisecond per 16k tokens."""
    return zstandard.ZstdCompressor(level=1).compress(encode(message))


def decode_body(data: bytes, kind: type[M]) -> M:
    """Inverse of encode_body. Raises MalformedMessage."""
    try:
        # zstd would allocate what the frame claims.
        if zstandard.frame_content_size(data) > MAX_BODY_BYTES:
            raise MalformedMessage(f"body claims to hold more than {MAX_BODY_BYTES} bytes")
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_BODY_BYTES)
    except zstandard.ZstdError as error:
        raise MalformedMessage(f"body is not zstd: {error}") from error
    return decode(plain, kind)


def pack_int32s(values: Iterable[int]) -> Int32s:
    """The values as 4 bytes each, little-endian. Raises OverflowError for a value outside int32."""
    return _little_endian(array("i", values))


def unpack_int32s(packed: Int32s) -> Sequence[int]:
    """The ints in `packed`. Raises MalformedMessage if the length is not a multiple of 4."""
    values: array[int] = array("i")
    return _filled(values, packed)


def pack_float32s(values: Iterable[float]) -> Float32s:
    """The values as 4 bytes each, little-endian, rounded to float32."""
    return _little_endian(array("f", values))


def unpack_float32s(packed: Float32s) -> Sequence[float]:
    """The floats in `packed`. Raises MalformedMessage if the length is not a multiple of 4."""
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
