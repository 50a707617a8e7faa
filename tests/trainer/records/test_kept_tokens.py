"""What steps did with the tokens of rollouts, in the store of rollouts: the newest counts, and it goes when the rollouts go."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.message import MalformedMessage, unpack_float32s
from pipeline.rollout_store import segment
from pipeline.rollout_store.reading import RolloutStore
from pipeline.rollout_store.record import (
    StoredRollout,
    TrainedHead,
    TrainedTokens,
    TrainedTurn,
    unpack_halves,
)
from pipeline.trajectory import head_of
from tests.trainer.trajectories import trajectory, turn
from trainer.records.rollout_writer import RolloutWriter

MAX_BYTES = 2**30


def tokens(step: int, *, logprob: float = -1.0, num_tokens: int = 2) -> TrainedTokens:
    floats = np.full(num_tokens, logprob, "<f4").tobytes()
    halves = np.full(num_tokens, 1.5, "<f2").tobytes()
    of_turn = TrainedTurn(
        turn=0, logprobs=floats, advantages=floats, weights=halves, reasons=bytes(num_tokens)
    )
    return TrainedTokens(step=step, version=step - 1, turns=(of_turn,))


def add(writer: RolloutWriter, name: str, found: TrainedTokens) -> bool:
    num_tokens = sum(len(one.reasons) for one in found.turns)
    head = TrainedHead(rollout_id=name, step=found.step, version=found.version, num_tokens=num_tokens)
    return writer.add_trained(head, found)


def add_rollout(writer: RolloutWriter, name: str) -> None:
    made = trajectory(turn([5], [6, 7], kept=0))
    request = msgspec.structs.replace(made.claim.request, id=name)
    made = msgspec.structs.replace(made, claim=msgspec.structs.replace(made.claim, request=request))
    writer.add(head_of(made, 0), StoredRollout(trajectory=made))


def test_they_are_read_whether_their_segment_is_open_or_closed(tmp_path: Path) -> None:
    writer, store = RolloutWriter(tmp_path, max_bytes=MAX_BYTES), RolloutStore(tmp_path)
    add_rollout(writer, "a")
    assert add(writer, "a", tokens(3))
    for _ in range(2):
        assert store.trained(["a"]) == {"a": tokens(3)}
        assert store.trained(["b"]) == {}
        assert [one.head.request_id for one in store.heads()] == ["a"], "they are no rollout"
        assert store.find("a") is not None
        writer.close()
    assert [*unpack_float32s(tokens(3).turns[0].logprobs)] == [-1.0, -1.0]
    assert unpack_halves(tokens(3).turns[0].weights) == (1.5, 1.5)


def test_a_step_that_is_taken_again_writes_nothing_twice_and_replaces_what_differs(tmp_path: Path) -> None:
    first = RolloutWriter(tmp_path, max_bytes=MAX_BYTES)
    assert add(first, "a", tokens(3))
    assert not add(first, "a", tokens(3))
    first.close()
    resumed = RolloutWriter(tmp_path, max_bytes=MAX_BYTES)
    assert not add(resumed, "a", tokens(3))
    assert add(resumed, "a", tokens(3, logprob=-2.0)), "the weights differed"
    assert add(resumed, "b", tokens(4))
    assert RolloutStore(tmp_path).trained(["a"]) == {"a": tokens(3, logprob=-2.0)}
    resumed.close()
    assert RolloutStore(tmp_path).trained(["a"]) == {"a": tokens(3, logprob=-2.0)}


def test_a_record_that_a_kill_cut_short_costs_nothing_else(tmp_path: Path) -> None:
    writer, killed = RolloutWriter(tmp_path / "a", max_bytes=MAX_BYTES), tmp_path / "killed"
    add_rollout(writer, "a")
    add(writer, "a", tokens(3))
    add(writer, "a", tokens(4))
    shutil.copytree(tmp_path / "a", killed)
    writer.close()
    (path,) = segment.segments_in(killed)
    path.write_bytes(path.read_bytes()[:-3])
    for _ in range(2):
        assert RolloutStore(killed).trained(["a"]) == {"a": tokens(3)}
        assert RolloutStore(killed).find("a") is not None
        RolloutWriter(killed, max_bytes=MAX_BYTES).close()


def test_they_count_against_the_budget_of_the_rollouts_and_the_oldest_go_first(tmp_path: Path) -> None:
    writer, drawn = RolloutWriter(tmp_path, max_bytes=160_000), np.random.default_rng(0)
    for step in range(1, 31):
        floats = drawn.normal(size=2000).astype("<f4").tobytes()
        of_turn = TrainedTurn(turn=0, logprobs=floats, advantages=b"", weights=b"", reasons=bytes(2000))
        add(writer, f"r{step}", TrainedTokens(step=step, version=0, turns=(of_turn,)))
    writer.close()
    found = RolloutStore(tmp_path).trained(f"r{step}" for step in range(1, 31))
    kept = [step for step in range(1, 31) if f"r{step}" in found]
    assert kept == [*range(kept[0], 31)]
    assert kept[0] > 1
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 160_000


def test_half_of_a_number_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="3 bytes"):
        unpack_halves(b"abc")
