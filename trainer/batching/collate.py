"""The groups that a step has taken → the batch that it trains, and what becomes of every member."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from pipeline.trajectory import TrajectoryHead
from trainer.batching.batch import Batch, Sample
from trainer.batching.credit import GradedMember, TokenAdvantages, token_advantages
from trainer.batching.credit_measures import CreditMeter
from trainer.batching.overlong import ANY_LENGTH, Overlong
from trainer.batching.provenance import AlteredReply, check_provenance
from trainer.recipe import AdvantageKind, CreditRecipe
from trainer.records.journal import Fate

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
        """The oldest weight version in it."""
        ...

    @property
    def scores(self) -> Mapping[int, float] | None:
        """The judge's, by turn; None: there is no judgement."""
        ...


class ClosedGroup(Protocol):
    """A group to which nothing is added any more."""

    @property
    def members(self) -> Mapping[int, GroupMember]: ...

    @property
    def rewards(self) -> Mapping[int, float]:
        """Of the valid members."""
        ...

    def fates(self, valid: Fate) -> dict[int, Fate]:
        """What becomes of each member if the valid ones meet `valid`."""
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
    """What one step trains, and the fate of every member by request id.

    `lag_of` says how many versions a weight version is behind the newest. A member more than `withhold_beyond` versions
    late is not trained, but its reward stays in its group's baseline. The same goes for one that is filtered as overlong, and for one
    whose samples are no longer what the engine sampled, by the digests of its replies.
    """
    samples: list[Sample] = []
    fates: dict[str, Fate] = {}
    trained: list[GroupMember] = []
    baseline_ids: list[str] = []
    meter = CreditMeter()
    for group in groups:
        graded = _graded(group, overlong)
        advantages = token_advantages(graded, kind, credit)
        outcomes = token_advantages(graded, kind, OUTCOME)
        for number, fate in group.fates("trained").items():
            member = group.members[number]
            if fate == "trained":
                fate = _fate_of(member, lag_of, withhold_beyond, overlong)
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
    """What becomes of a valid member of a group that is trained."""
    if withhold_beyond is not None and lag_of(member.lag_from) > withhold_beyond:
        return "late"
    if overlong.is_filtered(member.head):
        return "overlong"
    return "trained" if _is_as_sampled(member) else "altered"


def _is_as_sampled(member: GroupMember) -> bool:
    """The last look before the learner: the samples have waited in memory since intake made and checked them."""
    try:
        check_provenance(member.samples)
    except AlteredReply as error:
        log.error("%s rejected: invalid samples: %s", member.head.request_id, error)
        return False
    return True


def _graded(group: ClosedGroup, overlong: Overlong) -> dict[int, GradedMember]:
    """All valid members, those that will be withheld included: they count in the baseline."""
    graded: dict[int, GradedMember] = {}
    for number, reward in group.rewards.items():
        member = group.members[number]
        graded[number] = GradedMember(
            reward - overlong.penalty(member.samples), member.samples, member.scores
        )
    return graded


def _with_advantages(samples: Sequence[Sample], advantages: TokenAdvantages) -> list[Sample]:
    return [
        replace(sample, advantages_T=advantages_T)
        for sample, advantages_T in zip(samples, advantages, strict=True)
    ]
