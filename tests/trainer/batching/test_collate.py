"""Batches: what a step trains of the groups that it took, and what becomes of each member."""

import pytest

from tests.trainer.trajectories import behind, member
from trainer.batching.collate import make_batch
from trainer.rollouts.groups import Group


def group(rewards: list[float | None], *, versions: list[int]) -> Group:
    members = {
        number: member(0, number, group_size=len(rewards), reward=reward, version=version)
        for number, (reward, version) in enumerate(zip(rewards, versions, strict=True))
    }
    return Group(0, len(rewards), 0, "t0", members)


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
