"""Chooses the source of each group, by the shares of the sources, its task: all in turn, or more often those whose groups are likely to
teach something, and its size.

A group teaches something only if its rewards differ. If a policy solves a task with probability p, a group of n members has such a signal
with probability 1 - p^n - (1-p)^n: nearly always for p around one half, never for a task that is always or never solved. `Curriculum` draws
tasks by this number.

p is estimated as in the Rasch model (Probabilistic Models for Some Intelligence and Attainment Tests, 1960): its log odds are the policy's
ability plus the task's ease, which both have a normal distribution. Each episode updates both, as in Glicko (Glickman, Applied Statistics
48, 1999). So the episodes of one task also say something about all others: a policy that has learned solves more of the tasks that it has
not tried again. The distributions widen with every other episode, because the policy changes in more ways than its ability.

To draw a task, every ease is drawn from its distribution (Thompson sampling, Biometrika 1933). So tasks of which little is known are tried
now and then, and a share of the groups follows the plain order, so that no task is forgotten, whatever its rewards were.

Episodes that fail have no reward, so a task whose image is broken would look new for ever. The probability that a group of a task has
rewards at all is drawn as well: from Beta(1, k) after k groups in a row in which no episode had one, and 1 if k is 0.

`Curriculum.size` gives easy and hard tasks larger groups, if the recipe allows that.

The evidence is a function of the journal's episode rows in their order, so a resumed run begins with that of its checkpoint, bit for bit. A
draw is a function of seed, cursor and evidence, and of the tasks that are in quarantine or have an open group. A group that is open at the
checkpoint keeps its task and its size.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.journal.rows import EpisodeRow
from trainer.recipe import CurriculumRecipe, Recipe
from trainer.rollouts.groups import cursor_of

EASE_VARIANCE = 16.0
"""The variance of a task's ease before its first episode, in logits squared: most tasks are nearly always or nearly never solved."""

ABILITY_VARIANCE = 1.0
"""The variance of the policy's ability before the first episode, and the largest later on, in logits squared."""

ABILITY_DRIFT = 0.001
"""The variance of the ability that each episode adds, in logits squared."""


Rate = TypeVar("Rate", float, npt.NDArray[np.float64])
"""A probability of success, or one for each of several tasks."""


def signal(rate: Rate, num_members: int) -> Rate:
    """The probability that the rewards of a group differ, for a task that is solved with the probability `rate`."""
    return 1 - rate**num_members - (1 - rate) ** num_members


def fitting_size(rate: float, sizes: range, *, share: float) -> int:
    """The number of members of a group, one of `sizes`, for a task that is solved with the probability p = `rate`.

    It is the smallest number with which the rewards differ with the probability `share`. If the largest number is too small for that, it
    is the largest number as long as no more episodes than that are expected until two rewards differ, otherwise the smallest. The expected
    number is 1 / (p (1 - p)) - 1: the first episode succeeds with probability p, and then the first failure comes after 1 / (1 - p) more,
    otherwise the first success after 1 / p more. Beyond it, about a third or more of the largest groups have no signal either. Members are
    then better spent on further groups: (1 - p^n - (1-p)^n) / n, the signals per episode, never rises with n from 2 on.
    """
    found = bisect_left(sizes, share, key=lambda size: signal(rate, size))
    if found < len(sizes):
        return sizes[found]
    return sizes[-1] if (sizes[-1] + 1) * rate * (1 - rate) >= 1 else sizes[0]


class TaskOrder:
    """The ids of all tasks once per epoch, in a new random order each time. Raises ValueError if there are none."""

    def __init__(self, task_ids: Sequence[str], *, seed: int) -> None:
        if not task_ids:
            raise ValueError("tasks.train holds no task; give a file with at least one")
        self.task_ids = task_ids
        self._seed = seed

    def __getitem__(self, cursor: int) -> str:
        num_tasks = len(self.task_ids)
        epoch, place = divmod(cursor, num_tasks)
        return self.task_ids[int(np.random.default_rng((self._seed, epoch)).permutation(num_tasks)[place])]


