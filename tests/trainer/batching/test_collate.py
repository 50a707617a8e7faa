"""Batches: what a step trains of the groups that it took, and what becomes of each member."""

import pytest

from tests.trainer.trajectories import behind, joined, member
from trainer.batching.batch import Batch, CreditMeasures
from trainer.batching.collate import make_batch
from trainer.recipe import CreditRecipe
from trainer.rollouts.groups import Group


def group(rewards: list[float | None], *, versions: list[int], cursor: int = 0) -> Group:
    members = {
        number: member(cursor, number, group_size=len(rewards), reward=reward, version=version)
        for number, (reward, version) in enumerate(zip(rewards, versions, strict=True))
    }
    return Group(cursor, len(rewards), 0, f"t{cursor}", members)


def test_a_batch_trains_valid_members_with_their_advantage_and_states_its_lag() -> None:
    batch, fates = make_batch(
        [group([1.0, 0.0, None], versions=[2, 2, 2])],
        step=5,
        lag_of=behind(4),
        temperature=1.0,
        kind="leave_one_out",
        withhold_beyond=None,
    )
    assert batch.request_ids == ("r0.0", "r0.1")
    assert [sample.advantages_T.tolist() for sample in batch.samples] == [[0, 1, 1], [0, -1, -1]]
    assert (batch.lag_max, batch.lag_mean, batch.num_trajectories) == (2, 2.0, 2)
    assert fates == {"r0.0": "trained", "r0.1": "trained", "r0.2": "failed"}
    assert batch.num_replies == 2
    assert batch.lags == {2: 2}


def test_groups_of_several_sizes_in_one_batch_have_each_its_own_baseline() -> None:
    small = group([1.0, 0.0, 0.0, 0.0], versions=[0] * 4)
    large = group([1.0, 1.0, *[0.0] * 6], versions=[0] * 8, cursor=1)
    for kind, expected in {
        "leave_one_out": [1, *[-1 / 3] * 3, *[6 / 7] * 2, *[-2 / 7] * 6],
        "group_mean": [3 / 4, *[-1 / 4] * 3, *[3 / 4] * 2, *[-1 / 4] * 6],
    }.items():
        batch, _ = make_batch(
            [small, large],
            step=1,
            lag_of=behind(0),
            temperature=1.0,
            kind="group_mean" if kind == "group_mean" else "leave_one_out",
            withhold_beyond=None,
        )
        assert batch.num_trajectories == 12
        assert [sample.advantages_T[1] for sample in batch.samples] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1.0, 0.0], [-1.0]),
        ([1.0, 0.0, 0.0], [-0.5, -0.5]),  # without the withheld member's reward both would have 0
        ([0.0, 1.0, 1.0, 0.0], [2 / 3, 2 / 3, -2 / 3]),  # without it: 0.5, 0.5 and -1
    ],
)
def test_a_withheld_member_keeps_its_say_in_the_baseline(
    rewards: list[float | None], advantages: list[float]
) -> None:
    size = len(rewards)
    batch, fates = make_batch(
        [group(rewards, versions=[0, *[3] * (size - 1)])],
        step=1,
        lag_of=behind(4),
        temperature=1.0,
        kind="leave_one_out",
        withhold_beyond=2,
    )
    assert fates == {"r0.0": "late"} | {f"r0.{number}": "trained" for number in range(1, size)}
    assert [sample.advantages_T[1] for sample in batch.samples] == pytest.approx(advantages)
    assert batch.lag_max == 1


@pytest.mark.parametrize(("version", "fate"), [(1, "late"), (2, "trained")])
def test_a_member_is_withheld_beyond_the_allowed_lag_and_not_at_it(version: int, fate: str) -> None:
    _, fates = make_batch(
        [group([1.0, 0.0], versions=[version, 4])],
        step=1,
        lag_of=behind(4),
        temperature=1.0,
        kind="leave_one_out",
        withhold_beyond=2,
    )
    assert fates == {"r0.0": fate, "r0.1": "trained"}


def test_a_member_whose_samples_changed_in_memory_is_not_trained() -> None:
    changed = group([1.0, 0.0, 0.0], versions=[0, 0, 0])
    changed.members[1].samples[0].tokens_T[2] += 1
    batch, fates = make_batch(
        [changed],
        step=1,
        lag_of=behind(0),
        temperature=1.0,
        kind="leave_one_out",
        withhold_beyond=None,
    )
    assert fates == {"r0.0": "trained", "r0.1": "altered", "r0.2": "trained"}
    assert [sample.advantages_T[1] for sample in batch.samples] == [1.0, -0.5]


def scored(rewards: list[float | None], scores: list[dict[int, float] | None]) -> Group:
    made = group(rewards, versions=[0] * len(rewards))
    for number, given in enumerate(scores):
        made.members[number].judgement = None if given is None else joined(given)
    return made


def credited(made: Group, credit: CreditRecipe) -> Batch:
    batch, _ = make_batch(
        [made],
        step=1,
        lag_of=behind(0),
        temperature=1.0,
        kind="leave_one_out",
        credit=credit,
        withhold_beyond=None,
    )
    return batch


def test_a_batch_says_how_many_members_were_judged_and_how_far_scores_moved_its_advantages() -> None:
    made = scored([1.0, 0.0, 0.0], [{0: 1.0}, {0: -0.5}, None])
    batch = credited(made, CreditRecipe(method="outcome_plus_mean", coefficient=0.4))
    # With 0.2 * score added, rewards are 1.2, -0.1 and 0, and so the advantages 1.25, -0.7 and -0.55 instead of 1, -0.5, -0.5.
    assert [sample.advantages_T[1] for sample in batch.samples] == pytest.approx([1.25, -0.7, -0.55])
    assert batch.credit == CreditMeasures(
        num_judged=2,
        num_scored=2,
        num_scored_replies=2,
        score_mean=0.25,
        outcome_size=pytest.approx(2 / 3),
        process_size=pytest.approx(0.5 / 3),
    )


def test_scores_are_measured_before_they_are_trained_on() -> None:
    rewards, scores = [1.0, 0.0, 0.0], [{0: 1.0}, {}, None]
    judged, bare = scored(rewards, scores), scored(rewards, [None] * 3)
    batch = credited(judged, CreditRecipe(method="outcome_then_steps", coefficient=0.0))
    without = credited(bare, CreditRecipe())
    assert (batch.credit.num_judged, batch.credit.num_scored) == (2, 1), "one of them has no score"
    assert (batch.credit.score_mean, batch.credit.process_size) == (1.0, 0.0)
    pairs = zip(batch.samples, without.samples, strict=True)
    assert all(one.advantages_T.tobytes() == other.advantages_T.tobytes() for one, other in pairs)
