"""Answers connections of a container's processes to a port of its loopback, although the container has no network.

Process 1 accepts them (connections.c defines the frames) and sends their bytes over the stream that also carries commands. Each connection
becomes an asyncio transport with a protocol from the caller, so code that serves on a socket, such as an aiohttp server, also works here.
No method waits: the reader of the stream must never wait for a connection, because commands and all other connections share it.
"""

import asyncio
import os
import struct
from collections.abc import Callable, Iterable
from typing import Any

from pipeline.errors import SandboxError

# Largest number of received bytes that a connection's protocol has not taken yet; after that, the program must wait.
WINDOW_BYTES = 128 * 1024
# A shorter frame counts as this many bytes, so that a program that sends single bytes cannot keep the worker busy with frames.
LEAST_COUNTED_BYTES = 1024
# A connection with more unsent bytes than this is aborted when its protocol, which was asked to pause, writes more.
MAX_UNSENT_BYTES = 1024 * 1024
HIGH_WATER_BYTES = 64 * 1024  # asyncio's own default
# Size of one frame to the container; a longer frame would delay the other connections.
MAX_SENT_BYTES = 16 * 1024
# Size of one frame to the worker: a connection's number, and the bytes that connections.c reads at once.
MAX_FRAME_BYTES = 1 + 64 * 1024
CONNECTION_KINDS = frozenset((b"b", b"n", b"d", b"h", b"w", b"x"))
HEADER = struct.Struct("<cI")
# Frame b: the port, and the window (to the container) or an errno (from it).
TWO_NUMBERS = struct.Struct("<II")
NEW = struct.Struct("<HI")  # the program's port, the bytes that may be sent
NUMBER = struct.Struct("<I")
IN_ORDER, RESET = 0, 1
LOOPBACK = "127.0.0.1"

ProtocolFactory = Callable[[], asyncio.Protocol]
"""A protocol factory as for `loop.create_server`, for protocols that get bytes (not those that provide a buffer)."""


class Connections:
    """All connections of one container to one port. `listening` becomes the errno of process 1's attempt to listen, 0 if it succeeded."""

    def __init__(self, write: Callable[[bytes], None], port: int, protocol_factory: ProtocolFactory) -> None:
        """`write` must send bytes to process 1 without waiting."""
        self.listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.port = port
        self._write = write
        self._protocol_factory = protocol_factory
        # The connections by number. None: we have closed it, and process 1 has not confirmed that yet.
        self._known: dict[int, ContainerTransport | None] = {}
        self._closed: asyncio.Future[int] | None = None
        self.is_over = False  # process 1 closes all connections, and frames that it sent before are ignored

    def listen(self) -> None:
        """Orders process 1 to listen."""
        self._write(HEADER.pack(b"b", TWO_NUMBERS.size) + TWO_NUMBERS.pack(self.port, WINDOW_BYTES))

    def close(self) -> asyncio.Future[int]:
        """Order process 1 to close the port and all connections. The future is done when process 1 has closed them."""
        self.is_over = True
        self._closed = asyncio.get_running_loop().create_future()
        self._write(HEADER.pack(b"b", TWO_NUMBERS.size) + TWO_NUMBERS.pack(0, 0))
        self._end_all(None)
        return self._closed

    def lose(self, error: SandboxError | None) -> None:
        """Ends all connections, because the stream to process 1 carries no more frames: it failed, or the last script begins."""
        self.is_over = True
        for future in (self.listening, self._closed):
            if future is not None and not future.done():
                future.set_exception(error or SandboxError("the container's last script has begun"))
                # Marks the error as retrieved, because possibly no task waits for the future.
                future.exception()
        self._end_all(ConnectionResetError(str(error)) if error else None)

    def take(self, kind: bytes, body: bytes) -> None:
        """Processes a frame from process 1. Raises SandboxError if it is malformed."""
        try:
            self._take(kind, body)
        except (struct.error, IndexError) as error:
            raise SandboxError(
                f"the container's first process sent a frame {kind!r} of {len(body)} bytes"
            ) from error

    def send(self, kind: bytes, number: int, rest: bytes = b"") -> None:
        self._write(HEADER.pack(kind, 1 + len(rest)) + bytes((number,)) + rest)

    def forget(self, number: int) -> None:
        """Records that our end is closed. The number is used again when process 1 has closed its end."""
        self._known[number] = None

    def _take(self, kind: bytes, body: bytes) -> None:
        if kind == b"b":
            self._take_answer(*TWO_NUMBERS.unpack(body))
            return
        if self.is_over:
            return
        number, rest = body[0], body[1:]
        if kind == b"n":
            port, allowed_bytes = NEW.unpack(rest)
            if number in self._known:
                raise SandboxError(f"the container's first process opened connection {number} twice")
            one = ContainerTransport(self, number, peer_port=port, allowed_bytes=allowed_bytes)
            self._known[number] = one
            asyncio.get_running_loop().call_soon(one.begin, self._protocol_factory)
            return
        one = self._known.get(number)
        if kind == b"x":
            if one is not None:
                one.lose(ConnectionResetError("the program's end was reset") if rest[0] == RESET else None)
                self.send(b"x", number, bytes((IN_ORDER,)))
            self._known.pop(number, None)
        elif one is None:
            pass  # it crossed our own frame `x`
        elif kind == b"d":
            one.take(rest)
        elif kind == b"h":
            one.take_end()
        else:
            one.allow(*NUMBER.unpack(rest))

    def _take_answer(self, port: int, error: int) -> None:
        awaited = self.listening if port else self._closed
        if awaited is not None and not awaited.done():
            awaited.set_result(error)

    def _end_all(self, error: ConnectionResetError | None) -> None:
        for one in self._known.values():
            if one is not None:
                one.lose(error)
        self._known.clear()


