"""`python -m trainer.report RUN_DIR`: the result of a run, its end, and whether every request is accounted for.

A run of supervised fine-tuning has no requests: there it is what was trained, and the held-out loss before and after.

Exit status: 0 every request is accounted for; 1 a request was lost or a trajectory trained twice; 2 misuse.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.commandline import directory, program
from pipeline.intervals import HEADING
from pipeline.journal.reading import MalformedJournal, NoJournal, found_journal, identity
from pipeline.journal.rows import EpisodeRow, EvaluationRow, ImitationStepRow
from pipeline.message import json_line
from pipeline.screen import lines
from trainer.judge import short_lines
from trainer.records.source_tally import source_lines
from trainer.report.imitation import imitation_table, summarize_imitation
from trainer.report.summary import (
    UNCOUNTED,
    ContextCosts,
    JudgingReport,
    LearnerSpeed,
    RunSummary,
    StalenessReport,
    SuccessChange,
    drift_lines,
    summarize,
)


def table(summary: RunSummary, run_dir: Path) -> str:
    """The summary as text: success in percent."""
    rows = [
        f"{run_dir}   {summary.steps} steps, {summary.publications} weight versions, {summary.state_sentence}",
        "",
        f"{'success, %':<22}{'before':>22}{'after':>22}{'change':>24}   {HEADING}",
        _comparison("training (quarters)", summary.quarters),
        _comparison("held out", summary.heldout),
        _comparison("held out, greedy", summary.heldout_greedy),
        *_habit_lines(summary),
        "",
        f"{'lag':<22}mean {_number(summary.lag_mean, '.2f')}, max {_number(summary.lag_max, 'd')} versions",
        *(f"{'staleness':<22}{line}" for line in staleness_lines(summary.staleness)),
        f"{'log-prob gap':<22}{_gap(summary)}",
        f"{'tokens':<22}{summary.num_trained_tokens:,} trained of {summary.num_sampled_tokens:,} sampled: "
        + _number(summary.trained_over_sampled, ".4f"),
        *_untrained_lines(summary),
        f"{'provenance':<22}{summary.provenance.num_replies:,} replies trained exactly as the engine sampled them; "
        f"{summary.provenance.num_altered:,} trajectories rejected, because they differ",
        *_where_lines(summary),
        *(f"{'context':<22}{line}" for line in _context(summary.context, summary.episodes)),
        f"{'episodes':<22}{summary.episodes:,} with a reward; "
        + (
            ", ".join(f"{count:,} {fate.replace('_', ' ')}" for fate, count in summary.fates.items())
            or "none yet"
        ),
        *_size_lines(summary),
        *(f"{'trained too rarely':<22}{sentence}" for sentence in summary.rarer),
        *source_lines(summary.sources),
        f"{'controls':<22}{_controls(summary)}",
        *_from_tree_lines(summary),
        f"{'requests':<22}{summary.lost} lost, {summary.trained_twice} trained twice, "
        f"{summary.dead} dead, {'at least ' if summary.state in UNCOUNTED else ''}{summary.open} open",
        *_evaluation_lines(summary.evaluations),
        *_judging_lines(summary.judging),
        *(f"{'alarms':<22}step {row.step}: {row.sentence}" for row in summary.alarms),
        *(
            f"{'quarantine':<22}{task_id}: {reason}"
            for task_id, reason in sorted(summary.quarantined.items())
        ),
    ]
    return lines(rows)


def _habit_lines(summary: RunSummary) -> Iterator[str]:
    """What each change of held-out success consists of; nothing for runs without such rollouts."""
    for name, report in summary.habits.items():
        for line in report.lines:
            yield f"{f'habits, {name}' if name else 'habits':<22}{line}"


def _untrained_lines(summary: RunSummary) -> Iterator[str]:
    """The lines about sampled tokens that no step may train, from agent programs; nothing if there are none."""
    num_tokens, num_replies = summary.num_aside_tokens, summary.num_not_taken
    if num_tokens or num_replies:
        yield (
            f"{'agent programs':<22}{num_tokens:,} more tokens in asides, which are not trained; "
            f"replies that no program took, which are not turns: {num_replies:,}"
        )


def _where_lines(summary: RunSummary) -> Iterator[str]:
    """The accounts of `pipeline.where`, one line each; nothing for journals without the data."""
    found = summary.where
    for name, one in (("time", found.trainer), ("slots", found.slots)):
        spent = sorted(one.parts_s.items(), key=lambda part: -part[1])
        if one.wall_s:
            parts = ", ".join(f"{part} {one.share(part):.1%}" for part, seconds in spent if seconds)
            yield f"{name:<22}{one.wall_s:,.1f} s: {parts}"
    if summary.speed.tokens_per_s:
        yield f"{'learner':<22}{speed_line(summary.speed)}"
    if found.advice:
        best = found.advice[0]
        yield f"{'advice':<22}{best.setting}, at most {best.gain:.0%} of the wall; `python -m pipeline.where` says more"


def staleness_lines(found: StalenessReport) -> Iterator[str]:
    """The lines about staleness; nothing for journals without the data."""
    for seen in found.by_lag:
        yield (
            f"lag {seen.lag}: {seen.num_tokens:,} tokens, effective {seen.ess_share:.3f}, "
            f"masked {seen.masked_share:.3f}, vetoed {seen.vetoed_share:.3f}, KL {seen.behaviour_kl:.1e}"
        )
        if seen.signal is not None:
            yield (
                f"lag {seen.lag}, by signal: {seen.signal.num_tokens:,.0f} tokens, effective {seen.signal.ess_share:.3f}, "
                f"masked {seen.signal.masked_share:.3f}, vetoed {seen.signal.vetoed_share:.3f}, KL {seen.signal.behaviour_kl:.1e}"
            )
    if found.changes:
        last = found.changes[-1]
        num_raised = sum(one.ahead_versions > one.before for one in found.changes)
        yield (
            f"controlled: raised {num_raised} times, lowered {len(found.changes) - num_raised} times; since step {last.step} "
            f"admission may run {last.ahead_versions} versions ahead: {last.reason}"
        )


def speed_line(found: LearnerSpeed) -> str:
    """The line about the learner's speed."""
    share = "" if found.utilisation is None else f", {found.utilisation:.1%} of the devices' peak"
    return f"{found.tokens_per_s:,.0f} tokens a second while training{share}"


