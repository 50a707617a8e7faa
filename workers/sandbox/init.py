"""The usual first process of a container: a small program of ours (init.c), and its protocol.

It is sent into each container over the stream, where it replaces the bash that started there. So nothing is mounted, and it works on remote
Docker hosts too. Where it cannot run (an image without `head`, another processor), that bash does the same work (holder.py).
"""

import struct
import sys
from pathlib import Path

from workers.sandbox.exchange import Exchange, Kind
from workers.sandbox.output import Capped

BUILT = Path(sys.prefix, "share", "swerve", "sandbox-init")  # by infra/setup/init.sh
HEADER = struct.Struct("<cI")  # kind, bytes that follow
END = struct.Struct("<iII")  # status, survivors, milliseconds without a CPU
KINDS: dict[Kind, bytes] = {"run": b"r", "plain": b"p", "clear": b"c", "last": b"l"}


def built_init() -> bytes:
    """The program; empty if it was not built on this machine."""
    return BUILT.read_bytes() if BUILT.is_file() else b""


class InitExchange(Exchange):
    """Frames in both directions, in the format of init.c. After a frame `l` the rest of the stream is the last script's output."""

    def __init__(self, keep_bytes: int, notes: Capped | None = None) -> None:
        super().__init__(keep_bytes, notes)
        self._pending = bytearray()  # an incomplete header, or incomplete numbers of an end
        self._left_bytes = 0  # of the current output frame
        self._raw = False

    def message(self, kind: Kind, text: bytes) -> bytes:
        return HEADER.pack(KINDS[kind], len(text)) + text

    def feed(self, piece: bytes) -> None:
        start = 0
        while start < len(piece):
            if self._raw:
                self.output.write(piece[start:])
                return
            if self._left_bytes:
                taken = piece[start : start + self._left_bytes]
                self.output.write(taken)
                self._left_bytes -= len(taken)
            else:
                taken = piece[start : start + self._missing_bytes()]
                self._pending += taken
                self._interpret()
            start += len(taken)

    def flush(self) -> None:
        """Does nothing, because output is passed on as it arrives."""

    def _missing_bytes(self) -> int:
        whole = HEADER.size + (END.size if self._pending.startswith(b"e") else 0)
        return whole - len(self._pending)

    def _interpret(self) -> None:
        if self._missing_bytes():
            return
        kind, length = HEADER.unpack_from(self._pending)
        if kind == b"o":
            self._left_bytes = length
        elif kind == b"l":
            self._raw = True
        else:
            self.status, self.survivors, starved_ms = END.unpack_from(self._pending, HEADER.size)
            self.starved_s = starved_ms / 1000
        self._pending.clear()