class ContainerTransport(asyncio.Transport):
    """One connection. The event loop calls its protocol's methods, so only the loop's exception handler gets their errors."""

    def __init__(self, table: Connections, number: int, *, peer_port: int, allowed_bytes: int) -> None:
        super().__init__({"peername": (LOOPBACK, peer_port), "sockname": (LOOPBACK, table.port)})
        self._loop = asyncio.get_running_loop()
        self._table = table
        self._number = number
        self._protocol: asyncio.Protocol = asyncio.Protocol()
        # Bytes from the container:
        self._received = bytearray()
        self._has_ended = False  # the program sends no more
        self._is_end_told = False  # the protocol hears of the end after the earlier bytes
        self._is_paused = False
        self._is_delivering = False
        self._received_count = 0  # number of these bytes as process 1 counts them
        self._taken_count = 0  # bytes that the protocol has taken and that were not reported to process 1 yet
        # Bytes to the container:
        self._unsent = bytearray()
        self._allowed_bytes = allowed_bytes
        self._is_to_end = False  # an end of stream follows the unsent bytes
        self._is_closing = False
        self._is_gone = False
        self._high_water_bytes, self._low_water_bytes = HIGH_WATER_BYTES, HIGH_WATER_BYTES // 4
        self._is_holding_back = False  # the protocol was asked to pause writing

    def begin(self, protocol_factory: ProtocolFactory) -> None:
        """Makes the protocol and connects it. It is called once, before all other methods."""
        if self._is_gone:
            return
        with _Cut(self):
            self._protocol = protocol_factory()
            self._protocol.connection_made(self)

    def take(self, data: bytes) -> None:
        """Receives bytes that the program sent."""
        # Process 1 never sends this much, and nothing after the end, so the stream is corrupt.
        if self._has_ended or len(self._received) + len(data) > 2 * WINDOW_BYTES:
            self.abort()
            return
        self._received += data
        self._received_count += max(len(data), LEAST_COUNTED_BYTES)
        self._deliver_soon()

    def take_end(self) -> None:
        """Records that the program sends no more bytes."""
        if self._has_ended:  # process 1 sends this once, so the stream is corrupt
            self.abort()
            return
        self._has_ended = True
        self._deliver_soon()

    def allow(self, num_bytes: int) -> None:
        """Allows `num_bytes` more to be sent to the program."""
        self._allowed_bytes += num_bytes
        self._push()

    def lose(self, error: Exception | None) -> None:
        """Closes the connection because the program has closed its end, or because of `error`."""
        self._received.clear()
        self._unsent.clear()
        self._is_closing = True
        if not self._is_gone:
            self._is_gone = True
            self._loop.call_soon(self._tell_lost, error)

    # asyncio.ReadTransport

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._received.clear()
        self._push()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol), "the protocol must be one that is given bytes"
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_reading(self) -> bool:
        return not self._is_paused and not self._is_closing

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._deliver_soon()

    # asyncio.WriteTransport

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = HIGH_WATER_BYTES if low is None else 4 * low
        low = high // 4 if low is None else low
        if not high >= low >= 0:
            raise ValueError(f"high ({high}) must be at least low ({low}), and low at least 0")
        self._high_water_bytes, self._low_water_bytes = high, low
        self._hold_back()

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_water_bytes, self._high_water_bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Sends data to the program. Aborts the connection if MAX_UNSENT_BYTES are unsent already: a protocol must obey
        `pause_writing`, or a program that does not read could fill the worker's memory.
        """
        if self._is_to_end:
            raise RuntimeError("cannot write after write_eof")
        if self._is_closing or not data:
            return
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.abort()
            return
        self._unsent += data
        self._push()
        self._hold_back()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self._is_closing or self._is_to_end:
            return
        self._is_to_end = True
        if not self._unsent:
            self._table.send(b"h", self._number)

    def abort(self) -> None:
        if self._is_gone:
            return
        self._finish(RESET)

    def _push(self) -> None:
        """Sends as many bytes as the program's window allows; after the last one, sends a pending end of stream or close."""
        if self._is_gone:
            return
        while self._unsent and self._allowed_bytes:
            piece = bytes(self._unsent[: min(self._allowed_bytes, MAX_SENT_BYTES)])
            del self._unsent[: len(piece)]
            self._allowed_bytes -= len(piece)
            self._table.send(b"d", self._number, piece)
            if self._is_to_end and not self._unsent:
                self._table.send(b"h", self._number)
        if self._is_closing and not self._unsent:
            self._finish(IN_ORDER)
        elif self._is_holding_back and len(self._unsent) <= self._low_water_bytes:
            self._loop.call_soon(self._resume_writing)

    def _finish(self, how: int) -> None:
        self._table.send(b"x", self._number, bytes((how,)))
        self._table.forget(self._number)
        self.lose(None)

    def _hold_back(self) -> None:
        if len(self._unsent) > self._high_water_bytes and not self._is_holding_back and not self._is_gone:
            self._is_holding_back = True
            self._protocol.pause_writing()

    def _resume_writing(self) -> None:
        if self._is_holding_back and not self._is_gone and len(self._unsent) <= self._low_water_bytes:
            self._is_holding_back = False
            self._protocol.resume_writing()

    def _deliver_soon(self) -> None:
        """Schedules one delivery of all bytes that have arrived by the time it runs, so that many small frames cost one call."""
        if not self._is_delivering and not self._is_paused and not self._is_closing:
            self._is_delivering = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_delivering = False
        if self._is_paused or self._is_closing:
            return
        if self._received:
            data = bytes(self._received)
            self._received.clear()
            self._say_taken()
            with _Cut(self):
                self._protocol.data_received(data)
        is_read = not self._received and not self._is_paused and not self._is_closing
        if self._has_ended and not self._is_end_told and is_read:
            self._is_end_told = True
            with _Cut(self):
                if not self._protocol.eof_received():
                    self.close()

    def _say_taken(self) -> None:
        self._taken_count += self._received_count
        self._received_count = 0
        if self._taken_count >= WINDOW_BYTES // 2:
            self._table.send(b"w", self._number, NUMBER.pack(self._taken_count))
            self._taken_count = 0

    def _tell_lost(self, error: Exception | None) -> None:
        self._protocol.connection_lost(error)


class _Cut:
    """Aborts a connection whose protocol raises, as asyncio's own transports do, and passes the error to the event loop."""

    def __init__(self, transport: ContainerTransport) -> None:
        self._transport = transport

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self._transport.abort()


def why_not(port: int, error: int) -> str:
    """The reason why process 1 could not listen."""
    return f"nobody can listen on port {port} of the container: {os.strerror(error)}"
