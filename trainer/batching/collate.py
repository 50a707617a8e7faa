"""The groups that a step has taken → the batch that it trains, and what becomes of every member."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from pipeline.trajectory import TrajectoryHead
from trainer.batching.advantages import GradedMember, TokenAdvantages, token_advantages
from trainer.batching.batch import Batch, Sample
from trainer.recipe import AdvantageKind
from trainer.records.journal import Fate


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
    withhold_beyond: int | None,
) -> tuple[Batch, dict[str, Fate]]:
    """What one step trains, and the fate of every member by request id.

    `lag_of` says how many versions a weight version is behind the newest. A member more than `withhold_beyond` versions
    late is not trained, but its reward stays in its group's baseline.
    """
    samples: list[Sample] = []
    fates: dict[str, Fate] = {}
    trained: list[GroupMember] = []
    for group in groups:
        advantages = _advantages_of(group, kind)
        for number, fate in group.fates("trained").items():
            member = group.members[number]
            if (
                fate == "trained"
                and withhold_beyond is not None
                and lag_of(member.lag_from) > withhold_beyond
            ):
                fate = "late"
            fates[member.head.request_id] = fate
            if fate == "trained":
                trained.append(member)
                samples += _with_advantages(member.samples, advantages[number])
    lags = [lag_of(member.lag_from) for member in trained]
    batch = Batch(
        step=step,
        samples=tuple(samples),
        temperature=temperature,
        num_trajectories=len(trained),
        request_ids=tuple(member.head.request_id for member in trained),
        lag_max=max(lags, default=0),
        lag_mean=sum(lags) / len(lags) if lags else 0.0,
    )
    return batch, fates


def _advantages_of(group: ClosedGroup, kind: AdvantageKind) -> dict[int, TokenAdvantages]:
    """Of all valid members, those that will be withheld included: they count in the baseline."""
    graded = {
        number: GradedMember(reward, group.members[number].samples)
        for number, reward in group.rewards.items()
    }
    return token_advantages(graded, kind)


def _with_advantages(samples: Sequence[Sample], advantages: TokenAdvantages) -> list[Sample]:
    return [
        replace(sample, advantages_T=advantages_T)
        for sample, advantages_T in zip(samples, advantages, strict=True)
    ]
