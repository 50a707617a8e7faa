"""The quality of a judge as text: all of it for `python -m trainer.judge report`, a few lines for `python -m trainer.report`."""

from collections.abc import Iterator, Mapping, Sequence

from trainer.judge.agreement import Agreement
from trainer.judge.auc import Auc
from trainer.judge.quality import JudgeQuality, ScoreBin


def quality_lines(quality: JudgeQuality) -> Iterator[str]:
    """The whole report. Success is in percent, with one standard error."""
    yield from short_lines(quality)
    yield _line("judged by", _counts(quality.judges))
    yield _line("failures", _counts(quality.errors))
    yield from _table("score", "rollouts", quality.reliability)
    yield from _table("turn", "turns", quality.by_turn)
    yield from _table("turns of rollout", "rollouts", quality.by_length)
    yield from _table("weight versions", "rollouts", quality.by_version)
    yield from _trend_lines(quality)


def short_lines(quality: JudgeQuality) -> Iterator[str]:
    """What a reader of a run's report has to know: how much was judged, how well, and every warning."""
    waited = (
        ""
        if quality.waited_s_mean is None
        else f"; judgements arrived after {quality.waited_s_mean:.1f} s on average, {quality.waited_s_max:.1f} s at most"
    )
    yield _line("judge requests", f"{_counts(quality.fates)}{waited}")
    yield _line(
        "scores",
        f"{quality.num_scored_turns:,} of {quality.num_turns:,} turns have one; without one: {_counts(quality.unscored)}",
    )
    if quality.num_votes:
        yield _line("votes", _votes(quality))
    yield _line("AUC", f"{_auc(quality.auc)}; {quality.num_rollouts:,} rollouts have a score and a reward")
    yield _line("AUC within groups", _auc(quality.auc_within_groups))
    for warning in quality.warnings:
        yield _line("WARNING", warning)


def _votes(quality: JudgeQuality) -> str:
    valid = f"{quality.num_valid_votes:,} of {quality.num_votes:,} are valid"
    return f"{valid}; {_agreement(quality.agreement)}"


def _agreement(found: Agreement) -> str:
    if found.unanimous is None or found.pairs is None:
        return "no turn has two to compare"
    alpha = "" if found.alpha is None else f", Krippendorff's alpha {found.alpha:.2f}"
    return f"{found.unanimous:.0%} of {found.num_turns:,} turns are unanimous, {found.pairs:.0%} of pairs agree{alpha}"


def _auc(found: Auc | None) -> str:
    if found is None:
        return "not known, for want of a solved and an unsolved rollout to compare"
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f}, 95 %)"


def _table(name: str, counted: str, bins: Sequence[ScoreBin]) -> Iterator[str]:
    if not bins:
        return
    has_auc = any(one.auc is not None for one in bins)
    yield ""
    yield f"{name:<22}{counted:>10}{'mean score':>14}{'success':>18}{'AUC' if has_auc else '':>10}".rstrip()
    for one in bins:
        success = f"{100 * one.success:.1f} ± {100 * one.standard_error:.1f}"
        auc = "" if one.auc is None else f"{one.auc:.3f}"
        yield f"  {one.label:<20}{one.num:>10,}{one.score_mean:>+14.3f}{success:>18}{auc:>10}".rstrip()


def _trend_lines(quality: JudgeQuality) -> Iterator[str]:
    trend = quality.trend
    if trend is None:
        return
    yield ""
    yield _line(
        "drift",
        f"from the first third to the last, scores {trend.score_change:+.3f} ± {trend.score_error:.3f}, success "
        f"{100 * trend.success_change:+.1f} ± {100 * trend.success_error:.1f} points",
    )


def _line(name: str, text: str) -> str:
    return f"{name:<22}{text}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in counts.items()) or "none"
