"""Samples: every sampled token once, exactly as it was drawn, or not at all."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.message import pack_float32s, unpack_int32s
from pipeline.request import Context
from pipeline.trajectory import Turn, VersionSpan
from tests.trainer.trajectories import trajectory, turn
from trainer.batching.batch import Sample
from trainer.batching.samples import samples_of


def samples(*turns: Turn, vocab_size: int = 100, max_tokens: int = 1000) -> tuple[Sample, ...]:
    return samples_of(trajectory(*turns), vocab_size=vocab_size, max_tokens=max_tokens)


def test_turns_that_keep_everything_make_one_sample() -> None:
    (made,) = samples(turn([1, 2], [3, 4], kept=0), turn([5], [6], kept=4, version=4))
    assert made.tokens_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert made.trained_T.tolist() == [False, False, True, True, False, True]
    assert made.versions_T.tolist() == [-1, -1, 3, 3, -1, 4]
    assert made.behaviour_logprobs_T.tolist() == [0, 0, -0.5, -0.5, 0, -0.5]


def test_a_context_cut_starts_another_sample_and_trains_nothing_twice() -> None:
    first, second = samples(turn([1, 2], [3, 4], kept=0), turn([5], [6], kept=4), turn([9], [7], kept=2))
    assert first.tokens_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert second.tokens_T.tolist() == [1, 2, 9, 7]
    assert second.trained_T.tolist() == [False, False, False, True]
    assert (first.branch, second.branch) == (0, 1)


def test_every_step_makes_each_turn_a_sample_with_the_context_that_it_saw() -> None:
    given = trajectory(turn([1, 2], [3, 4], kept=0), turn([5], [6], kept=4), turn([9], [7], kept=2))
    request = replace(given.claim.request, context=Context(every_step=True))
    given = replace(given, claim=replace(given.claim, request=request))
    made = samples_of(given, vocab_size=100, max_tokens=1000)
    assert [sample.tokens_T.tolist() for sample in made] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 9, 7]]
    assert [sample.tokens_T[sample.trained_T].tolist() for sample in made] == [[3, 4], [6], [7]]
    assert [sample.branch for sample in made] == [0, 1, 2]


def test_a_turn_in_which_weights_arrived_names_both_versions() -> None:
    spans = (VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=3))
    (made,) = samples(replace(turn([1], [2, 3, 4], kept=0), versions=spans))
    assert made.versions_T.tolist() == [-1, 3, 4, 4]


@st.composite
def episodes(draw: st.DrawFn) -> tuple[Turn, ...]:
    made: list[Turn] = []
    held = 0
    ids = st.integers(0, 99)
    for _ in range(draw(st.integers(0, 6))):
        kept = draw(st.integers(0, held)) if draw(st.booleans()) else held
        fed = draw(st.lists(ids, min_size=1, max_size=5))
        sampled = draw(st.lists(ids, max_size=5))
        made.append(turn(fed, sampled, kept=kept))
        held = kept + len(fed) + len(sampled)
    return tuple(made)


@given(episodes())
def test_every_sampled_token_is_trained_exactly_once_in_its_own_context(turns: tuple[Turn, ...]) -> None:
    made = samples(*turns)
    drawn = [token for one in turns for token in unpack_int32s(one.sampled)]
    assert [int(t) for sample in made for t in sample.tokens_T[sample.trained_T]] == drawn
    context: list[int] = []
    contexts: list[list[int]] = []
    for one in turns:
        context = [*context[: one.kept_tokens], *unpack_int32s(one.fed)]
        for token in unpack_int32s(one.sampled):
            contexts.append(list(context))
            context.append(token)
    trained = [(s, t) for s in made for t in range(s.num_tokens) if s.trained_T[t]]
    assert [sample.tokens_T[:place].tolist() for sample, place in trained] == contexts


def test_a_trajectory_without_a_sampled_token_makes_no_sample() -> None:
    assert samples() == ()
    assert samples(turn([1, 2], [], kept=0)) == ()


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (
            replace(turn([1], [2, 3], kept=0), logprobs=pack_float32s([-1.0])),
            "2 sampled tokens, but 1 log-probs",
        ),
        (replace(turn([1], [2], kept=0), logprobs=b"\0\0\0"), "not a multiple of 4"),
        (replace(turn([1], [2], kept=0), versions=()), "do not cover token 0 of 1"),
        (turn([1], [2], kept=0, logprob=float("nan")), "not finite"),
        (turn([1], [2], kept=0, logprob=float("-inf")), "not finite"),
        (turn([1], [2], kept=0, logprob=0.5), "log-prob of 0.5000, above 0"),
        (turn([1], [100], kept=0), "token id 100, outside the vocabulary of 100"),
        (turn([-1], [2], kept=0), "token id -1"),
        (turn([], [2], kept=0), "nothing was fed before it"),
        (turn([1], [2], kept=1), "turn 0 kept 1 of 0 tokens"),
        (turn([1] * 1000, [2], kept=0), "more than learner.micro_batch_tokens = 1000"),
    ],
)
def test_a_trajectory_whose_tokens_do_not_add_up_is_rejected(broken: Turn, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        samples(broken)
