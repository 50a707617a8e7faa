"""The worker's end of connections, fed with frames as process 1 sends them, and with what it never sends."""

import asyncio
import contextlib
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import SandboxError
from workers.sandbox.connections import MAX_UNSENT_BYTES, WINDOW_BYTES, Connections, ContainerTransport
from workers.sandbox.first_process import InitFrames

ALLOWED_BYTES = 24 * 1024


class Played(asyncio.Protocol):
    """Notes its calls by name; `data_received` with its bytes."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, ContainerTransport)
        self.transport = transport
        self.calls.append("made")

    def data_received(self, data: bytes) -> None:
        self.calls.append(data)
        if data == b"raise":
            raise LookupError("a bug of the protocol's")

    def eof_received(self) -> bool:
        self.calls.append("eof")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.calls.append(exc if exc is None else type(exc))

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")


class Wire:
    """Process 1 with one port, played by the test."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.made: list[Played] = []
        self.table = Connections(self.written.extend, 8123, self._make)
        self.frames = InitFrames()
        self.frames.connections = self.table

    def _make(self) -> Played:
        self.made.append(Played())
        return self.made[-1]

    def say(self, kind: bytes, number: int, rest: bytes = b"") -> None:
        self.frames.feed(kind + (1 + len(rest)).to_bytes(4, "little") + bytes((number,)) + rest)

    async def connect(self, number: int = 0) -> Played:
        self.say(b"n", number, struct.pack("<HI", 40_000, ALLOWED_BYTES))
        await settled()
        return self.made[-1]

    def heard(self) -> list[tuple[bytes, bytes]]:
        """The frames written since the last time, each with its body."""
        return list(self._take_frames())

    def _take_frames(self) -> Iterator[tuple[bytes, bytes]]:
        while self.written:
            kind, length = struct.unpack_from("<cI", self.written)
            body = bytes(self.written[5 : 5 + length])
            del self.written[: 5 + length]
            yield kind, body

    def sent(self) -> bytes:
        """Bytes for the container among these frames."""
        return b"".join(body[1:] for kind, body in self.heard() if kind == b"d")


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def wire() -> Wire:
    return Wire()


async def test_a_protocol_hears_of_its_connection_in_order(wire: Wire) -> None:
    one = await wire.connect()
    assert one.transport.get_extra_info("peername") == ("127.0.0.1", 40_000)
    assert one.transport.get_extra_info("sockname") == ("127.0.0.1", 8123)
    wire.say(b"d", 0, b"some")
    await settled()
    wire.say(b"h", 0)
    wire.say(b"x", 0, b"\1")
    await settled()
    assert one.calls == ["made", b"some", ConnectionResetError]
    assert wire.heard() == [(b"x", b"\0\0")]


async def test_frames_that_come_together_are_one_call(wire: Wire) -> None:
    one = await wire.connect()
    for byte in b"abcdef":
        wire.say(b"d", 0, bytes((byte,)))
    wire.say(b"h", 0)
    await settled()
    assert one.calls == ["made", b"abcdef", "eof"]


@pytest.mark.parametrize("frame", [b"h", b"d"])
async def test_frames_after_the_end_cut_the_connection(wire: Wire, frame: bytes) -> None:
    one = await wire.connect()
    wire.say(b"h", 0)
    await settled()
    wire.say(frame, 0, b"" if frame == b"h" else b"more")
    await settled()
    assert (one.calls, wire.heard()) == (["made", "eof", None], [(b"x", b"\0\1")])


