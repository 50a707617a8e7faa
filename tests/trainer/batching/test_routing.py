"""The experts that engines reported, from turns to samples to micro-batches."""

import pytest
from msgspec.structs import replace

from tests.trainer.trajectories import trajectory, turn
from trainer.batching.samples import samples_of

WIDTH = 2
FIRST = replace(turn([1, 2], [3, 4], kept=0), routing=bytes([1, 10, 2, 20, 3, 30]))
SECOND = replace(turn([5], [6], kept=4), routing=bytes([4, 40, 5, 50]))
CUT = replace(turn([9], [7], kept=2), routing=bytes([2, 21, 9, 90]))


def rows(*turns: object) -> list[list[list[int]]]:
    made = samples_of(trajectory(*turns), vocab_size=100, max_tokens=100, routing_width=WIDTH)
    return [sample.routing.reshape(-1, WIDTH).tolist() for sample in made]


def test_each_token_but_the_last_has_the_experts_of_its_first_pass() -> None:
    (only,) = rows(FIRST, SECOND)
    assert only == [[1, 10], [2, 20], [3, 30], [4, 40], [5, 50]]


def test_what_a_cut_kept_keeps_its_experts() -> None:
    _, second = rows(FIRST, SECOND, CUT)
    assert second == [[1, 10], [2, 21], [9, 90]]


@pytest.mark.parametrize("reported", [b"", bytes(5), bytes(8)])
def test_a_report_of_another_length_is_refused(reported: bytes) -> None:
    with pytest.raises(ValueError, match="not 2 for each of 3 tokens"):
        rows(replace(FIRST, routing=reported))


def test_a_run_that_does_not_ask_keeps_nothing() -> None:
    (sample,) = samples_of(trajectory(turn([1], [2], kept=0)), vocab_size=100, max_tokens=100)
    assert sample.routing is None


def test_a_report_takes_up_a_byte_for_each_expert() -> None:
    made = samples_of(trajectory(FIRST, SECOND, CUT), vocab_size=100, max_tokens=100, routing_width=WIDTH)
    for sample in made:
        assert sample.routing is not None
        assert sample.routing.nbytes == (sample.num_tokens - 1) * WIDTH
