"""The area under the ROC curve of scores against a yes or no, with an interval. Shape suffixes: N rollouts, G groups.

It is the chance that a solved rollout has a higher score than an unsolved one, where equal scores count half: 0.5 is a coin,
1 tells all of them apart. Rollouts of one group are related, so the bootstrap draws groups, not rollouts.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 1000
INTERVAL = 0.95  # share of the bootstrap distribution that lies within the interval
SEED = 0  # of the resampling, so that the same rollouts give the same interval

Floats = npt.NDArray[np.float64]


class Auc(msgspec.Struct, frozen=True, kw_only=True):
    """One area with its interval."""

    value: float
    low: float
    high: float
    num_solved: int  # rollouts that it compares
    num_unsolved: int


class ScoredRollouts:
    """The scores of rollouts, whether each is solved, and its group."""

    def __init__(self, scores: Sequence[float], solved: Sequence[bool], groups: Sequence[str]) -> None:
        self._solved_N = np.array(solved, np.bool_)
        self._groups_N = _numbered(groups)
        self._ranks_N = _numbered(scores)
        self._num_groups = int(self._groups_N.max(initial=-1)) + 1

    def area(self) -> float | None:
        """Over all pairs of a solved and an unsolved rollout. None: there is no such pair."""
        value = self._area(np.ones(self._num_groups))
        return None if np.isnan(value) else value

    def auc(self) -> Auc | None:
        """The area with its interval."""
        return self._estimate(self._area)

    def auc_within_groups(self) -> Auc | None:
        """Over the pairs that belong to one group, so that hard and easy tasks are not compared. None: there is no such pair."""
        won_G, pairs_G = np.zeros(self._num_groups), np.zeros(self._num_groups)
        for group in range(self._num_groups):
            here_N = self._groups_N == group
            ranks_N, solved_N = self._ranks_N[here_N], self._solved_N[here_N]
            above = ranks_N[solved_N][:, None] - ranks_N[~solved_N][None, :]
            won_G[group], pairs_G[group] = (above > 0).sum() + (above == 0).sum() / 2, above.size

        def area(weights_G: Floats) -> float:
            pairs = weights_G @ pairs_G
            return float(weights_G @ won_G / pairs) if pairs else np.nan

        return self._estimate(area)

    def _area(self, weights_G: Floats) -> float:
        """With so many copies of each group; NaN if there is no pair."""
        weights_N = weights_G[self._groups_N]
        num_ranks = int(self._ranks_N.max(initial=-1)) + 1
        solved = np.bincount(self._ranks_N, weights_N * self._solved_N, num_ranks)
        unsolved = np.bincount(self._ranks_N, weights_N * ~self._solved_N, num_ranks)
        pairs = solved.sum() * unsolved.sum()
        below = np.cumsum(unsolved) - unsolved
        return float(solved @ (below + unsolved / 2) / pairs) if pairs else np.nan

    def _estimate(self, area: Callable[[Floats], float]) -> Auc | None:
        """`area` computes it with so many copies of each group; NaN if there is no pair."""
        value = area(np.ones(self._num_groups))
        if np.isnan(value):
            return None
        draw, shares_G = np.random.default_rng(SEED), np.full(self._num_groups, 1 / self._num_groups)
        areas = np.array(
            [
                area(draw.multinomial(self._num_groups, shares_G).astype(np.float64))
                for _ in range(NUM_RESAMPLES)
            ]
        )
        outside = (1 - INTERVAL) / 2
        low, high = np.quantile(areas[~np.isnan(areas)], [outside, 1 - outside])
        num_solved = int(self._solved_N.sum())
        return Auc(
            value=value,
            low=float(low),
            high=float(high),
            num_solved=num_solved,
            num_unsolved=len(self._solved_N) - num_solved,
        )


def _numbered(values: Sequence[float] | Sequence[str]) -> npt.NDArray[np.int64]:
    """The place of each value among the different ones, in their order."""
    return np.unique(np.array(values), return_inverse=True)[1].astype(np.int64)
