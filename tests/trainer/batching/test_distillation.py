"""Advantages from a teacher's log-probs: by hand, token by token, and never for a member that has none."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from pipeline.intervals import t_mean
from pipeline.journal.rows import Fate
from pipeline.trajectory import Trajectory, head_of
from tests.trainer.trajectories import behind, trajectory, turn
from trainer.batching.batch import Batch
from trainer.batching.collate import make_batch
from trainer.batching.samples import samples_of
from trainer.recipe import AdvantageKind, CreditMethod, CreditRecipe
from trainer.rollouts.admission import Admission
from trainer.rollouts.groups import Group, GroupBook, Member, MemberJudgement

# The policy's log-probs are -0.5. The context is cut before the last turn, so the samples are two.
TURNS = (turn([1, 2], [3, 4], kept=0), turn([5], [6], kept=4), turn([9], [7, 8], kept=2))
TAUGHT = {0: [-0.25, -2.5], 1: [-0.5], 2: [-1.0, 0.0]}
DISTILL = CreditRecipe(method="distill", coefficient=0.5)

Taught = Mapping[int, Sequence[float]] | None


def member(number: int, reward: float, taught: Taught, *, group: str = "g00000000") -> Member:
    made = trajectory(*TURNS)
    request = replace(made.claim.request, id=f"{group}.{number}", member=number, group_id=group)
    played: Trajectory = replace(
        made,
        claim=replace(made.claim, request=request),
        reward=replace(made.reward, value=reward) if made.reward else None,
    )
    samples = samples_of(played, vocab_size=100, max_tokens=64)
    return Member(head_of(played, 0), samples, entries=[], judgement=_judgement(taught))


def _judgement(taught: Taught) -> MemberJudgement | None:
    if taught is None:
        return MemberJudgement("failed", error="engine: no reply")
    logprobs: dict[int, npt.NDArray[np.float32]] = {
        number: np.array(one, np.float32) for number, one in taught.items()
    }
    return MemberJudgement("joined", logprobs=logprobs)


def group(*members: Member, cursor: int = 0) -> Group:
    return Group(cursor, len(members), 0, "t", dict(enumerate(members)))


def batch_of(
    groups: Sequence[Group], credit: CreditRecipe = DISTILL, kind: AdvantageKind = "leave_one_out"
) -> tuple[Batch, dict[str, Fate]]:
    return make_batch(
        groups,
        step=1,
        lag_of=behind(3),
        temperature=1.0,
        kind=kind,
        credit=credit,
        withhold_beyond=None,
    )


def advantages(batch: Batch, request_id: str) -> dict[int, list[float]]:
    """The advantages of the tokens of each turn of a trajectory."""
    return {
        reply.turn: sample.advantages_T[reply.start : reply.end].tolist()
        for sample in batch.samples
        if sample.request_id == request_id
        for reply in sample.replies
    }


def test_the_advantage_of_a_token_is_what_the_teachers_log_prob_exceeds_the_policys_by() -> None:
    batch, fates = batch_of([group(member(0, 1.0, TAUGHT), member(1, 0.0, TAUGHT))])
    # c = 0.5, and log p = -0.5 for every token; the reward has no part in it
    expected = {0: [0.125, -1.0], 1: [0.0], 2: [-0.25, 0.25]}
    assert advantages(batch, "g00000000.0") == advantages(batch, "g00000000.1") == expected
    assert {*fates.values()} == {"trained"}
    for sample in batch.samples:
        assert not sample.advantages_T[~sample.trained_T].any(), "what was fed has no advantage"
        assert sample.advantages_T.dtype == np.float32
    assert len(batch.samples) == 4, "each trajectory was cut once"


def test_the_outcome_is_added_where_the_recipe_asks_for_both() -> None:
    credit = CreditRecipe(method="outcome_plus_distill", coefficient=0.5)
    batch, _ = batch_of([group(member(0, 1.0, TAUGHT), member(1, 0.0, TAUGHT))], credit)
    assert advantages(batch, "g00000000.0") == {0: [1.125, 0.0], 1: [1.0], 2: [0.75, 1.25]}
    assert advantages(batch, "g00000000.1") == {0: [-0.875, -2.0], 1: [-1.0], 2: [-1.25, -0.75]}


@pytest.mark.parametrize("method", ["distill", "outcome_plus_distill"])
def test_a_member_without_log_probs_is_left_out_and_has_a_fate(method: CreditMethod) -> None:
    groups = [group(member(0, 1.0, TAUGHT), member(1, 0.0, None), member(2, 0.0, TAUGHT))]
    batch, fates = batch_of(groups, CreditRecipe(method=method, coefficient=0.5))
    assert fates == {"g00000000.0": "trained", "g00000000.1": "unjudged", "g00000000.2": "trained"}
    assert {sample.request_id for sample in batch.samples} == {"g00000000.0", "g00000000.2"}
    assert batch.baseline_ids == ("g00000000.1",)
    assert batch.credit.num_taught == 2
    if method == "outcome_plus_distill":
        assert advantages(batch, "g00000000.0")[1] == [1.0], "its reward still counts in the baseline"


def test_a_batch_without_any_log_prob_trains_nothing() -> None:
    batch, fates = batch_of([group(member(0, 1.0, None), member(1, 0.0, None))])
    assert (batch.samples, {*fates.values()}) == ((), {"unjudged"})
    assert batch.credit.reverse_kl is None


def test_the_same_member_is_trained_where_no_teacher_is_asked_for() -> None:
    _, fates = batch_of([group(member(0, 1.0, None), member(1, 0.0, None))], CreditRecipe())
    assert {*fates.values()} == {"trained"}


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_group_of_equal_rewards_is_trained_by_a_teacher_and_not_by_the_outcome(reward: float) -> None:
    admission = Admission(max_lag_versions=4, groups_per_step=1, num_steps=10)
    for trains_without_signal, verdict in ((True, "trained"), (False, "zero_variance")):
        book = GroupBook(
            admission,
            min_valid_of=lambda size: 2,
            stragglers="wait",
            train_without_signal=trains_without_signal,
        )
        made = [replace_size(member(number, reward, TAUGHT), 2) for number in range(2)]
        assert book.hold(0, made[0]) is None
        complete = book.hold(0, made[1])
        assert complete is not None
        assert book.verdict(complete) == verdict
    batch, _ = batch_of([group(*made)])
    assert advantages(batch, "g00000000.0") == {0: [0.125, -1.0], 1: [0.0], 2: [-0.25, 0.25]}


def replace_size(one: Member, size: int) -> Member:
    one.head = replace(one.head, group_size=size)
    return one


@pytest.mark.parametrize("kind", ["leave_one_out", "group_mean", "group_mean_std"])
def test_a_group_of_one_is_taught_because_no_baseline_is_needed(kind: AdvantageKind) -> None:
    batch, fates = batch_of([group(member(0, 1.0, TAUGHT))], kind=kind)
    assert fates == {"g00000000.0": "trained"}
    assert advantages(batch, "g00000000.0") == {0: [0.125, -1.0], 1: [0.0], 2: [-0.25, 0.25]}
    assert batch.credit.outcome_size == 0.0


def test_the_reverse_kl_is_the_mean_over_taught_tokens_with_groups_as_draws() -> None:
    far = {0: [-3.0, -3.0], 1: [-1.0], 2: [-2.0, -2.0]}
    names = ("g00000000", "g00000001")
    groups = [
        group(*(member(n, 0.0, taught, group=name) for n in range(2)), cursor=cursor)
        for cursor, (name, taught) in enumerate(zip(names, (TAUGHT, far), strict=True))
    ]
    batch, _ = batch_of(groups)
    per_token = [
        [-0.5 - value for taught in (one, one) for values in taught.values() for value in values]
        for one in (TAUGHT, far)
    ]
    expected = t_mean(per_token)
    assert expected is not None
    assert batch.credit.reverse_kl is not None
    assert batch.credit.reverse_kl.value == pytest.approx(expected.value)
    assert batch.credit.reverse_kl.low == pytest.approx(expected.low)
    assert batch.credit.reverse_kl.high == pytest.approx(expected.high)
    assert (batch.credit.num_taught, batch.credit.num_taught_tokens) == (4, 20)