class SourceOrder:
    """The source of each group. Of the first n groups, each source has less than one group more or fewer than n times its share.

    This is Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980), in whole numbers: of the sources that
    are owed a group, or enough of one, the next group goes to the one that would exceed the bound first. It depends on names and shares
    only, and repeats once each source has as many groups as its share in whole numbers.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        exact = {name: Fraction(str(share)) for name, share in sorted(shares.items())}
        whole = math.lcm(*(share.denominator for share in exact.values()))
        self._weights = {name: int(share * whole) for name, share in exact.items()}
        self._total = sum(self._weights.values())
        self._places: list[tuple[str, int]] = []  # of the first round, as far as it is known
        self._numbers = dict.fromkeys(self._weights, 0)  # groups of each source in `_places`

    def __getitem__(self, cursor: int) -> tuple[str, int]:
        """The name of the source of the group at `cursor`, and the number of groups of that source before it."""
        num_rounds, place = divmod(cursor, self._total)
        while len(self._places) <= place:
            name = self._next()
            self._places.append((name, self._numbers[name]))
            self._numbers[name] += 1
        name, number = self._places[place]
        return name, num_rounds * self._weights[name] + number

    def _next(self) -> str:
        number, parts = len(self._places) + 1, max(2 * len(self._weights) - 2, 1)
        # The groups that each source is owed with the next group, as a multiple of 1 / (parts * total)
        owed = {
            name: parts * (weight * number - self._total * self._numbers[name])
            for name, weight in self._weights.items()
        }
        latest = {
            name: Fraction((parts - 1) * self._total - owed[name], weight)
            for name, weight in self._weights.items()
        }
        return min((name for name in owed if owed[name] >= self._total), key=lambda name: latest[name])


def source_order(recipe: Recipe) -> SourceOrder:
    return SourceOrder({source.name: source.share for source in recipe.sources} or {"": 1.0})


def context_limits(recipe: Recipe) -> Callable[[str], int]:
    """A function from the id of a group to the limit of its episodes' contexts, in tokens."""
    order, by_source = source_order(recipe), recipe.by_source

    def limit(group_id: str) -> int:
        return by_source[order[cursor_of(group_id)][0]].rollout.limits.context_tokens

    return limit