def _judging_lines(found: JudgingReport) -> Iterator[str]:
    """The lines about judging; nothing if the run has no judge."""
    if found.steps is not None:
        yield f"{'credit':<22}{found.steps.sentence}"
    if found.quality is not None:
        yield from short_lines(found.quality)


def _evaluation_lines(rows: Sequence[EvaluationRow]) -> Iterator[str]:
    """A line for each weight version on each held-out set."""
    for row in rows:
        name = f"{row.tasks or 'held out'}{', greedy' if row.greedy else ''}"
        passes = "".join(f", pass@{k} {value:.3f}" for k, value in row.pass_at.items() if k != "1")
        ended = ", ".join(f"{count} {outcome}" for outcome, count in row.outcomes.items())
        yield (
            f"{'evaluation':<22}v{row.version} {name}: {row.estimate.percent()} of "
            f"{row.num_episodes} episodes{passes}; {row.mean_turns:.1f} turns, {row.mean_sampled_tokens:,.0f} tokens; {ended or '-'}"
        )


def _context(costs: ContextCosts, num_episodes: int) -> list[str]:
    """Two lines about contexts; none for journals without the data."""
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


def _size_lines(summary: RunSummary) -> Iterator[str]:
    """The line about groups of several sizes; nothing if all groups have one."""
    shares = (
        f"{share.percent()} of {share.num_draws:,} groups of {size}"
        for size, share in summary.without_signal.items()
    )
    if summary.without_signal:
        yield f"{'without a signal':<22}{'; '.join(shares)}"


def _from_tree_lines(summary: RunSummary) -> Iterator[str]:
    """The line about episodes whose tree was graded; nothing if there are none."""
    if summary.num_from_tree:
        yield (
            f"{'from the tree':<22}{summary.num_from_tree:,} of {summary.episodes:,} episodes, "
            "because what the agent printed was not a complete patch"
        )


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


def _comparison(name: str, found: SuccessChange) -> str:
    before, after = ("-" if one is None else one.cell() for one in (found.before, found.after))
    change = "" if found.change is None else found.change.cell("+")
    return f"  {name:<20}{before:>22}{after:>22}{change:>24}".rstrip()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=program("trainer.report"), description=__doc__)
    parser.add_argument(
        "run_dir", type=directory, metavar="RUN_DIR", help="the directory of a run, as in runs/demo"
    )
    parser.add_argument(
        "--drift",
        action="store_true",
        help="print where learner and engine disagree about log-probs, by weight version, position and kind of token",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args(argv)
    try:
        if identity(arguments.run_dir).kind == "sft":
            return _report_imitation(arguments, parser)
        found_journal(arguments.run_dir, EpisodeRow)
        summary = summarize(arguments.run_dir)
    except (NoJournal, MalformedJournal) as error:
        parser.error(str(error))
    if arguments.json:
        print(json_line(summary))
    elif arguments.drift:
        print(lines(list(drift_lines(summary.drift))))
    else:
        print(table(summary, arguments.run_dir))
    return 0 if summary.is_accounted_for else 1


def _report_imitation(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints the report of a run of supervised fine-tuning. Raises NoJournal, MalformedJournal."""
    found_journal(arguments.run_dir, ImitationStepRow)
    if arguments.drift:
        parser.error("--drift is about sampled tokens, and supervised fine-tuning has none: leave it out")
    summary = summarize_imitation(arguments.run_dir)
    print(json_line(summary) if arguments.json else imitation_table(summary, arguments.run_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
