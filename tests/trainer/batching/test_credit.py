"""Credit: each method against its closed form, and what no score may change."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.trajectories import head
from trainer.batching.batch import Sample, SampledReply
from trainer.batching.credit import (
    BASELINES,
    CREDITS,
    GradedMember,
    group_mean_std,
    leave_one_out,
    token_advantages,
)
from trainer.recipe import AdvantageKind, CreditMethod, CreditRecipe

DISTILLING: tuple[CreditMethod, ...] = ("distill", "outcome_plus_distill")
METHODS: tuple[CreditMethod, ...] = tuple(one for one in get_args(CreditMethod) if one not in DISTILLING)
"""The methods that read scores."""


def sample(lengths: Mapping[int, int], *, branch: int = 0) -> Sample:
    """Each turn is one token that is fed and so many that are sampled."""
    replies: list[SampledReply] = []
    trained: list[bool] = []
    for turn, length in lengths.items():
        start = len(trained) + 1
        trained += [False, *[True] * length]
        replies.append(SampledReply(turn, start, start + length, b""))
    of = head(0, 0)
    num_tokens = len(trained)
    return Sample(
        request_id=of.request_id,
        group_id=of.group_id,
        branch=branch,
        tokens_T=np.arange(num_tokens, dtype=np.int32),
        trained_T=np.array(trained),
        behaviour_logprobs_T=np.zeros(num_tokens, np.float32),
        advantages_T=np.zeros(num_tokens, np.float32),
        versions_T=np.zeros(num_tokens, np.int32),
        replies=tuple(replies),
    )


def member(
    reward: float, *scores: float | None, lengths: tuple[int, ...] = (), judged: bool = True
) -> GradedMember:
    """With one turn for each score, None where the judge abstains; a turn has one token unless `lengths` says otherwise."""
    turns = dict(enumerate(lengths or (1,) * len(scores)))
    valid = {turn: score for turn, score in enumerate(scores) if score is not None}
    return GradedMember(reward, (sample(turns),), valid if judged else None)


def by_turn(
    members: list[GradedMember],
    method: CreditMethod,
    coefficient: float = 0.1,
    kind: AdvantageKind = "leave_one_out",
) -> list[dict[int, float]]:
    """The advantage of each turn of each member; all tokens of a turn have the same."""
    recipe = CreditRecipe(method=method, coefficient=coefficient)
    found = token_advantages(dict(enumerate(members)), kind, recipe)
    values: list[dict[int, float]] = []
    for key, one in enumerate(members):
        turns: dict[int, float] = {}
        for part, advantages_T in zip(one.samples, found[key], strict=True):
            assert advantages_T.dtype == np.float32
            assert not advantages_T[~part.trained_T].any(), "what was fed has no advantage"
            for reply in part.replies:
                (turns[reply.turn],) = {float(value) for value in advantages_T[reply.start : reply.end]}
        values.append(turns)
    return values


@pytest.mark.parametrize("kind", BASELINES)
def test_the_outcome_is_on_every_trained_token_and_on_no_other(kind: AdvantageKind) -> None:
    cut = (sample({0: 2, 1: 1}), sample({2: 3}, branch=1))
    members = {
        0: GradedMember(1.0, cut),
        3: GradedMember(0.0, (sample({0: 1}),)),
        4: GradedMember(0.5, ()),
    }
    found = token_advantages(members, kind, CreditRecipe(method="outcome"))
    expected = BASELINES[kind]({0: 1.0, 3: 0.0, 4: 0.5})
    assert {number: len(arrays) for number, arrays in found.items()} == {0: 2, 3: 1, 4: 0}
    for number, one in members.items():
        for part, advantages_T in zip(one.samples, found[number], strict=True):
            worth = np.float32(expected[number])
            np.testing.assert_array_equal(advantages_T, np.where(part.trained_T, worth, np.float32(0)))


def test_outcome_plus_mean_is_half_of_the_baseline_of_the_signed_outcome_plus_the_mean_score() -> None:
    members = [member(1.0, 1.0, None, 0.0), member(0.0, -1.0, -1.0), member(0.0, None)]
    signed = {0: 1 + 0.4 * 0.5, 1: -1 + 0.4 * -1.0, 2: -1.0}  # the last has no valid score
    expected = {number: value / 2 for number, value in leave_one_out(signed).items()}
    for number, turns in enumerate(by_turn(members, "outcome_plus_mean", 0.4)):
        assert [*turns.values()] == pytest.approx([expected[number]] * len(turns))


def test_outcome_plus_mean_with_deviations_is_the_baseline_of_the_signed_outcome_plus_the_mean_score() -> (
    None
):
    members = [member(1.0, 1.0, 0.0), member(0.0, -1.0)]
    expected = group_mean_std({0: 1 + 0.4 * 0.5, 1: -1 + 0.4 * -1.0})
    found = by_turn(members, "outcome_plus_mean", 0.4, "group_mean_std")
    assert found == [
        pytest.approx({0: expected[0], 1: expected[0]}, abs=1e-5),
        pytest.approx({0: expected[1]}),
    ]


def test_step_wise_normalises_each_turn_among_the_same_turns_of_the_group() -> None:
    members = [member(1.0, 1.0, -1.0), member(0.0, 0.0, 1.0), member(0.0, -1.0, 0.0)]
    found = by_turn(members, "step_wise", 1.0, "group_mean_std")
    for turn, signed in enumerate([[2.0, -1.0, -2.0], [0.0, 0.0, -1.0]]):
        expected = (np.array(signed) - np.mean(signed)) / np.std(signed)
        assert [one[turn] for one in found] == pytest.approx(expected.tolist(), abs=1e-4)


def test_step_wise_leaves_the_outcome_to_turns_without_a_score_or_without_another_to_compare_with() -> None:
    members = [member(1.0, 1.0, None, 0.5), member(0.0, -1.0, 1.0)]
    outcome = group_mean_std({0: 1.0, 1: 0.0})
    found = by_turn(members, "step_wise", 0.1, "group_mean_std")
    assert found[0][1] == pytest.approx(outcome[0]), "it abstained"
    assert found[1][1] == pytest.approx(outcome[1]), "the only score of its turn"
    assert found[0][2] == pytest.approx(outcome[0]), "the only turn of its number"


def test_step_wise_gives_0_to_a_turn_in_which_all_members_are_equal() -> None:
    members = [member(1.0, 0.5, 1.0), member(1.0, 0.5, -1.0), member(0.0, None, None)]
    found = by_turn(members, "step_wise", 0.1, "group_mean_std")
    assert [one[0] for one in found[:2]] == [0.0, 0.0]
    assert found[0][1] == pytest.approx(1.0, abs=1e-4)


def test_outcome_then_steps_adds_the_deviation_less_its_mean_over_the_tokens_of_the_trajectory() -> None:
    members = [member(1.0, 1.0, 0.0, lengths=(3, 1)), member(0.0, 0.0, 1.0, lengths=(1, 1))]
    # Deviations: 0.5 and -0.5 of the first member, -0.5 and 0.5 of the second. Their means over tokens: 0.25 and 0.
    first, second = by_turn(members, "outcome_then_steps", 0.1)
    assert first == pytest.approx({0: 1 + 0.1 * 0.25, 1: 1 - 0.1 * 0.75})
    assert second == pytest.approx({0: -1 - 0.1 * 0.5, 1: -1 + 0.1 * 0.5})


def test_outcome_then_steps_leaves_turns_that_cannot_be_compared_exactly_as_they_are() -> None:
    members = [member(1.0, 1.0, None, -1.0, 0.3), member(0.0, -1.0, 1.0, 1.0)]
    first, second = by_turn(members, "outcome_then_steps", 0.1)
    assert first[1] == 1.0, "it abstained"
    assert second[1] == -1.0, "the only score of its turn"
    assert first[3] == 1.0, "the only turn of its number"
    assert first[0] == pytest.approx(1 + 0.1 * 1.0), "deviations 1 and -1 have the mean 0"
    assert first[2] == pytest.approx(1 - 0.1 * 1.0)


def test_one_comparable_turn_has_no_other_to_take_credit_from() -> None:
    members = [member(1.0, 1.0, None), member(0.0, -1.0, None)]
    assert by_turn(members, "outcome_then_steps") == by_turn(members, "outcome")


@pytest.mark.parametrize("method", METHODS)
def test_a_trajectory_cut_into_samples_has_the_same_advantages_turn_by_turn(method: CreditMethod) -> None:
    whole = GradedMember(1.0, (sample({0: 2, 1: 1, 2: 4}),), {0: 1.0, 1: -0.5, 2: 0.25})
    parts = (sample({0: 2}), sample({1: 1, 2: 4}, branch=1))
    cut = GradedMember(1.0, parts, whole.scores)
    other = member(0.0, -1.0, 0.5, 1.0)
    assert by_turn([whole, other], method) == by_turn([cut, other], method)


@st.composite
def groups(draw: st.DrawFn) -> list[GradedMember]:
    """Members of unequal lengths, with abstentions, some without a judgement, some cut into two samples."""
    made: list[GradedMember] = []
    score = st.none() | st.floats(-1, 1, width=32)
    for _ in range(draw(st.integers(2, 5))):
        lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
        scores = draw(st.none() | st.lists(score, min_size=len(lengths), max_size=len(lengths)))
        turns = dict(enumerate(lengths))
        cut = draw(st.integers(0, len(lengths) - 1))
        parts = [{turn: turns[turn] for turn in turns if (turn < cut) == first} for first in (True, False)]
        made.append(
            GradedMember(
                draw(st.sampled_from([0.0, 0.25, 1.0])),
                tuple(sample(part, branch=number) for number, part in enumerate(filter(None, parts))),
                None if scores is None else {turn: s for turn, s in enumerate(scores) if s is not None},
            )
        )
    return made


@given(groups(), st.sampled_from([*BASELINES]), st.floats(0, 1))
def test_outcome_then_steps_never_changes_the_total_of_a_trajectory(
    members: list[GradedMember], kind: AdvantageKind, coefficient: float
) -> None:
    graded = dict(enumerate(members))
    recipe = CreditRecipe(method="outcome_then_steps", coefficient=coefficient)
    moved = token_advantages(graded, kind, recipe)
    outcome = token_advantages(graded, kind, CreditRecipe(method="outcome"))
    for key in graded:
        totals = [sum(float(a_T.sum(dtype=np.float64)) for a_T in found[key]) for found in (moved, outcome)]
        assert totals[0] == pytest.approx(totals[1], abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
@given(groups(), st.sampled_from([*BASELINES]))
def test_coefficient_0_and_the_absence_of_judgements_are_the_outcome_bit_for_bit(
    method: CreditMethod, members: list[GradedMember], kind: AdvantageKind
) -> None:
    graded = dict(enumerate(members))
    unjudged = {key: GradedMember(one.reward, one.samples) for key, one in graded.items()}
    expected = token_advantages(graded, kind, CreditRecipe(method="outcome"))
    without_weight = token_advantages(graded, kind, CreditRecipe(method=method, coefficient=0.0))
    without_judge = token_advantages(unjudged, kind, CreditRecipe(method=method))
    for key, arrays in expected.items():
        for given_T, *others in zip(arrays, without_weight[key], without_judge[key], strict=True):
            assert all(given_T.tobytes() == other_T.tobytes() for other_T in others)


def test_the_order_of_members_changes_no_advantage() -> None:
    members = [member(1.0, 1.0, -0.5), member(0.0, 0.25, None), member(0.0, -1.0, 0.5)]
    for method in METHODS:
        forward, backward = by_turn(members, method), by_turn(members[::-1], method)[::-1]
        assert forward == [pytest.approx(turns) for turns in backward]


def test_the_worked_example_in_the_docs_is_what_the_code_computes() -> None:
    lines = Path("docs/judge.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if ", R = " in line]
    members: list[GradedMember] = []
    for number, reward in enumerate((1.0, 0.0, 0.0)):
        mine = [row for row in rows if row[0] == f"{number}, R = {reward:g}"]
        scores = [None if row[3] == "-" else float(row[3]) for row in mine]
        members.append(member(reward, *scores, lengths=tuple(int(row[2]) for row in mine)))
    methods: tuple[CreditMethod, ...] = ("outcome", "outcome_plus_mean", "outcome_then_steps", "potential")
    for column, method in enumerate(methods, 4):
        found = [value for turns in by_turn(members, method) for value in turns.values()]
        assert [f"{value:.3f}" for value in found] == [row[column] for row in rows]


@pytest.mark.parametrize(
    ("method", "kind", "price"),
    [
        ("outcome_then_steps", "leave_one_out", 0.075),
        ("outcome_then_steps", "group_mean", 0.1),  # without the factor 1 - 1/G
        ("outcome_plus_mean", "leave_one_out", 0.05),
        ("outcome_plus_mean", "group_mean", 0.05),
        ("outcome", "leave_one_out", 0.0),
        ("potential", "leave_one_out", 0.0),
        ("potential", "group_mean", 0.0),
    ],
)
def test_pleasing_the_judge_pays_up_to_the_price_in_success_that_the_docs_name(
    method: CreditMethod, kind: AdvantageKind, price: float
) -> None:
    # docs/judge.md: c g (1 - 1/G) (1 - w), c g / (2 n) and 0, with c = 0.1, g = 2, G = 4 and the first of n = 2 equal turns.
    def slope(cost: float) -> float:
        """The expected gradient, by the logit of pleasing at turn 0, of a policy that pleases in half of the episodes."""
        total = 0.0
        for group in itertools.product(itertools.product((True, False), (0.0, 1.0)), repeat=4):
            chance = 1.0
            for pleases, reward in group:
                success = 0.5 - cost / 2 if pleases else 0.5 + cost / 2
                chance *= 0.5 * (success if reward else 1 - success)
            members = [member(reward, 1.0 if pleases else -1.0, 0.0) for pleases, reward in group]
            turns = by_turn(members, method, kind=kind)
            total += chance * sum(
                turn[0] * (pleases - 0.5) for turn, (pleases, _) in zip(turns, group, strict=True)
            )
        return total

    assert slope(price - 0.005) > 0
    assert slope(price + 0.005) < 0


def test_a_potential_is_subtracted_from_the_turn_that_begins_there() -> None:
    members = [member(1.0, 1.0, None, 0.5, None), member(0.0, 0.0, 1.0, -0.5)]
    first, second = by_turn(members, "potential", 0.4)
    assert first == pytest.approx({0: 1.0, 1: 1 - 0.2 * 0.5, 2: 1.0, 3: 1 - 0.2 * 0.5})
    assert second == pytest.approx({0: -1.0, 1: -1 + 0.2 * 0.5, 2: -1.0})


SUCCESS = {(0, 0): 0.1, (0, 1): 0.3, (1, 0): 0.6, (1, 1): 0.9}
"""The chance to succeed by the choices of two turns, each of which is made with a chance of one half."""


def gradient_moments(
    method: CreditMethod, scores: tuple[float, float], coefficient: float
) -> tuple[list[float], float]:
    """The mean of the policy gradient of a group of three, and the sum of the variances of its parts.

    Its parts are the logits of the choice at turn 0, and of that at turn 1 after each of the two choices. `scores` are those of turn 0
    by the choice there.
    """
    mean, square = np.zeros(3), np.zeros(3)
    episodes = [(*choices, reward) for choices in SUCCESS for reward in (0.0, 1.0)]
    for group in itertools.product(episodes, repeat=3):
        chance, gradient = 1.0, np.zeros(3)
        members = [member(reward, scores[first], 0.3) for first, _, reward in group]
        for (first, second, reward), turns in zip(
            group, by_turn(members, method, coefficient, "group_mean"), strict=True
        ):
            success = SUCCESS[first, second]
            chance *= (success if reward else 1 - success) / 4
            gradient[0] += turns[0] * (first - 0.5)
            gradient[1 + first] += turns[1] * (second - 0.5)
        mean += chance * gradient
        square += chance * gradient**2
    return mean.tolist(), float((square - mean**2).sum())


@pytest.mark.parametrize("scores", [(1.0, -1.0), (-1.0, 1.0), (0.9, 0.8)])
def test_no_potential_changes_the_mean_of_the_gradient(scores: tuple[float, float]) -> None:
    expected, _ = gradient_moments("outcome", scores, 1.0)
    assert gradient_moments("potential", scores, 1.0)[0] == pytest.approx(expected, abs=1e-6)
    assert gradient_moments("outcome_then_steps", scores, 1.0)[0] != pytest.approx(expected, abs=1e-2)


def test_the_value_of_each_state_as_potential_lowers_the_variance_of_the_gradient() -> None:
    values = (2 * 0.2 - 1, 2 * 0.75 - 1)  # of the states after the two choices, as scores
    _, variance = gradient_moments("outcome", values, 1.0)
    assert gradient_moments("potential", values, 1.0)[1] < 0.9 * variance
    assert gradient_moments("potential", values[::-1], 1.0)[1] > variance, (
        "a judge that is wrong costs rollouts"
    )


def test_every_method_that_a_recipe_may_name_has_a_function() -> None:
    assert {*METHODS, *DISTILLING} == CREDITS.keys()
