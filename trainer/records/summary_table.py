"""The summary of a run as text."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.judge.lines import short_lines
from trainer.records.alarm_row import alarm_sentence
from trainer.records.journal import EvaluationRow
from trainer.records.lags import staleness_lines
from trainer.records.step_judging import judging_sentence
from trainer.records.step_seconds import lines_of
from trainer.records.summary import ContextCosts, JudgingReport, RunSummary
from trainer.where.findings import WhereFindings


def table(summary: RunSummary, run_dir: Path) -> str:
    """The summary as text: success in percent, with one standard error."""
    lines = [
        f"{run_dir}   {summary.steps} steps, {summary.publications} weight versions, {summary.state_sentence}",
        "",
        f"{'success':<22}{'before':>16}{'after':>16}{'change':>12}",
        _comparison(
            "training (quarters)",
            (summary.success_first_quarter, summary.success_first_quarter_standard_error),
            (summary.success_last_quarter, summary.success_last_quarter_standard_error),
        ),
        _comparison(
            "held out",
            (summary.heldout_before, summary.heldout_before_standard_error),
            (summary.heldout_after, summary.heldout_after_standard_error),
        ),
        _comparison(
            "held out, greedy", (summary.heldout_before_greedy, None), (summary.heldout_after_greedy, None)
        ),
        "",
        f"{'lag':<22}mean {_number(summary.lag_mean, '.2f')}, max {_number(summary.lag_max, 'd')} versions",
        *(f"{'staleness':<22}{line}" for line in staleness_lines(summary.staleness)),
        f"{'log-prob gap':<22}{_gap(summary)}",
        f"{'tokens':<22}{summary.num_trained_tokens:,} trained of {summary.num_sampled_tokens:,} sampled: "
        f"{_number(summary.trained_over_sampled, '.4f')}",
        f"{'provenance':<22}{summary.provenance.num_replies:,} replies trained exactly as the engine sampled them; "
        f"{summary.provenance.num_altered:,} trajectories rejected, because they differ",
        *(f"{'time':<22}{line}" for line in lines_of(summary.seconds)),
        *_where_lines(summary.where),
        *(f"{'context':<22}{line}" for line in _context(summary.context, summary.episodes)),
        f"{'episodes':<22}{summary.episodes:,} with a reward; "
        + (
            ", ".join(f"{count:,} {fate.replace('_', ' ')}" for fate, count in summary.fates.items())
            or "none yet"
        ),
        f"{'controls':<22}{_controls(summary)}",
        f"{'requests':<22}{summary.lost} lost, {summary.trained_twice} trained twice, "
        f"{summary.dead} dead, {summary.open} open",
        *_evaluation_lines(summary.evaluations),
        *_judging_lines(summary.judging),
        *(f"{'alarms':<22}step {row.step}: {alarm_sentence(row)}" for row in summary.alarms),
        *(
            f"{'quarantine':<22}{task_id}: {reason}"
            for task_id, reason in sorted(summary.quarantined.items())
        ),
    ]
    return "\n".join(lines)


def _where_lines(found: WhereFindings) -> Iterator[str]:
    """Nothing of journals that do not tell."""
    spent = sorted(found.slots.parts_s.items(), key=lambda part: -part[1])
    if found.slots.wall_s:
        parts = ", ".join(f"{name} {found.slots.share(name):.1%}" for name, seconds in spent if seconds)
        yield f"{'slots':<22}{found.slots.wall_s:,.1f} s: {parts}"
    if found.advice:
        best = found.advice[0]
        yield f"{'advice':<22}{best.setting}, at most {best.gain:.0%} of the wall; `python -m trainer.where` says more"


def _judging_lines(found: JudgingReport) -> Iterator[str]:
    """Nothing if nobody judges."""
    if found.steps is not None:
        yield f"{'credit':<22}{judging_sentence(found.steps)}"
    if found.quality is not None:
        yield from short_lines(found.quality)


def _evaluation_lines(rows: Sequence[EvaluationRow]) -> Iterator[str]:
    """A line for each weight version on each held-out set."""
    for row in rows:
        name = f"{row.tasks or 'held out'}{', greedy' if row.greedy else ''}"
        passes = "".join(f", pass@{k} {value:.3f}" for k, value in row.pass_at.items() if k != "1")
        ended = ", ".join(f"{count} {outcome}" for outcome, count in row.outcomes.items())
        yield (
            f"{'evaluation':<22}v{row.version} {name}: {100 * row.success:.1f} ± {100 * row.standard_error:.1f} % of "
            f"{row.num_episodes} episodes{passes}; {row.mean_turns:.1f} turns, {row.mean_sampled_tokens:,.0f} tokens; {ended or '-'}"
        )


def _context(costs: ContextCosts, num_episodes: int) -> list[str]:
    """Two lines; none of journals that do not tell."""
    lines: list[str] = []
    if costs.num_episode_tokens:
        share = costs.repeated_tokens / costs.num_episode_tokens
        lines.append(
            f"{costs.num_cut_episodes:,} of {num_episodes:,} episodes were cut, before {costs.num_cuts:,} turns; "
            f"engines computed {costs.repeated_tokens:,} tokens again ({share:.1%})"
        )
    if costs.num_unique_tokens:
        times = costs.num_sample_tokens / costs.num_unique_tokens
        lines.append(
            f"{costs.num_samples:,} samples; the learner computed {costs.num_sample_tokens:,} tokens for "
            f"{costs.num_unique_tokens:,}: {times:.2f} times as many"
        )
    return lines


def _controls(summary: RunSummary) -> str:
    said = ", ".join(f"{count:,} {word}" for word, count in sorted(summary.controls.items()))
    return f"of passed episodes: {said}" if said else "no episode passed its tests yet"


def _gap(summary: RunSummary) -> str:
    if summary.logprob_gap_max is None:
        return "not measured"
    return (
        f"mean {_number(summary.logprob_gap_mean, '.2e')}, max {summary.logprob_gap_max:.2e} nats, "
        "engine against learner"
    )


def _comparison(
    name: str, before: tuple[float | None, float | None], after: tuple[float | None, float | None]
) -> str:
    change = "" if before[0] is None or after[0] is None else f"{100 * (after[0] - before[0]):+.1f}"
    return f"  {name:<20}{_percent(*before):>16}{_percent(*after):>16}{change:>12}"


def _percent(mean: float | None, standard_error: float | None) -> str:
    if mean is None:
        return "-"
    return f"{100 * mean:.1f}" + ("      " if standard_error is None else f" ± {100 * standard_error:.1f}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
