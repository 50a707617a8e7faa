"""Who gets trained: the share of each kind of rollout among those that were asked for, finished and trained, and among the trained tokens.

A recipe that drops late, long or failed rollouts trains on other tasks than it asks for. The ratio of two shares says by how much: with
0.5, a kind is trained half as often as it is asked for.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from pipeline.intervals import Estimate, RatioOfShares
from pipeline.journal.rows import EpisodeFacts

Kind = Literal["task", "length", "difficulty", "outcome"]
KINDS: tuple[Kind, ...] = ("task", "length", "difficulty", "outcome")
_DIFFICULTIES = (
    (0.0, "never solved"),
    (0.25, "rarely"),
    (0.75, "sometimes"),
    (math.nextafter(1, 0), "often"),
)
_ORDER = (*(word for _, word in _DIFFICULTIES), "always", "not known")
WITHOUT_SIGNAL = ("never solved", "always", "not known")
"""Difficulties of tasks whose groups have nothing to teach, so that they are rarely trained by design."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """The settled training rollouts of one kind."""

    name: str
    asked: int  # rollouts that were asked for
    finished: int  # of these, rollouts that have a reward
    trained: int
    sampled_tokens: int  # of the trained rollouts
    # The share among the trained rollouts over the share among those asked for, with its 95 % interval, groups being the draws; None:
    # nothing was trained.
    ratio: Estimate | None
    # The share among the sampled tokens of trained rollouts over the share among the sampled tokens of all.
    token_ratio: Estimate | None
    reasons: dict[str, int]  # the number of rollouts that were not trained, by fate

    @property
    def is_rarer(self) -> bool:
        """Whether the kind is trained less often than it is asked for, beyond chance."""
        return self.ratio is not None and self.ratio.high < 1


class Representation(msgspec.Struct, frozen=True, kw_only=True):
    num_asked: int
    num_finished: int
    num_trained: int
    by: dict[Kind, tuple[Bucket, ...]]
    reasons: dict[str, int]

    @property
    def warnings(self) -> list[str]:
        """One sentence for each length and difficulty that is trained less often than it is asked for, beyond chance."""
        found = [("rollouts of", "sampled tokens", one) for one in self.by["length"] if one.is_rarer]
        found += [
            ("rollouts of tasks solved", "", one)
            for one in self.by["difficulty"]
            if one.is_rarer and one.name not in WITHOUT_SIGNAL
        ]
        return [
            f"{what} {one.name}{unit and f' {unit}'} are trained {one.ratio.plain('.2f')} times as often as they are asked for"
            for what, unit, one in found
            if one.ratio is not None
        ]


def represented(rows: Iterable[EpisodeFacts]) -> Representation:
    """The representation among the settled training rollouts. A task's difficulty goes by its success over the whole run."""
    episodes = [one for one in rows if one.purpose == "train" and one.fate]
    of_task: dict[str, list[EpisodeFacts]] = defaultdict(list)
    for one in episodes:
        of_task[one.task_id].append(one)
    difficulties = {task_id: difficulty(mean_reward(found)) for task_id, found in of_task.items()}
    kinds: dict[Kind, Callable[[EpisodeFacts], str]] = {
        "task": lambda one: one.task_id,
        "length": lambda one: length_of(one.sampled_tokens),
        "difficulty": lambda one: difficulties[one.task_id],
        "outcome": lambda one: one.outcome or "withdrawn",
    }
    totals = _Totals(*map(RatioOfShares, _by_group(episodes)))
    return Representation(
        num_asked=len(episodes),
        num_finished=sum(one.reward is not None for one in episodes),
        num_trained=sum(one.fate == "trained" for one in episodes),
        by={kind: _buckets(episodes, kinds[kind], totals) for kind in KINDS},
        reasons=_reasons(episodes),
    )


def mean_reward(episodes: Iterable[EpisodeFacts]) -> float | None:
    """The mean reward of the episodes that have one; None: none has. It is infinite if the sum is."""
    rewards = [one.reward for one in episodes if one.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def length_of(sampled_tokens: int) -> str:
    """The range of powers of two that contains the length, so that short and long rollouts are resolved equally well."""
    if sampled_tokens < 1:
        return "0"
    first = 1 << (sampled_tokens.bit_length() - 1)
    return f"{first}-{2 * first - 1}"


def difficulty(success: float | None) -> str:
    """A word for the mean reward of a task."""
    if success is None:
        return "not known"
    return next((word for most, word in _DIFFICULTIES if success <= most), "always")


@dataclass(frozen=True, slots=True)
class _Totals:
    """What is divided among the kinds, by group: trained rollouts and those that were asked for; sampled tokens of both."""

    rollouts: RatioOfShares
    tokens: RatioOfShares


_Pair = tuple[float, float]


def _by_group(episodes: Iterable[EpisodeFacts]) -> tuple[dict[str, _Pair], dict[str, _Pair]]:
    """The trained part and the whole of the rollouts, and of their sampled tokens."""
    rollouts: dict[str, _Pair] = {}
    tokens: dict[str, _Pair] = {}
    for one in episodes:
        is_trained = one.fate == "trained"
        for found, amount in ((rollouts, 1), (tokens, one.sampled_tokens)):
            trained, asked = found.get(one.group_id, (0, 0))
            found[one.group_id] = (trained + is_trained * amount, asked + amount)
    return rollouts, tokens


def _buckets(
    episodes: Iterable[EpisodeFacts], name_of: Callable[[EpisodeFacts], str], totals: _Totals
) -> tuple[Bucket, ...]:
    of_bucket: dict[str, list[EpisodeFacts]] = defaultdict(list)
    for one in episodes:
        of_bucket[name_of(one)].append(one)
    return tuple(_bucket(name, of_bucket[name], totals) for name in sorted(of_bucket, key=_place))


def _bucket(name: str, episodes: Sequence[EpisodeFacts], totals: _Totals) -> Bucket:
    rollouts, tokens = _by_group(episodes)
    return Bucket(
        name=name,
        asked=len(episodes),
        finished=sum(one.reward is not None for one in episodes),
        trained=sum(one.fate == "trained" for one in episodes),
        sampled_tokens=sum(one.sampled_tokens for one in episodes if one.fate == "trained"),
        ratio=totals.rollouts.of(rollouts),
        token_ratio=totals.tokens.of(tokens),
        reasons=_reasons(episodes),
    )


def _reasons(episodes: Iterable[EpisodeFacts]) -> dict[str, int]:
    return dict(Counter(one.fate for one in episodes if one.fate != "trained"))


def _place(name: str) -> tuple[int, str]:
    """The sort key: lengths and difficulties from smallest to largest, everything else by name."""
    if name in _ORDER:
        return _ORDER.index(name), ""
    first = name.partition("-")[0]
    return (int(first), "") if first.isdecimal() else (0, name)
