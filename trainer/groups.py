"""Groups from the first answer to the step that trains them. Pure bookkeeping: no Redis, no clock.

A group closes when every member is in; a failed one is in, without a reward. Valid members are those with a
reward whose tokens add up. Too few of them, or all worth the same, and the group is dropped. What remains
is ready, and the oldest asked for goes first.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pipeline.trajectory import TrajectoryHead
from trainer.admission import Admission
from trainer.advantages import advantages, has_signal
from trainer.batch import Batch, Sample
from trainer.journal import Fate
from trainer.recipe import AdvantageKind, Stragglers
from trainer.samples import with_advantage

_PREFIX = "g"

Lag = Callable[[int], int]
"""How far a weight version is behind the newest, as `Timeline.lag` says."""


def group_id_of(cursor: int) -> str:
    """The id of the run's group at `cursor`; sorts as cursors do."""
    return f"{_PREFIX}{cursor:08d}"


def cursor_of(group_id: str) -> int:
    """Inverse of `group_id_of`. Raises ValueError for anything else."""
    if not group_id.startswith(_PREFIX) or not group_id[1:].isdigit():
        raise ValueError(f"{group_id!r} is no group of a training run")
    return int(group_id[1:])


@dataclass(slots=True)
class Member:
    """One answer. `entries` are its stream entries: more than one only if it was delivered twice."""

    head: TrajectoryHead
    samples: tuple[Sample, ...]
    entries: list[str]
    fault: str = ""  # why its tokens must not reach the learner

    @property
    def is_valid(self) -> bool:
        return self.head.reward is not None and not self.fault

    @property
    def lag_from(self) -> int:
        """The oldest weights in it; without a sampled token, those it was asked for with."""
        return self.head.version_at_enqueue if self.head.version_first is None else self.head.version_first


@dataclass(slots=True)
class Group:
    cursor: int
    size: int
    asked_at_version: int
    members: dict[int, Member] = field(default_factory=dict[int, Member])

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.size

    @property
    def rewards(self) -> dict[int, float]:
        """Of the valid members."""
        found = {
            number: member.head.reward for number, member in sorted(self.members.items()) if member.is_valid
        }
        return {number: reward for number, reward in found.items() if reward is not None}

    def fates(self, valid: Fate) -> dict[int, Fate]:
        """What becomes of each member when the valid ones meet `valid`."""
        return {number: _fate(member, valid) for number, member in self.members.items()}


class GroupBook:
    """All groups asked for and not yet taken or dropped."""

    def __init__(
        self,
        admission: Admission,
        *,
        min_valid_members: int,
        stragglers: Stragglers,
        train_without_signal: bool = False,
    ) -> None:
        self._admission = admission
        self._min_valid_members = min_valid_members
        self._stragglers = stragglers
        self._train_without_signal = train_without_signal
        self._open: dict[int, Group] = {}
        self._ready: dict[int, Group] = {}

    @property
    def num_live(self) -> int:
        return len(self._open) + len(self._ready)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def needed(self) -> int:
        """The fewest answers that could make the next step's groups complete, if none is dropped."""
        short = self._admission.groups_per_step - len(self._ready)
        return sum(sorted(group.size - len(group.members) for group in self._open.values())[: max(0, short)])

    @property
    def end(self) -> int:
        """Above every cursor in the book."""
        return max([*self._open, *self._ready], default=-1) + 1

    def withdraw(self) -> list[Group]:
        """Give up every group that is left, for the run ends."""
        left = [*self._open.values(), *self._ready.values()]
        self._open.clear()
        self._ready.clear()
        return sorted(left, key=lambda group: group.cursor)

    def expect(self, cursor: int, *, size: int, version: int) -> Group:
        """A group has been asked for, or is found to have been; asking again changes nothing."""
        known = self._open.get(cursor) or self._ready.get(cursor)
        return known or self._open.setdefault(cursor, Group(cursor, size, version))

    def find(self, cursor: int, member: int) -> Member | None:
        group = self._open.get(cursor) or self._ready.get(cursor)
        return group.members.get(member) if group else None

    def hold(self, cursor: int, member: Member) -> Group | None:
        """Put an answer into its group. Returns the group if that completed it: `verdict` says what becomes
        of it.
        """
        head = member.head
        group = self.expect(cursor, size=head.group_size, version=head.version_at_enqueue)
        group.members[head.member] = member
        return group if group.is_complete else None

    def verdict(self, group: Group) -> Fate:
        """What becomes of a complete group: "trained", or the reason why not. Moves it to the ready ones,
        or out of the book.
        """
        del self._open[group.cursor]
        rewards = list(group.rewards.values())
        if len(rewards) < self._min_valid_members:
            return "too_few_valid"
        if not has_signal(rewards) and not self._train_without_signal:
            return "zero_variance"
        self._ready[group.cursor] = group
        return "trained"

    def take(self, lag_of: Lag) -> list[Group] | None:
        """The groups of the next step, oldest first; None while there are too few, or while one must be
        waited for.
        """
        chosen = sorted(self._ready)[: self._admission.groups_per_step]
        if len(chosen) < self._admission.groups_per_step or self._awaits_straggler(chosen, lag_of):
            return None
        return [self._ready.pop(cursor) for cursor in chosen]

    def _awaits_straggler(self, chosen: list[int], lag_of: Lag) -> bool:
        """Whether taking `chosen` would leave an older, unfinished group behind for longer than the lag
        allows.
        """
        if self._stragglers != "wait" or not any(cursor < chosen[-1] for cursor in self._open):
            return False
        rest = {
            **self._open,
            **{cursor: group for cursor, group in self._ready.items() if cursor not in chosen},
        }
        lags = sorted((lag_of(group.asked_at_version) for group in rest.values()), reverse=True)
        return not self._admission.punctual(lags)


def make_batch(
    groups: Iterable[Group],
    *,
    step: int,
    lag_of: Lag,
    temperature: float,
    kind: AdvantageKind,
    withhold_beyond: int | None,
) -> tuple[Batch, dict[str, Fate]]:
    """What one step trains, and the fate of every member by request id.

    A member more than `withhold_beyond` versions late keeps its reward in the baseline and trains nothing.
    """
    samples: list[Sample] = []
    fates: dict[str, Fate] = {}
    trained: list[Member] = []
    for group in groups:
        worth = advantages(group.rewards, kind)
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
                samples += [with_advantage(sample, worth[number]) for sample in member.samples]
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


def _fate(member: Member, valid: Fate) -> Fate:
    if member.head.reward is None:
        return "failed"
    return "refused" if member.fault else valid
