"""Success rates of tasks, and the combined effect of steps; `pipeline/intervals.py` has the intervals.

pass@k is the unbiased estimator of Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374): of n
graded episodes of a task, c resolved it, and 1 - C(n - c, k) / C(n, k) is the probability that k of them include one that did.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import comb

from pipeline.intervals import Estimate, share
from pipeline.journal.rows import LagMetrics, SignalMetrics


def pass_at_k(num_episodes: int, num_resolved: int, k: int) -> float:
    """The estimate of pass@k for one task. Raises ValueError unless 1 <= k <= num_episodes."""
    if not 1 <= k <= num_episodes:
        raise ValueError(
            f"pass@{k} cannot be estimated from {num_episodes} episodes: k must be between 1 and that"
        )
    return 1 - comb(num_episodes - num_resolved, k) / comb(num_episodes, k)


def pass_at(graded: Mapping[str, Sequence[bool]], k: int) -> Estimate | None:
    """pass@k over the tasks that have at least k graded episodes; `graded` contains for each episode whether it resolved its task."""
    enough = [runs for runs in graded.values() if len(runs) >= k]
    return share(
        [pass_at_k(len(runs), sum(runs), k) for runs in enough], sum(len(runs) // k for runs in enough)
    )


def rate(runs: Sequence[bool]) -> float:
    return sum(runs) / len(runs)


def pooled(steps: Iterable[Sequence[LagMetrics]]) -> list[LagMetrics]:
    """The combined effect of several steps on the tokens of each lag, in order of lag: means over tokens, and over their signal."""
    by_lag: dict[int, list[LagMetrics]] = {}
    for seen in (one for step in steps for one in step):
        by_lag.setdefault(seen.lag, []).append(seen)
    return [_mean(lag, parts) for lag, parts in sorted(by_lag.items())]


def _mean(lag: int, parts: Sequence[LagMetrics]) -> LagMetrics:
    num_tokens = sum(part.num_tokens for part in parts)

    def mean(name: str) -> float:
        return sum(getattr(part, name) * part.num_tokens for part in parts) / num_tokens

    return LagMetrics(
        lag=lag,
        num_tokens=num_tokens,
        ess_share=mean("ess_share"),
        masked_share=mean("masked_share"),
        vetoed_share=mean("vetoed_share"),
        behaviour_kl=mean("behaviour_kl"),
        signal=_signal_mean([part.signal for part in parts if part.signal]),
    )


def _signal_mean(parts: Sequence[SignalMetrics]) -> SignalMetrics | None:
    if not parts:
        return None
    total = sum(part.total for part in parts)

    def mean(name: str) -> float:
        return sum(getattr(part, name) * part.total for part in parts) / total

    return SignalMetrics(
        total=total,
        num_tokens=total**2 / sum(part.total**2 / part.num_tokens for part in parts),
        ess_share=mean("ess_share"),
        masked_share=mean("masked_share"),
        vetoed_share=mean("vetoed_share"),
        behaviour_kl=mean("behaviour_kl"),
    )
