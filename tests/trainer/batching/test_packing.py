from dataclasses import replace

import numpy as np
import pytest

from trainer.batching.batch import Sample
from trainer.batching.packing import PADDING, MicroBatch, deal, pack, unpack


def sample(index: int, num_tokens: int) -> Sample:
    tokens = np.arange(num_tokens, dtype=np.int32) + 100 * index
    trained = np.arange(num_tokens) % 2 == 1
    return Sample(
        request_id=f"request-{index}",
        group_id="group",
        branch=0,
        tokens_T=tokens,
        trained_T=trained,
        behaviour_logprobs_T=-tokens.astype(np.float32) * trained,
        advantages_T=(tokens * trained).astype(np.float32),
        versions_T=np.where(trained, 0, -1).astype(np.int32),
    )


def contents(microbatches: list[MicroBatch]) -> list[tuple[bytes, bytes]]:
    return [(microbatch.inputs_P.tobytes(), microbatch.boundaries.tobytes()) for microbatch in microbatches]


SAMPLES = [sample(index, num_tokens) for index, num_tokens in enumerate([5, 9, 2, 7, 3, 9])]


def test_every_target_keeps_its_own_numbers() -> None:
    for microbatch in pack(SAMPLES, max_tokens=12):
        np.testing.assert_array_equal(microbatch.targets_P, microbatch.inputs_P + 1)
        np.testing.assert_array_equal(microbatch.trained_P, microbatch.targets_P % 100 % 2 == 1)
        np.testing.assert_array_equal(
            microbatch.behaviour_logprobs_P, -microbatch.targets_P * microbatch.trained_P
        )
        np.testing.assert_array_equal(microbatch.advantages_P, microbatch.targets_P * microbatch.trained_P)


def test_boundaries_positions_and_segments_agree() -> None:
    for microbatch in pack(SAMPLES, max_tokens=12):
        for segment, (index, start, stop) in enumerate(
            zip(microbatch.samples, microbatch.boundaries, microbatch.boundaries[1:], strict=False)
        ):
            np.testing.assert_array_equal(microbatch.inputs_P[start:stop], SAMPLES[index].tokens_T[:-1])
            np.testing.assert_array_equal(microbatch.positions_P[start:stop], np.arange(stop - start))
            assert set(microbatch.segments_P[start:stop]) == {segment}
        assert microbatch.boundaries[-1] == microbatch.num_positions


def test_no_micro_batch_exceeds_its_bound_and_no_sample_is_lost() -> None:
    microbatches = pack(SAMPLES, max_tokens=12)
    assert max(microbatch.num_positions for microbatch in microbatches) <= 12
    assert sorted(index for microbatch in microbatches for index in microbatch.samples) == list(
        range(len(SAMPLES))
    )
    assert sum(m.num_trained_tokens for m in microbatches) == sum(s.num_trained_tokens for s in SAMPLES)


def test_the_layout_does_not_depend_on_the_order_of_arrival() -> None:
    assert contents(pack(SAMPLES, max_tokens=12)) == contents(pack(SAMPLES[::-1], max_tokens=12))


def test_a_sample_that_cannot_fit_names_the_field_and_the_fix() -> None:
    with pytest.raises(ValueError, match=r"learner\.micro_batch_tokens = 7: raise it to at least 8"):
        pack(SAMPLES, max_tokens=7)


def test_a_sample_of_one_token_predicts_nothing() -> None:
    lonely = replace(sample(0, 2), tokens_T=np.array([3], np.int32), trained_T=np.array([False]))
    assert pack([lonely], max_tokens=4) == []
    assert [len(values) for values in unpack([], [], [lonely])] == [1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranks_get_equally_many_micro_batches_and_together_all_of_them(num_ranks: int) -> None:
    microbatches = pack(SAMPLES, max_tokens=9)
    hands = deal(microbatches, num_ranks=num_ranks, cost=lambda microbatch: microbatch.num_positions)
    assert len(hands) == num_ranks
    assert len({len(hand) for hand in hands}) == 1
    dealt = [microbatch for hand in hands for microbatch in hand if microbatch is not PADDING]
    assert sorted(contents(dealt)) == sorted(contents(microbatches))


def test_ranks_get_about_equal_cost_not_equally_many_positions() -> None:
    """Of eight full micro-batches, four hold one long sample each: attention makes them dearer."""
    lengths = [12] * 4 + [4] * 12
    samples = [sample(index, length + 1) for index, length in enumerate(lengths)]

    def cost(microbatch: MicroBatch) -> float:
        return float(np.square(np.diff(microbatch.boundaries)).sum())

    microbatches = pack(samples, max_tokens=12)
    assert {microbatch.num_positions for microbatch in microbatches} == {12}
    for order in (microbatches, microbatches[::-1], microbatches[::2] + microbatches[1::2]):
        hands = deal(order, num_ranks=2, cost=cost)
        assert [sum(map(cost, hand)) for hand in hands] == [384.0, 384.0]


def test_ranks_without_work_get_padding_that_trains_nothing() -> None:
    hands = deal([], num_ranks=2, cost=lambda microbatch: microbatch.num_positions)
    assert hands == [[PADDING], [PADDING]]
    assert PADDING.num_trained_tokens == 0


def test_values_return_to_the_tokens_they_belong_to() -> None:
    microbatches = pack(SAMPLES, max_tokens=12)
    values = [microbatch.targets_P.astype(np.float32) for microbatch in microbatches]
    for original, unpacked in zip(SAMPLES, unpack(microbatches, values, SAMPLES), strict=True):
        assert unpacked[0] == 0
        np.testing.assert_array_equal(unpacked[1:], original.tokens_T[1:])
