"""Messages come back as they were sent, age well, and refuse what they are not."""

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pipeline import message
from pipeline.message import MalformedMessage, Message
from pipeline.request import Claim, RolloutRequest
from pipeline.trajectory import (
    Exhausted,
    Failed,
    Observation,
    Submitted,
    Trajectory,
    VersionSpan,
    head_of,
    version_at,
)
from tests.pipeline import samples

FLOAT32 = st.floats(width=32, allow_nan=False)


def claim() -> Claim:
    return Claim(request=samples.request(), attempt=1, worker="host/1", claimed_at=1.0)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_ints_come_back(values: list[int]) -> None:
    packed = message.pack_int32s(values)
    assert len(packed) == 4 * len(values)
    assert list(message.unpack_int32s(packed)) == values


@given(st.lists(FLOAT32))
def test_packed_floats_come_back(values: list[float]) -> None:
    assert list(message.unpack_float32s(message.pack_float32s(values))) == values


def test_packing_is_little_endian() -> None:
    assert message.pack_int32s([1]) == b"\x01\x00\x00\x00"


def test_an_id_that_is_no_int32_is_refused() -> None:
    with pytest.raises(OverflowError):
        message.pack_int32s([2**31])


def test_a_packed_array_cut_short_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="5 bytes"):
        message.unpack_int32s(b"12345")


@pytest.mark.parametrize(
    "outcome",
    [
        Submitted(patch=b"\xff\x00"),
        Exhausted(limit="turns", patch=b""),
        Failed(boundary="grader", message="gone", transient=True),
    ],
)
def test_a_trajectory_comes_back(outcome: Submitted | Exhausted | Failed) -> None:
    sent = samples.trajectory(claim(), outcome=outcome, reward=None)
    assert message.decode_body(message.encode_body(sent), Trajectory) == sent


def test_a_field_of_a_later_release_is_tolerated() -> None:
    class Later(Message, frozen=True, kw_only=True):
        version: int
        start: int
        end: int
        colour: str

    data = message.encode(Later(version=1, start=0, end=2, colour="blue"))
    assert message.decode(data, VersionSpan) == VersionSpan(1, 0, 2)


def test_a_message_of_an_earlier_release_takes_defaults_for_what_it_lacks() -> None:
    now = samples.request(cursor=5, traceparent="00-1-2-03")
    then = {
        name: value
        for name, value in msgspec.to_builtins(now).items()
        if name not in ("cursor", "traceparent")
    }
    found = message.decode(msgspec.msgpack.encode(then), RolloutRequest)
    assert (found.id, found.cursor, found.traceparent) == (now.id, 0, "")


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(MalformedMessage, match=r"not a VersionSpan.*\$\.start"):
        message.decode(msgspec.msgpack.encode({"version": 1, "start": "x", "end": 1}), VersionSpan)


@pytest.mark.parametrize("data", [b"", b"\xff\xff", b"not msgpack at all", b"\x91" * 5000])
def test_rubbish_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        message.decode(data, VersionSpan)
    with pytest.raises(MalformedMessage):
        message.decode_body(data, VersionSpan)


@pytest.mark.parametrize("says_its_size", [True, False])
def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch, says_its_size: bool) -> None:
    large = Observation(exit_code=0, output="x" * 2000, dropped_chars=0, wall_s=0.0)
    bomb = zstandard.ZstdCompressor(write_content_size=says_its_size).compress(message.encode(large))
    assert message.decode_body(bomb, Observation) == large
    monkeypatch.setattr(message, "MAX_BODY_BYTES", 1000)
    with pytest.raises(MalformedMessage):
        message.decode_body(bomb, Observation)


def test_a_head_sums_its_trajectory_up() -> None:
    spans = ((VersionSpan(3, 0, 3),), (VersionSpan(3, 0, 1), VersionSpan(5, 1, 3)))
    turns = tuple(samples.turn(versions=versions) for versions in spans)
    head = head_of(samples.trajectory(claim(), turns=turns), body_bytes=77)
    assert (head.num_turns, head.sampled_tokens, head.body_bytes) == (2, 6, 77)
    assert (head.version_first, head.version_last, head.reward, head.outcome) == (3, 5, 1.0, "submitted")


def test_a_trajectory_that_sampled_nothing_has_no_versions() -> None:
    failed = Failed(boundary="sandbox", message="gone", transient=True)
    head = head_of(samples.trajectory(claim(), turns=(), outcome=failed, reward=None), body_bytes=0)
    assert (head.version_first, head.version_last, head.reward, head.outcome) == (
        None,
        None,
        None,
        "failed:sandbox",
    )


def test_each_token_has_the_version_of_its_span() -> None:
    assert version_at([VersionSpan(4, 2, 3), VersionSpan(3, 0, 2)], 3) == [3, 3, 4]


def test_a_token_without_a_version_is_refused() -> None:
    with pytest.raises(ValueError, match="token 1 of 3"):
        version_at([VersionSpan(3, 0, 1), VersionSpan(4, 2, 3)], 3)