class Curriculum:
    """Chooses the task and the size of each group, as the recipe says."""

    def __init__(
        self,
        order: TaskOrder,
        recipe: CurriculumRecipe,
        *,
        seed: int,
        group_size: int,
        rows: Iterable[EpisodeRow] = (),
    ) -> None:
        """`group_size` is the smallest. `rows` are those of the journal, cut back to the checkpoint."""
        self._order = order
        self._recipe = recipe
        self._seed = seed
        self._group_size = group_size
        self._places = {task_id: place for place, task_id in enumerate(order.task_ids)}
        num_tasks = len(order.task_ids)
        self._eases: npt.NDArray[np.float64] = np.zeros(num_tasks)
        self._variances: npt.NDArray[np.float64] = np.full(num_tasks, EASE_VARIANCE)  # when last played
        # Number of the run's episodes when a task was last played
        self._played_at: npt.NDArray[np.int64] = np.zeros(num_tasks, np.int64)
        self._num_episodes = 0
        # Number of the newest groups in a row in which no episode had a reward
        self._num_failed: npt.NDArray[np.int64] = np.zeros(num_tasks, np.int64)
        self._newest: dict[str, str] = {}  # the newest group of each task, by the task's id
        self._ability, self._ability_variance = 0.0, ABILITY_VARIANCE
        self._num_plain = 0  # groups before `_plain_before` that follow the order
        self._plain_before = 0
        for row in rows:
            self.observe(row)

    def observe(self, row: EpisodeRow) -> None:
        """Takes a settled episode into account, if it is one of training with a reward or failed."""
        if row.purpose != "train" or row.task_id not in self._places:
            return
        if row.reward is not None:
            self.add(row.task_id, row.reward)
            self._newest[row.task_id] = row.group_id
            self._num_failed[self._places[row.task_id]] = 0
        elif row.fate == "failed" and self._newest.get(row.task_id) != row.group_id:
            self._newest[row.task_id] = row.group_id
            self._num_failed[self._places[row.task_id]] += 1

    def add(self, task_id: str, reward: float) -> None:
        """Takes an episode of a known task into account. Rewards are bounded to 0..1."""
        place, solved = self._places[task_id], min(max(reward, 0.0), 1.0)
        variance = float(self._variances_of(place))
        total = variance + self._ability_variance
        p = self._rate(place, total)
        information = p * (1 - p) / (1 + p * (1 - p) * total)
        surprise = (solved - p) / (1 + p * (1 - p) * total)
        self._eases[place] += variance * surprise
        self._ability += self._ability_variance * surprise
        self._num_episodes += 1
        self._variances[place] = variance - variance**2 * information
        self._played_at[place] = self._num_episodes
        left = self._ability_variance - self._ability_variance**2 * information
        self._ability_variance = min(left + ABILITY_DRIFT, ABILITY_VARIANCE)

    def _rate(self, place: int, variance: float) -> float:
        """The mean of p where its log odds are normal with this variance, nearly (MacKay, Neural Computation 4, 1992)."""
        log_odds = (self._ability + self._eases[place]) / math.sqrt(1 + math.pi * variance / 8)
        return 1 / (1 + math.exp(-log_odds))

    def size(self, task_id: str) -> int:
        """The number of members that a new group of this task has: the fitting one for the mean of p."""
        largest = self._recipe.max_group_size
        if largest is None:
            return self._group_size
        place = self._places[task_id]
        p = self._rate(place, float(self._variances_of(place)) + self._ability_variance)
        return fitting_size(p, range(self._group_size, largest + 1), share=self._recipe.signal_share)

    def _variances_of(self, places: int | slice) -> npt.NDArray[np.float64]:
        """The present variance of the ease of these tasks, with what the episodes since their last one have added."""
        num_since = self._num_episodes - self._played_at[places]
        added = EASE_VARIANCE / self._recipe.memory_episodes * num_since
        return np.minimum(self._variances[places] + added, EASE_VARIANCE)

    def choose(self, cursor: int, *, live: Collection[str], quarantined: Collection[str]) -> str:
        """The id of the task of the group at `cursor`. `live` are the ids of tasks whose groups are not settled.

        A task in quarantine is chosen only if the plain order says so, or if all tasks are in quarantine.
        """
        if self._recipe.kind == "plain":
            return self._order[cursor]
        chance = np.random.default_rng((self._seed, cursor))
        if chance.random() < self._recipe.plain_share:
            task_id = self._order[self._plain_number(cursor)]
            if task_id not in quarantined:
                return task_id
        signals = self._signals(chance)
        free = self._without(live, quarantined)
        if not free.any():
            free = self._without(quarantined)
        if not free.any():
            free = self._without()
        signals[~free] = 0.0
        # Divided by the largest, or a large exponent would make zeros of all.
        weights = (signals / (signals.max() or 1.0)) ** self._recipe.sharpness
        total = weights.sum()
        chances = weights / total if total else free / free.sum()
        return self._order.task_ids[int(chance.choice(len(chances), p=chances))]

    def _without(self, *left_out: Collection[str]) -> npt.NDArray[np.bool_]:
        """Which tasks are in none of these collections of ids."""
        found = np.ones(len(self._places), np.bool_)
        found[[self._places[one] for ids in left_out for one in ids if one in self._places]] = False
        return found

    def _signals(self, chance: np.random.Generator) -> npt.NDArray[np.float64]:
        """The probability that a group has a signal, for each task, with a success rate drawn from its posterior."""
        eases = chance.normal(self._eases, np.sqrt(self._variances_of(slice(None))))
        signals = signal(1 / (1 + np.exp(-(self._ability + eases))), self._group_size)
        failing = np.flatnonzero(self._num_failed)
        signals[failing] *= 1 - chance.random(len(failing)) ** (1 / self._num_failed[failing])
        return signals

    def _plain_number(self, cursor: int) -> int:
        """The number of groups before `cursor` that follow the plain order."""
        if cursor < self._plain_before:
            self._num_plain = self._plain_before = 0
        for before in range(self._plain_before, cursor):
            self._num_plain += np.random.default_rng((self._seed, before)).random() < self._recipe.plain_share
        self._plain_before = cursor
        return self._num_plain
