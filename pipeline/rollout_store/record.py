"""One record of a segment file: a header of fixed size, a head that listing reads, and a compressed body.

A record is a rollout, or data about one that arrives later: its judgement, b"RLJ1" in the first four bytes, or what an optimizer step
did with each of its tokens, b"RLS1". Only the newest record of tokens counts: a step that is taken again after a resume replaces what it
wrote before.

    b"RLT1"  length of the head  length of the body  CRC-32 of the body  CRC-32 of these three and the head  head  body

All numbers are unsigned little-endian 32-bit. The first checksum can be verified without reading the body. A reader that finds damaged
bytes searches for the next record whose two checksums are correct.

A store never contains the known fix, the hidden tests, or anything that may quote them, because people read stores and train on exports of
them. `without_hidden` takes these out before a record is written:

- everything about the task that the agent was not given: the verdict's scripts, setup and its patch (undoing the patch that makes a
  problem solves it), hidden paths and calibration;
- the log of grading, the outcome of each test by name, and the part of `decided_by` after "but" or with a list of files, which may name
  tests; the counts of passed tests stay;
- the traceback and the log of a failure of grading, and the part of its message after the first colon.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Final

import msgspec
import zstandard
from msgspec.structs import replace

from pipeline.deadletters import AttemptFailure
from pipeline.errors import QUOTES_TESTS, shown_message
from pipeline.judge import Judgement, JudgementHead
from pipeline.message import Float32s, MalformedMessage, Message, decode, decode_body, encode
from pipeline.task import ExitCode, Task
from pipeline.trajectory import Failed, Outcome, Reward, Trajectory, TrajectoryHead

REASONS: Final = ("", "masked", "vetoed", "geometric_mask")
"""The reason why a token has no policy gradient, by its code in `TrainedTurn.reasons`. "": it has one. masked: it is outside the
objective's trust region or clip. vetoed: its trajectory has an impossible ratio. geometric_mask: the mean ratio of its trajectory is
outside learner.loss.geometric_mask.
"""
_HALF_BYTES = 2


class TrainedHead(Message, frozen=True, kw_only=True):
    """The part of the record that is readable without the arrays."""

    rollout_id: str
    step: int
    version: int  # the weights that the step started from
    num_tokens: int  # trained tokens


class TrainedTurn(Message, frozen=True, kw_only=True):
    """The data of a step about the tokens of one turn. Each array has one entry for each sampled token. The last pass counts where a step
    passes over a token several times.
    """

    turn: int  # its number in the trajectory, from 0
    # The learner's log-probs in nats, with the weights before the update, at the temperature at which the engine sampled.
    logprobs: Float32s
    advantages: Float32s
    # The factor of the objective on the token's policy gradient, 2 bytes each. For a token with a reason, the factor that it would have
    # had.
    weights: bytes
    reasons: bytes  # one byte each, an index into REASONS


class TrainedTokens(Message, frozen=True, kw_only=True):
    """The body of the record."""

    step: int
    version: int
    turns: tuple[TrainedTurn, ...]


def unpack_halves(packed: bytes) -> tuple[float, ...]:
    """The numbers in `packed`, IEEE half precision, little-endian. Raises MalformedMessage if the length is not a multiple of 2."""
    if len(packed) % _HALF_BYTES:
        raise MalformedMessage(f"packed array of {len(packed)} bytes: not a multiple of {_HALF_BYTES}")
    return struct.unpack(f"<{len(packed) // _HALF_BYTES}e", packed)


ROLLOUT_MAGIC, JUDGEMENT_MAGIC, TRAINED_MAGIC = b"RLT1", b"RLJ1", b"RLS1"
MAGIC_START = b"RL"
HEADER_BYTES = 20
# The result is a tenth smaller than with level 1 and takes half as much time again; the writer has a thread of its own.
ZSTD_LEVEL = 3
MAX_HEAD_BYTES = 1024**2

_LENGTHS = struct.Struct("<III")
_CHECKSUM = struct.Struct("<I")


class StoredHead(Message, frozen=True, kw_only=True):
    """The part of a stored rollout that is readable without its body."""

    head: TrajectoryHead
    is_dead: bool = False  # its request was dead-lettered
    replaces: bool = False  # an older record of the same request no longer counts


class StoredRollout(Message, frozen=True, kw_only=True):
    """The body of a record. `trajectory` is None if nobody could decode the request, or Redis no longer had it."""

    trajectory: Trajectory | None = None
    failures: tuple[AttemptFailure, ...] = ()  # a dead-lettered request's evidence of every attempt
    # The judgement has the text of each vote. It is stored as a record of its own, so that no trajectory is written twice; readers fill it
    # in.
    judgement: Judgement | None = None


Head = StoredHead | JudgementHead | TrainedHead
_HEADS: dict[bytes, type[Head]] = {
    ROLLOUT_MAGIC: StoredHead,
    JUDGEMENT_MAGIC: JudgementHead,
    TRAINED_MAGIC: TrainedHead,
}


@dataclass(frozen=True, slots=True)
class Frame:
    """The lengths and checksums of a record, from its header."""

    head_bytes: int
    body_bytes: int
    body_checksum: int
    checksum: int  # covers the three numbers above and the head
    magic: bytes = ROLLOUT_MAGIC

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + self.head_bytes + self.body_bytes


def frame_of(header: bytes) -> Frame | None:
    """The decoded header; None if these bytes are not one."""
    magic = header[:4]
    if len(header) < HEADER_BYTES or magic not in _HEADS:
        return None
    numbers = *_LENGTHS.unpack_from(header, 4), *_CHECKSUM.unpack_from(header, 16)
    frame = Frame(*numbers, magic=magic)
    return frame if frame.head_bytes <= MAX_HEAD_BYTES else None


def pack(head: Head, body: bytes) -> bytes:
    """The whole record for a body that `pack_body` made."""
    packed = encode(head)
    magic = next(magic for magic, kind in _HEADS.items() if isinstance(head, kind))
    lengths = _LENGTHS.pack(len(packed), len(body), zlib.crc32(body))
    return b"".join((magic, lengths, _CHECKSUM.pack(zlib.crc32(packed, zlib.crc32(lengths))), packed, body))


def pack_body(body: StoredRollout | Judgement | TrainedTokens) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(encode(body))


def head_in(frame: Frame, packed: bytes) -> Head | None:
    """The head of a record; None if it is damaged."""
    lengths = _LENGTHS.pack(frame.head_bytes, frame.body_bytes, frame.body_checksum)
    if len(packed) != frame.head_bytes or zlib.crc32(packed, zlib.crc32(lengths)) != frame.checksum:
        return None
    return decode(packed, _HEADS[frame.magic])


def is_whole(frame: Frame, body: bytes) -> bool:
    return len(body) == frame.body_bytes and zlib.crc32(body) == frame.body_checksum


def unpack_body(body: bytes) -> StoredRollout:
    """Inverse of `pack_body`. Raises MalformedMessage."""
    return decode_body(body, StoredRollout)


def unpack_judgement(body: bytes) -> Judgement:
    """Inverse of `pack_body` for a judgement. Raises MalformedMessage."""
    return decode_body(body, Judgement)


def unpack_trained(body: bytes) -> TrainedTokens:
    """Inverse of `pack_body` for trained tokens. Raises MalformedMessage."""
    return decode_body(body, TrainedTokens)


def encode_index(index: msgspec.Struct) -> bytes:
    """The encoded index with its checksum in front."""
    packed = msgspec.msgpack.encode(index)
    return _CHECKSUM.pack(zlib.crc32(packed)) + packed


def checked(data: bytes) -> bytes | None:
    """The data that `encode_index` wrote after the checksum; None if it is damaged."""
    if len(data) < _CHECKSUM.size or _CHECKSUM.unpack_from(data)[0] != zlib.crc32(data[_CHECKSUM.size :]):
        return None
    return data[_CHECKSUM.size :]


# Replaces the verdict in a stored task, because a Task must have one.
NO_VERDICT: Final = ExitCode(eval_script="")


def without_hidden(rollout: StoredRollout) -> StoredRollout:
    """Returns the rollout without hidden tests and anything that would reveal them, for the store."""
    trajectory = rollout.trajectory
    return StoredRollout(
        trajectory=None if trajectory is None else _trajectory(trajectory),
        failures=tuple(_failure(failure) for failure in rollout.failures),
    )


def judgement_without_hidden(judgement: Judgement) -> Judgement:
    """Returns the judgement with only the part of its error message that may be stored."""
    failed = judgement.failed
    if failed is None:
        return judgement
    return replace(judgement, failed=replace(failed, message=shown_message(failed.boundary, failed.message)))


def _trajectory(trajectory: Trajectory) -> Trajectory:
    claim = trajectory.claim
    request = replace(claim.request, task=_task(claim.request.task))
    return replace(
        trajectory,
        claim=replace(claim, request=request),
        outcome=_outcome(trajectory.outcome),
        reward=None if trajectory.reward is None else _reward(trajectory.reward),
    )


def _task(task: Task) -> Task:
    """Makes the stored task from the fields that are kept, so that a field of a later release is not kept by accident."""
    return Task(
        id=task.id,
        repo=task.repo,
        base_commit=task.base_commit,
        image=task.image,
        workdir=task.workdir,
        problem=task.problem,
        verdict=NO_VERDICT,
        resources=task.resources,
    )


def _reward(reward: Reward) -> Reward:
    return Reward(
        value=reward.value,
        resolved=reward.resolved,
        decided_by=reward.decided_by.partition(", but ")[0].partition(" [")[0],
        fail_to_pass=reward.fail_to_pass,
        pass_to_pass=reward.pass_to_pass,
        applied_by=reward.applied_by,
        grade_s=reward.grade_s,
        grade_cpu_s=reward.grade_cpu_s,
        control=reward.control,
        num_controlled=reward.num_controlled,
    )


def _outcome(outcome: Outcome) -> Outcome:
    if isinstance(outcome, Failed):
        return replace(outcome, message=shown_message(outcome.boundary, outcome.message))
    return outcome


def _failure(failure: AttemptFailure) -> AttemptFailure:
    detail = "" if failure.boundary in QUOTES_TESTS else failure.detail
    return replace(failure, message=shown_message(failure.boundary, failure.message), detail=detail)
