"""The exchange of one command and its answer with a container's first process, whatever its protocol.

A bounded head and tail of the output are kept, and Docker's framing of an attached stream is undone here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

FRAME_HEADER_BYTES = 8  # stream number, three zeros, big-endian length of the payload


class Capped:
    """Keeps the first and the last `keep_bytes` of the written data; holds at most three times that."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped_bytes = 0

    def write(self, data: bytes) -> None:
        """Receives all of `data`."""
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
    """Removes Docker's framing of an attached stream, which may arrive in any pieces.

    Format: "Stream format" under "Attach to a container" in the Engine API reference.
    """

    def __init__(self) -> None:
        self._header = bytearray()
        self._stream = 0  # the stream of the current payload
        self._left_bytes = 0  # bytes of that payload that have not arrived yet

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


# Exit status of a first process whose stream or time has ended. It is not 0, which a successful last script would return.
LOST = 121

# run: `bash -c` as the container's user. root: the same as root. plain: as root, without environment files and programs of the workdir.
# clear: kill every other process. last: run a script as the user, and end with its status. user: who that is from now on.
Kind = Literal["run", "root", "plain", "clear", "last", "user"]


class Exchange(ABC):
    """One command and its answer.

    `output` is the command's output, and `notes` are the bytes from the side channel. `status` is None until the answer is complete.
    `survivors` counts the processes that were still alive after all were killed. `starved_s` is the time for which the machine had no CPU
    for the command's processes.
    """

    def __init__(self, keep_bytes: int, notes: Capped | None = None) -> None:
        self.output = Capped(keep_bytes)
        self.notes = notes or Capped(0)
        self.status: int | None = None
        self.survivors = 0
        self.starved_s = 0.0

    @abstractmethod
    def message(self, kind: Kind, text: bytes) -> bytes:
        """The bytes to write to the first process's stdin. `text` of a command holds no NUL."""

    @abstractmethod
    def feed(self, piece: bytes) -> None:
        """Processes a piece of the first process's stdout; pieces may be cut anywhere."""

    @abstractmethod
    def flush(self) -> None:
        """Processes the end of the first process's stdout."""
