"""Episodes that are too long: what is left out of a batch, and what their rewards count."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pipeline.journal.rows import Fate
from tests.trainer.trajectories import behind, member
from trainer.batching.batch import Batch
from trainer.batching.collate import Overlong, make_batch
from trainer.recipe import OverlongRecipe
from trainer.rollouts.groups import Group, Member

CONTEXT_TOKENS = 100


def played(number: int, reward: float, *, outcome: str = "submitted", num_tokens: int = 3) -> Member:
    made = member(0, number, group_size=3, reward=reward)
    head = msgspec.structs.replace(made.head, outcome=outcome)
    (sample,) = made.samples
    padding = num_tokens - sample.num_tokens
    longer = replace(
        sample,
        tokens_T=np.pad(sample.tokens_T, (0, padding)),
        trained_T=np.pad(sample.trained_T, (0, padding)),
        behaviour_logprobs_T=np.pad(sample.behaviour_logprobs_T, (0, padding)),
        advantages_T=np.zeros(num_tokens, np.float32),
        versions_T=np.pad(sample.versions_T, (0, padding), constant_values=-1),
    )
    return replace(made, head=head, samples=(longer,))


def batch_of(members: list[Member], recipe: OverlongRecipe) -> tuple[Batch, dict[str, Fate]]:
    return make_batch(
        [Group(0, len(members), 0, "t0", dict(enumerate(members)))],
        step=1,
        lag_of=behind(0),
        temperature=1.0,
        kind="leave_one_out",
        overlong=Overlong(recipe, lambda group_id: CONTEXT_TOKENS),
        withhold_beyond=None,
    )


def test_a_trajectory_that_a_filtered_limit_ended_counts_in_the_baseline_only() -> None:
    members = [played(0, 1.0), played(1, 0.0), played(2, 0.0, outcome="exhausted:context")]
    batch, fates = batch_of(members, OverlongRecipe(filter=("turns", "context")))
    assert fates == {"r0.0": "trained", "r0.1": "trained", "r0.2": "overlong"}
    assert (batch.request_ids, batch.baseline_ids) == (("r0.0", "r0.1"), ("r0.2",))
    assert [sample.advantages_T[1] for sample in batch.samples] == pytest.approx([1.0, -0.5])
    for other in (OverlongRecipe(), OverlongRecipe(filter=("wall_s",))):
        assert batch_of(members, other)[1]["r0.2"] == "trained"


def test_a_step_of_filtered_trajectories_only_has_nothing_to_train() -> None:
    members = [played(number, float(number % 2), outcome="exhausted:turns") for number in range(3)]
    batch, _ = batch_of(members, OverlongRecipe(filter=("turns",)))
    assert batch.num_trained_tokens == 0
    assert batch.baseline_ids == ("r0.0", "r0.1", "r0.2")


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(79, 0.0), (80, 0.0), (85, 0.125), (100, 0.5), (120, 0.5)]
)
def test_the_penalty_grows_over_the_last_tokens_of_the_context(num_tokens: int, penalty: float) -> None:
    recipe = OverlongRecipe(penalty=0.5, buffer_tokens=20)
    members = [played(0, 1.0, num_tokens=num_tokens), played(1, 0.0), played(2, 0.0)]
    batch, _ = batch_of(members, recipe)
    assert [sample.advantages_T[1] for sample in batch.samples] == pytest.approx(
        [1 - penalty, (penalty - 1) / 2, (penalty - 1) / 2]
    )
    assert members[0].head.reward == 1.0, "the reward itself stays what the grader said"


def test_the_limit_of_the_context_is_that_of_the_group() -> None:
    groups = [
        Group(
            cursor,
            2,
            0,
            "t0",
            {
                number: replace(one, head=msgspec.structs.replace(one.head, group_id=f"g{cursor}"))
                for number, one in enumerate([played(0, 1.0, num_tokens=90), played(1, 0.0)])
            },
        )
        for cursor in (0, 1)
    ]
    limits = {"g0": 100, "g1": 200}
    batch, _ = make_batch(
        groups,
        step=1,
        lag_of=behind(0),
        temperature=1.0,
        kind="leave_one_out",
        overlong=Overlong(OverlongRecipe(penalty=0.5, buffer_tokens=20), limits.__getitem__),
        withhold_beyond=None,
    )
    assert [batch.samples[place].advantages_T[1] for place in (0, 2)] == pytest.approx([0.75, 1.0])


def test_of_a_trajectory_whose_context_was_cut_the_longest_context_is_penalised() -> None:
    first, second = (played(0, 1.0, num_tokens=num_tokens).samples[0] for num_tokens in (60, 85))
    members = [
        replace(played(0, 1.0), samples=(first, replace(second, branch=1))),
        played(1, 0.0),
        played(2, 0.0),
    ]
    batch, _ = batch_of(members, OverlongRecipe(penalty=0.5, buffer_tokens=20))
    assert batch.samples[0].advantages_T[1] == pytest.approx(1 - 0.125)


def test_without_a_penalty_no_length_matters() -> None:
    members = [played(0, 1.0, num_tokens=100), played(1, 0.0)]
    batch, _ = batch_of(members, OverlongRecipe())
    assert [sample.advantages_T[1] for sample in batch.samples] == [1.0, -1.0]
