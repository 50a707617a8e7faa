"""Keeps a bounded head and tail of a command's output, and undoes Docker's framing of an attached stream."""

from collections.abc import Iterator

FRAME_HEADER_BYTES = 8  # stream number, three zeros, big-endian length of the payload


class Capped:
    """Keeps the first and the last `keep_bytes` of what is written to it; holds at most three times that."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped_bytes = 0

    def write(self, data: bytes) -> None:
        """Take all of `data`."""
        room = self._keep_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._keep_bytes:
            self._trim()

    def kept(self) -> tuple[bytes, int]:
        """Head and tail joined, and the number of bytes that are missing between them."""
        self._trim()
        return bytes(self._head + self._tail), self._dropped_bytes

    def _trim(self) -> None:
        excess = len(self._tail) - self._keep_bytes
        if excess > 0:
            del self._tail[:excess]
            self._dropped_bytes += excess


class Frames:
    """Undoes Docker's framing of an attached stream, which may arrive in any pieces.

    Format: "Stream format" under "Attach to a container" in the Engine API reference.
    """

    def __init__(self) -> None:
        self._header = bytearray()
        self._stream = 0  # of the current payload
        self._left_bytes = 0  # of it

    def payloads(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The payload pieces in `data`, in order, each with its stream: 1 is stdout, 2 stderr."""
        start = 0
        while start < len(data):
            if self._left_bytes == 0:
                taken = data[start : start + FRAME_HEADER_BYTES - len(self._header)]
                self._header += taken
                start += len(taken)
                if len(self._header) == FRAME_HEADER_BYTES:
                    self._stream = self._header[0]
                    self._left_bytes = int.from_bytes(self._header[4:], "big")
                    self._header.clear()
                continue
            piece = data[start : start + self._left_bytes]
            self._left_bytes -= len(piece)
            start += len(piece)
            yield self._stream, piece
