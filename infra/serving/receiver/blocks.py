"""One block of a patch, applied. `pipeline/weight_patch.py` describes the encodings. numpy, no torch."""

import struct

import numpy as np
import zstandard
from numpy.typing import NDArray

from pipeline.message import MalformedMessage
from pipeline.weight_patch import BLOCK_BYTES, Encoding

_NUM_GAPS = struct.Struct("<I")


def rebuilt(encoding: int, content: bytes, base: bytes | None) -> bytes:
    """The new block. Raises MalformedMessage if the content does not fit the base."""
    if encoding == Encoding.RAW:
        return content
    if encoding != Encoding.SPARSE or base is None or len(base) % 2:
        raise MalformedMessage(f"a block of encoding {encoding} cannot be rebuilt")
    words = np.frombuffer(base, dtype="<u2").copy()
    positions, differences = _unpacked(content)
    if len(positions) and positions[-1] >= len(words):
        raise MalformedMessage("a block of the patch changes words beyond its end")
    words[positions] += differences
    return words.tobytes()


def _unpacked(content: bytes) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """The changed words' places in ascending order, and new minus old of each, modulo 2^16."""
    try:
        plain = zstandard.ZstdDecompressor().decompress(content, max_output_size=4 * BLOCK_BYTES)
    except zstandard.ZstdError as error:
        raise MalformedMessage(f"a block of the patch is not zstd: {error}") from error
    if len(plain) < _NUM_GAPS.size:
        raise MalformedMessage("a block of the patch is too short")
    (num_gaps,) = _NUM_GAPS.unpack_from(plain)
    gaps = np.frombuffer(plain, dtype=np.uint8, offset=_NUM_GAPS.size)[:num_gaps]
    planes = np.frombuffer(plain, dtype=np.uint8, offset=_NUM_GAPS.size + len(gaps))
    leads = gaps < 255
    num_changed = np.count_nonzero(leads)
    if len(gaps) != num_gaps or len(planes) != 2 * num_changed:
        raise MalformedMessage("a block of the patch has not one difference for each changed word")
    # A byte below 255 passes that many unchanged words and the changed one.
    positions = np.cumsum(gaps + leads.astype(np.int64))[leads] - 1
    zigzag = planes[:num_changed] | (planes[num_changed:].astype(np.uint16) << 8)
    return positions, ((zigzag >> 1) ^ (0 - (zigzag & 1))).astype(np.uint16)
