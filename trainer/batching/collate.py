"""Makes the batch that a step trains from the groups that it has taken, and decides the fate of every member.

Episodes that are too long are filtered, or get a soft penalty before that. Both are of DAPO (arXiv 2503.14476); for agents the
filter is known as compact filtering (DeepSWE). Both act before the learner: the filter decides what a batch trains, the penalty
shapes the reward before the baseline of the group.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.journal.rows import Fate
from pipeline.trajectory import TrajectoryHead
from trainer.batching.batch import Batch, Sample
from trainer.batching.credit import CreditMeter, GradedMember, TokenAdvantages, token_advantages
from trainer.batching.samples import AlteredReply, check_provenance
from trainer.recipe import AdvantageKind, CreditRecipe, OverlongRecipe


@dataclass(frozen=True, slots=True)
class Overlong:
    """The recipe's rules for long episodes."""

    recipe: OverlongRecipe
    context_tokens: Callable[[str], int]  # the limit of an episode's context, by the id of its group

    def is_filtered(self, head: TrajectoryHead) -> bool:
        """Whether the episode ended at one of the limits whose trajectories the recipe excludes from training."""
        return head.outcome in {f"exhausted:{limit}" for limit in self.recipe.filter}

    def penalty(self, member: "GroupMember") -> float:
        """Returns the amount to subtract from the reward. It depends on the longest context that the policy saw."""
        if not self.recipe.penalty:
            return 0.0
        longest = max((sample.num_tokens for sample in member.samples), default=0)
        beyond = longest - (self.context_tokens(member.head.group_id) - self.recipe.buffer_tokens)
        return self.recipe.penalty * min(max(beyond / self.recipe.buffer_tokens, 0.0), 1.0)


ANY_LENGTH = Overlong(OverlongRecipe(), lambda group_id: 0)
"""No episode is too long."""


log = logging.getLogger("swerve.trainer")

OUTCOME = CreditRecipe(method="outcome")
"""No score moves an advantage."""


class GroupMember(Protocol):
    """A trajectory of a group."""

    @property
    def head(self) -> TrajectoryHead: ...

    @property
    def samples(self) -> tuple[Sample, ...]: ...

    @property
    def lag_from(self) -> int:
        """The oldest weight version in the trajectory."""
        ...

    @property
    def scores(self) -> Mapping[int, float] | None:
        """The judge's scores by turn; None: there is no judgement."""
        ...

    @property
    def logprobs(self) -> Mapping[int, npt.NDArray[np.float32]] | None:
        """A teacher's log-probs of the sampled tokens by turn; None: there is no judgement of a teacher."""
        ...


class ClosedGroup(Protocol):
    """A group that no longer changes."""

    @property
    def members(self) -> Mapping[int, GroupMember]: ...

    @property
    def rewards(self) -> Mapping[int, float]:
        """Rewards of the valid members, by number."""
        ...

    def fates(self, valid: Fate) -> dict[int, Fate]:
        """The fate of each member if the fate of the valid ones is `valid`."""
        ...


def make_batch(
    groups: Iterable[ClosedGroup],
    *,
    step: int,
    lag_of: Callable[[int], int],
    temperature: float,
    kind: AdvantageKind,
    credit: CreditRecipe = OUTCOME,
    overlong: Overlong = ANY_LENGTH,
    withhold_beyond: int | None,
) -> tuple[Batch, dict[str, Fate]]:
    """The batch that one step trains, and the fate of every member by request id.

    `lag_of` gives the lag of a weight version. A member more than `withhold_beyond` versions
    late is not trained, but its reward stays in its group's baseline. The same goes for one that is filtered as overlong, and for one
    whose samples are no longer what the engine sampled, by the digests of its replies, and under distillation for one without log-probs of
    the teacher.
    """
    samples: list[Sample] = []
    fates: dict[str, Fate] = {}
    trained: list[GroupMember] = []
    baseline_ids: list[str] = []
    meter = CreditMeter()
    for group in groups:
        graded = _graded(group, overlong)
        advantages = token_advantages(graded, kind, credit)
        outcomes = _outcomes(graded, kind)
        for number, fate in group.fates("trained").items():
            member = group.members[number]
            if fate == "trained":
                fate = _fate_of(member, lag_of, withhold_beyond, overlong)
            if fate == "trained" and credit.distills and member.logprobs is None:
                fate = "unjudged"
            fates[member.head.request_id] = fate
            if number in group.rewards and fate != "trained":
                baseline_ids.append(member.head.request_id)
            if fate == "trained":
                trained.append(member)
                samples += _with_advantages(member.samples, advantages[number])
                meter.add(graded[number], advantages[number], outcomes[number])
    lags = [lag_of(member.lag_from) for member in trained]
    batch = Batch(
        step=step,
        samples=tuple(samples),
        temperature=temperature,
        num_trajectories=len(trained),
        request_ids=tuple(member.head.request_id for member in trained),
        lag_max=max(lags, default=0),
        lag_mean=sum(lags) / len(lags) if lags else 0.0,
        baseline_ids=tuple(baseline_ids),
        lags={version: lag_of(version) for version in _versions_in(samples)},
        credit=meter.measures,
    )
    return batch, fates


def _versions_in(samples: Iterable[Sample]) -> set[int]:
    return {int(version) for sample in samples for version in np.unique(sample.versions_T[sample.trained_T])}


def _fate_of(
    member: GroupMember, lag_of: Callable[[int], int], withhold_beyond: int | None, overlong: Overlong
) -> Fate:
    """The fate of a valid member of a group that is trained."""
    if withhold_beyond is not None and lag_of(member.lag_from) > withhold_beyond:
        return "late"
    if overlong.is_filtered(member.head):
        return "overlong"
    return "trained" if _is_as_sampled(member) else "altered"


def _is_as_sampled(member: GroupMember) -> bool:
    """Checks a member once more before the learner, because its samples have waited in memory since intake made and checked them."""
    try:
        check_provenance(member.samples)
    except AlteredReply as error:
        log.error("%s rejected: invalid samples: %s", member.head.request_id, error)
        return False
    return True


def _graded(group: ClosedGroup, overlong: Overlong) -> dict[int, GradedMember]:
    """All valid members, including those that will be withheld: they count in the baseline."""
    graded: dict[int, GradedMember] = {}
    for number, reward in group.rewards.items():
        member = group.members[number]
        graded[number] = GradedMember(
            reward - overlong.penalty(member), member.samples, member.scores, member.logprobs
        )
    return graded


def _outcomes(graded: Mapping[int, GradedMember], kind: AdvantageKind) -> Mapping[int, TokenAdvantages]:
    """The advantages of each member without any score or teacher. One member alone has no baseline, so its outcome says nothing."""
    if len(graded) > 1:
        return token_advantages(graded, kind, OUTCOME)
    return {
        key: tuple(np.zeros(sample.num_tokens, np.float32) for sample in member.samples)
        for key, member in graded.items()
    }


def _with_advantages(samples: Sequence[Sample], advantages: TokenAdvantages) -> list[Sample]:
    return [
        replace(sample, advantages_T=advantages_T)
        for sample, advantages_T in zip(samples, advantages, strict=True)
    ]