async def test_single_bytes_are_allowed_again_as_what_they_counted_for(wire: Wire) -> None:
    await wire.connect()
    for _ in range(WINDOW_BYTES // 2 // 1024):
        wire.say(b"d", 0, b"x")
    await settled()
    assert wire.heard() == [(b"w", b"\0" + struct.pack("<I", WINDOW_BYTES // 2))]


async def test_a_paused_protocol_gets_nothing_and_allows_nothing_until_it_resumes(wire: Wire) -> None:
    one = await wire.connect()
    one.transport.pause_reading()
    assert not one.transport.is_reading()
    for _ in range(4):
        wire.say(b"d", 0, bytes(WINDOW_BYTES // 4))
    wire.say(b"h", 0)
    await settled()
    assert (one.calls, wire.heard()) == (["made"], [])
    one.transport.resume_reading()
    await settled()
    assert one.calls == ["made", bytes(WINDOW_BYTES), "eof"]
    assert wire.heard() == [(b"w", b"\0" + struct.pack("<I", WINDOW_BYTES))]


async def test_no_more_is_sent_than_the_programs_end_takes(wire: Wire) -> None:
    one = await wire.connect()
    data = bytes(range(256)) * 1000
    one.transport.write(data)
    sent = wire.sent()
    assert len(sent) == ALLOWED_BYTES
    while len(sent) < len(data):
        wire.say(b"w", 0, struct.pack("<I", 10_000))
        sent += wire.sent()
    assert sent == data
    await settled()
    assert one.calls == ["made", "pause", "resume"]


async def test_pauses_and_resumptions_alternate(wire: Wire) -> None:
    one = await wire.connect()
    one.transport.set_write_buffer_limits(high=1000, low=100)
    assert one.transport.get_write_buffer_limits() == (100, 1000)
    one.transport.write(bytes(ALLOWED_BYTES + 2000))
    wire.say(b"w", 0, struct.pack("<I", 2000))
    one.transport.write(bytes(5000))
    await settled()
    assert one.calls == ["made", "pause"]
    wire.say(b"w", 0, struct.pack("<I", 4950))
    await settled()
    assert one.calls == ["made", "pause", "resume"]
    with pytest.raises(ValueError, match="must be at least low"):
        one.transport.set_write_buffer_limits(high=1, low=2)


async def test_closing_sends_the_rest_first_and_aborting_does_not(wire: Wire) -> None:
    one, two = await wire.connect(0), await wire.connect(1)
    for each in (one, two):
        each.transport.write(bytes(ALLOWED_BYTES + 10))
    wire.heard()
    one.transport.close()
    two.transport.abort()
    assert wire.heard() == [(b"x", b"\1\1")]
    assert one.transport.is_closing()
    one.transport.write(b"too late")
    wire.say(b"d", 0, b"nobody hears this")
    wire.say(b"w", 0, struct.pack("<I", ALLOWED_BYTES))
    assert wire.heard() == [(b"d", bytes(11)), (b"x", b"\0\0")]
    await settled()
    assert (one.calls, two.calls) == (["made", None], ["made", None])


async def test_the_end_of_writing_follows_what_was_written(wire: Wire) -> None:
    one = await wire.connect()
    one.transport.write(bytes(ALLOWED_BYTES + 1))
    one.transport.write_eof()
    assert one.transport.can_write_eof()
    wire.heard()
    with pytest.raises(RuntimeError, match="after write_eof"):
        one.transport.write(b"x")
    wire.say(b"w", 0, struct.pack("<I", 10))
    assert wire.heard() == [(b"d", b"\0\0"), (b"h", b"\0")]


async def test_a_protocol_that_writes_on_though_told_to_pause_is_cut(wire: Wire) -> None:
    one = await wire.connect()
    one.transport.write(bytes(ALLOWED_BYTES + MAX_UNSENT_BYTES))
    one.transport.write(b"x")
    assert not one.transport.is_closing()
    one.transport.write(b"y")
    await settled()
    assert one.calls == ["made", "pause", None]
    assert one.transport.get_write_buffer_size() == 0


async def test_a_protocol_that_raises_is_cut_and_the_others_are_not(wire: Wire) -> None:
    caught: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context["exception"]))
    one, two = await wire.connect(0), await wire.connect(1)
    wire.say(b"d", 0, b"raise")
    wire.say(b"d", 1, b"fine")
    await settled()
    assert (one.calls, two.calls) == (["made", b"raise", None], ["made", b"fine"])
    assert [type(error) for error in caught] == [LookupError]


async def test_a_number_is_another_connection_once_both_ends_have_closed_it(wire: Wire) -> None:
    one = await wire.connect(7)
    one.transport.abort()
    wire.say(b"d", 7, b"crossed the abort")
    wire.say(b"x", 7, b"\0")
    two = await wire.connect(7)
    wire.say(b"d", 7, b"new")
    await settled()
    assert (one.calls, two.calls) == (["made", None], ["made", b"new"])
    assert wire.heard() == [(b"x", b"\7\1")]


async def test_one_that_is_reset_before_it_is_made_has_no_protocol(wire: Wire) -> None:
    wire.say(b"n", 0, struct.pack("<HI", 1, 1))
    wire.say(b"x", 0, b"\1")
    await settled()
    assert wire.made == []


async def test_after_the_end_nothing_is_obeyed_and_nothing_sent(wire: Wire) -> None:
    one = await wire.connect()
    wire.table.lose(None)
    await wire.connect(1)
    wire.say(b"d", 0, b"late")
    wire.say(b"x", 0, b"\0")
    one.transport.write(b"late")
    one.transport.close()
    one.transport.abort()
    await settled()
    assert (one.calls, len(wire.made), wire.heard()) == (["made", None], 1, [])


@pytest.mark.parametrize(
    "frame",
    [
        b"?\0\0\0\0",
        b"e\1\0\0\0x",
        b"d\xff\xff\xff\xff",
        b"d\0\0\0\0",
        b"n\1\0\0\0\0",
        b"b\1\0\0\0\0",
        b"x\1\0\0\0\0",
    ],
)
async def test_what_process_1_never_says_ends_the_sandbox(wire: Wire, frame: bytes) -> None:
    await wire.connect()
    with pytest.raises(SandboxError, match="first process sent a frame"):
        wire.frames.feed(frame)


async def test_more_than_was_allowed_cuts_the_connection(wire: Wire) -> None:
    one = await wire.connect()
    one.transport.pause_reading()
    for _ in range(5):
        wire.say(b"d", 0, bytes(60_000))
    await settled()
    assert one.calls == ["made", None]


numbers = st.integers(0, 3)
sizes = st.sampled_from((0, 1, 1000, 20_000, 2**32 - 1)).map(lambda size: struct.pack("<I", size))
said = st.one_of(
    st.tuples(st.just(b"n"), numbers, sizes.map(lambda size: b"\1\1" + size)),
    st.tuples(st.just(b"d"), numbers, st.binary(max_size=200)),
    st.tuples(st.just(b"h"), numbers, st.just(b"")),
    st.tuples(st.just(b"w"), numbers, sizes),
    st.tuples(st.just(b"x"), numbers, st.binary(min_size=1, max_size=1)),
)
done = st.tuples(
    st.sampled_from(("close", "abort", "write_eof", "pause_reading", "resume_reading", "write")), numbers
)


def happen(wire: Wire, what: Any, number: int, rest: bytes | None = None) -> None:
    """A frame comes, or the protocol of the connection that was made as `number` does something."""
    if rest is not None:
        wire.say(what, number, rest)
        return
    for one in wire.made[number : number + 1]:
        if what == "write":
            with contextlib.suppress(RuntimeError):
                one.transport.write(bytes(30_000))
        else:
            getattr(one.transport, what)()


@given(st.lists(st.one_of(said, done), max_size=60))
def test_in_whatever_order_things_happen_each_connection_begins_and_ends_once(events: list[Any]) -> None:
    async def play() -> None:
        wire = Wire()
        for event in events:
            try:
                happen(wire, *event)
            except SandboxError:  # as the stream's reader does, it ends here
                break
            await settled()
        wire.table.lose(SandboxError("the end"))
        await settled()
        for one in wire.made:
            ends = [call for call in one.calls if call is None or isinstance(call, type)]
            assert (one.calls[0], len(ends), one.calls[-1]) == ("made", 1, ends[0])
            assert one.calls.count("eof") <= 1

    asyncio.run(play())


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_any_bytes_are_obeyed_or_refused(pieces: list[bytes]) -> None:
    async def play() -> None:
        wire = Wire()
        with contextlib.suppress(SandboxError):
            for piece in pieces:
                wire.frames.feed(piece)
                await settled()
        wire.table.lose(None)
        await settled()

    asyncio.run(play())
