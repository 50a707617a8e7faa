"""What staleness did over a run: its steps' metrics by lag, and how far admission was allowed to run ahead."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from trainer.learner.config import LagMetrics
from trainer.records.journal import StalenessRow, StepRow


class StalenessReport(msgspec.Struct, frozen=True, kw_only=True):
    """Older journals tell nothing of lags, and a run whose limit is fixed has no changes."""

    by_lag: tuple[LagMetrics, ...] = ()  # over all steps, in order of lag
    changes: tuple[StalenessRow, ...] = ()  # of how far admission may run ahead, in order


def staleness_report(steps: Sequence[StepRow], changes: Iterable[StalenessRow]) -> StalenessReport:
    """Sum up the rows of a run."""
    return StalenessReport(by_lag=tuple(pooled(row.by_lag for row in steps)), changes=tuple(changes))


def pooled(steps: Iterable[Sequence[LagMetrics]]) -> list[LagMetrics]:
    """What several steps did to the tokens of each lag, in order of lag: means over tokens."""
    by_lag: dict[int, list[LagMetrics]] = {}
    for seen in (one for step in steps for one in step):
        by_lag.setdefault(seen.lag, []).append(seen)
    return [_mean(lag, parts) for lag, parts in sorted(by_lag.items())]


def staleness_lines(found: StalenessReport) -> Iterator[str]:
    """For people; nothing of journals that do not tell."""
    for seen in found.by_lag:
        yield (
            f"lag {seen.lag}: {seen.num_tokens:,} tokens, effective {seen.ess_share:.3f}, "
            f"masked {seen.masked_share:.3f}, vetoed {seen.vetoed_share:.3f}, KL {seen.behaviour_kl:.1e}"
        )
    if found.changes:
        last = found.changes[-1]
        num_raised = sum(one.ahead_versions > one.before for one in found.changes)
        yield (
            f"controlled: raised {num_raised} times, lowered {len(found.changes) - num_raised} times; since step {last.step} "
            f"admission may run {last.ahead_versions} versions ahead: {last.reason}"
        )


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
    )
