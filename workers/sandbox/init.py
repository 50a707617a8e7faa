"""The usual first process of a container: a small program of ours (init.c, connections.c), and its protocol.

It is sent into each container over the stream, where it replaces the bash that started there. So nothing is mounted, and it works on remote
Docker hosts, too. If it cannot run (an image without `head`, another processor), that bash does the same work (holder.py).
"""

import struct
import sys
from pathlib import Path

from pipeline.errors import SandboxError
from workers.sandbox.connections import CONNECTION_KINDS, MAX_FRAME_BYTES, Connections
from workers.sandbox.exchange import Capped, Exchange, Kind

BUILT = Path(sys.prefix, "share", "swerve", "sandbox-init")  # infra/setup/init.sh builds it
HEADER = struct.Struct("<cI")  # kind, bytes that follow
END = struct.Struct("<iII")  # status, survivors, milliseconds without a CPU
KINDS: dict[Kind, bytes] = {
    "run": b"r",
    "root": b"s",
    "plain": b"p",
    "clear": b"c",
    "last": b"l",
    "user": b"u",
}


def built_init() -> bytes:
    """The bytes of the program; empty if it was not built on this machine."""
    return BUILT.read_bytes() if BUILT.is_file() else b""


class InitExchange(Exchange):
    """An answer in the format of init.c."""

    def __init__(self, frames: "InitFrames", keep_bytes: int, notes: Capped | None = None) -> None:
        super().__init__(keep_bytes, notes)
        self._frames = frames

    def message(self, kind: Kind, text: bytes) -> bytes:
        return HEADER.pack(KINDS[kind], len(text)) + text

    def feed(self, piece: bytes) -> None:
        self._frames.feed(piece)

    def flush(self) -> None:
        """Does nothing, because output is passed on as it arrives."""


class InitFrames:
    """Parses the stream of one container's first process, in the format of init.c; pieces may be cut anywhere.

    Answers go to the newest exchange, frames about connections to `connections`. After a frame `l` the rest of the stream is the last
    script's output.
    """

    def __init__(self) -> None:
        self.connections: Connections | None = None
        self._answer: InitExchange | None = None
        self._pending = bytearray()  # an incomplete frame, unless it is output
        self._left_bytes = 0  # bytes of the current output frame
        self._raw = False

    def exchange(self, keep_bytes: int, notes: Capped | None = None) -> InitExchange:
        """Starts the exchange that receives the next answer."""
        self._answer = InitExchange(self, keep_bytes, notes)
        return self._answer

    def feed(self, piece: bytes) -> None:
        """Processes a piece of the stream. Raises SandboxError if it is not in the format of the first process."""
        start = 0
        while start < len(piece):
            if self._raw:
                self._write(piece[start:])
                return
            if self._left_bytes:
                taken = piece[start : start + self._left_bytes]
                self._write(taken)
                self._left_bytes -= len(taken)
            else:
                taken = piece[start : start + self._missing_bytes()]
                self._pending += taken
                self._interpret()
            start += len(taken)

    def _write(self, output: bytes) -> None:
        if self._answer is not None:
            self._answer.output.write(output)

    def _missing_bytes(self) -> int:
        if len(self._pending) < HEADER.size:
            return HEADER.size - len(self._pending)
        kind, length = HEADER.unpack_from(self._pending)
        if kind == b"o":  # output is passed on as it arrives
            return 0
        if length > MAX_FRAME_BYTES:
            raise SandboxError(f"the container's first process sent a frame {kind!r} of {length} bytes")
        return HEADER.size + length - len(self._pending)

    def _interpret(self) -> None:
        if self._missing_bytes():
            return
        kind, length = HEADER.unpack_from(self._pending)
        body = bytes(self._pending[HEADER.size :])
        self._pending.clear()
        if kind == b"o":
            self._left_bytes = length
        elif kind == b"l":
            self._raw = True
        elif kind == b"e" and length == END.size:
            if self._answer is not None:
                self._answer.status, self._answer.survivors, starved_ms = END.unpack(body)
                self._answer.starved_s = starved_ms / 1000
        elif kind in CONNECTION_KINDS:
            if self.connections is not None:
                self.connections.take(kind, body)
        else:
            raise SandboxError(f"the container's first process sent a frame {kind!r} of {length} bytes")
