"""Samples: every sampled token once, exactly as it was drawn, or not at all."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.message import pack_float32s, unpack_int32s
from pipeline.request import Context
from pipeline.trajectory import FIRST_IN_CONTEXT, Turn, VersionSpan, head_of
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
    """Trees of turns: each follows the one before it, or any earlier one, or none."""
    made, held = list[Turn](), list[int]()
    ids = st.integers(0, 99)
    for number in range(draw(st.integers(0, 8))):
        after = draw(st.none() | st.integers(FIRST_IN_CONTEXT, number - 1))
        parent = number - 1 if after is None else after
        most = held[parent] if parent >= 0 else 0
        kept = draw(st.integers(0, most)) if draw(st.booleans()) else most
        fed = draw(st.lists(ids, min_size=1, max_size=5))
        sampled = draw(st.lists(ids, max_size=5))
        aside = draw(st.integers(0, 4)) == 0
        made.append(replace(turn(fed, sampled, kept=kept), after=after, aside=aside))
        held.append(kept + len(fed) + len(sampled))
    return tuple(made)


@given(episodes(), st.booleans())
def test_every_sampled_token_is_trained_exactly_once_in_its_own_context(
    turns: tuple[Turn, ...], every_step: bool
) -> None:
    expected, held = list[list[int]](), list[list[int]]()
    for number, one in enumerate(turns):
        parent = number - 1 if one.after is None else one.after
        context = [*(held[parent] if parent >= 0 else [])[: one.kept_tokens], *unpack_int32s(one.fed)]
        for token in unpack_int32s(one.sampled):
            context.append(token)
            if not one.aside:
                expected.append(list(context))
        held.append(context)
    given = trajectory(*turns)
    request = replace(given.claim.request, context=Context(every_step=every_step))
    made = samples_of(
        replace(given, claim=replace(given.claim, request=request)), vocab_size=100, max_tokens=1000
    )
    trained = [(s, t) for s in made for t in range(s.num_tokens) if s.trained_T[t]]
    assert sorted(sample.tokens_T[: place + 1].tolist() for sample, place in trained) == sorted(expected)
    assert all(not sample.behaviour_logprobs_T[~sample.trained_T].any() for sample in made)
    assert all((sample.versions_T[~sample.trained_T] == -1).all() for sample in made)


def test_two_turns_after_one_are_two_samples_of_which_one_trains_what_they_share() -> None:
    first, second = samples(
        turn([1, 2], [3, 4], kept=0),
        turn([5], [6], kept=4),
        replace(turn([7], [8], kept=4), after=0),
    )
    assert first.tokens_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert second.tokens_T.tolist() == [1, 2, 3, 4, 7, 8]
    assert second.trained_T.tolist() == [False] * 5 + [True]


def test_conversations_may_take_turns_and_each_remains_one_sample() -> None:
    first, second = samples(
        replace(turn([1], [2], kept=0), after=-1),
        replace(turn([3], [4], kept=0), after=-1),
        replace(turn([5], [6], kept=2), after=0),
        replace(turn([7], [8], kept=2), after=1),
    )
    assert first.tokens_T.tolist() == [1, 2, 5, 6]
    assert second.tokens_T.tolist() == [3, 4, 7, 8]


def test_an_aside_makes_no_sample_and_counts_among_the_asides_of_the_head() -> None:
    given = trajectory(
        replace(turn([1], [2, 3, 4], kept=0), after=-1, aside=True),
        replace(turn([5], [6], kept=0), after=-1),
    )
    (made,) = samples_of(given, vocab_size=100, max_tokens=1000)
    assert made.tokens_T.tolist() == [5, 6]
    head = head_of(given, 1)
    assert (head.sampled_tokens, head.aside_tokens) == (4, 3)


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
        (replace(turn([1], [2], kept=0), after=0), "turn 0 follows turn 0, which is not before it"),
        (replace(turn([1], [2], kept=0), after=7), "turn 0 follows turn 7, which is not before it"),
        (turn([1] * 1000, [2], kept=0), "more than learner.micro_batch_tokens = 1000"),
    ],
)
def test_a_trajectory_whose_tokens_do_not_add_up_is_rejected(broken: Turn, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        samples(broken)
