"""The summary of a run, computed from its journal: what it achieved, how it ended, whether every request is accounted for.

Episodes are the training episodes with a reward, in the order they finished; success is their mean reward. A standard error
counts the members of one group as related, not as independent draws.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec

from trainer.records.journal import (
    EndRow,
    EpisodeRow,
    EvaluationRow,
    PublicationRow,
    QuarantineRow,
    SkippedRow,
    StepRow,
    journal_of,
    read,
)
from trainer.records.run_state import State, read_state

Estimate = tuple[float, float] | tuple[None, None]
"""A mean and its standard error; None where there is nothing to estimate from."""


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the run's requests."""

    fates: dict[str, int]  # of training requests
    missing: int  # without an episode row: lost if the run is complete, else still open
    trained_twice: int
    dead: int  # failed at their last try
    is_complete: bool  # the run ended, and every request should have an episode row


class ContextCosts(msgspec.Struct, frozen=True, kw_only=True):
    """How much was cut out of contexts, and what cuts and samples of single turns cost. Older journals tell nothing: zeros."""

    num_cut_episodes: int = 0  # training episodes with a reward of which something was cut
    num_cuts: int = 0  # turns before which that happened
    repeated_tokens: int = 0  # that engines computed again because of it
    num_episode_tokens: int = 0  # told and sampled in these episodes, each counted once
    num_samples: int = 0  # that the trained trajectories were trained as
    num_sample_tokens: int = 0  # in these samples, which repeat what they share
    num_unique_tokens: int = 0  # in the trained trajectories, each counted once


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    episodes: int
    success_first_quarter: float | None
    success_last_quarter: float | None
    heldout_before: float | None
    heldout_after: float | None
    steps: int
    lag_mean: float | None  # weight versions, over trained trajectories
    lag_max: int | None
    logprob_gap_max: float | None  # nats, engine against learner under the same weights
    logprob_gap_mean: float | None
    trained_over_sampled: float | None  # of trained trajectories: 1 is right
    lost: int
    trained_twice: int
    dead: int
    open: int  # requests without an episode row, while the run can go on
    ended: bool  # for good: finished, or nothing was left to learn
    success_first_quarter_standard_error: float | None
    success_last_quarter_standard_error: float | None
    heldout_before_standard_error: float | None
    heldout_after_standard_error: float | None
    heldout_before_greedy: float | None
    heldout_after_greedy: float | None
    num_trained_tokens: int
    num_sampled_tokens: int  # in trained trajectories, each once
    publications: int
    fates: dict[str, int]
    quarantined: dict[str, str]  # why each task is in quarantine, by its id
    state: State
    state_sentence: str
    # Training episodes whose tests passed, by what the control run said of it ("refuted": worth 0).
    controls: dict[str, int] = {}
    context: ContextCosts = ContextCosts()
    evaluations: tuple[EvaluationRow, ...] = ()  # in order, by set, version, and sampled or greedy

    @property
    def is_accounted_for(self) -> bool:
        """Whether no request was lost and no trajectory was trained twice."""
        return not (self.lost or self.trained_twice)


def summarize(run_dir: Path) -> RunSummary:
    """Read the journal of the run in `run_dir`. Raises MalformedJournal."""
    directory = journal_of(run_dir)
    rows = list({row.request_id: row for row in read(directory, EpisodeRow)}.values())
    steps, endings = list(read(directory, StepRow)), list(read(directory, EndRow))
    evaluations = list(read(directory, EvaluationRow))
    episodes = finished_episodes(rows)
    quarter = max(1, len(episodes) // 4)
    first, first_error = rate(episodes[:quarter])
    last, last_error = rate(episodes[-quarter:])
    before, before_error = success(evaluations, "heldout_before")
    after, after_error = success(evaluations, "heldout_after")
    passed_over = {row.cursor for row in read(directory, SkippedRow)}
    counts = count_requests(rows, steps, endings, passed_over)
    state = read_state(run_dir, steps, endings)
    gaps = [row for row in steps if row.is_gap_measured]
    trained = sum(row.num_trained_tokens for row in steps)
    sampled = sum(row.num_unique_sampled_tokens for row in steps)
    return RunSummary(
        episodes=len(episodes),
        success_first_quarter=first,
        success_last_quarter=last,
        heldout_before=before,
        heldout_after=after,
        steps=len(steps),
        lag_mean=_weighted((row.lag_mean, row.num_trajectories) for row in steps),
        lag_max=max((row.lag_max for row in steps), default=None),
        logprob_gap_max=max((row.logprob_gap_max or 0.0 for row in gaps), default=None),
        logprob_gap_mean=_weighted(
            (row.logprob_gap_mean or 0.0, row.num_gap_tokens or row.num_trained_tokens) for row in gaps
        ),
        trained_over_sampled=trained / sampled if sampled else None,
        lost=counts.missing if counts.is_complete else 0,
        trained_twice=counts.trained_twice,
        dead=counts.dead,
        open=0 if counts.is_complete else counts.missing,
        ended=counts.is_complete,
        success_first_quarter_standard_error=first_error,
        success_last_quarter_standard_error=last_error,
        heldout_before_standard_error=before_error,
        heldout_after_standard_error=after_error,
        heldout_before_greedy=success(evaluations, "heldout_before", greedy=True)[0],
        heldout_after_greedy=success(evaluations, "heldout_after", greedy=True)[0],
        num_trained_tokens=trained,
        num_sampled_tokens=sampled,
        publications=sum(1 for _ in read(directory, PublicationRow)),
        fates=counts.fates,
        quarantined={row.task_id: row.reason for row in read(directory, QuarantineRow)},
        state=state.state,
        state_sentence=state.sentence,
        controls=dict(Counter(row.control for row in episodes if row.control)),
        context=context_costs(episodes, steps),
        evaluations=tuple(sorted(evaluations, key=lambda row: (row.tasks, row.greedy, row.version))),
    )


def finished_episodes(rows: Iterable[EpisodeRow]) -> list[EpisodeRow]:
    """Training episodes with a reward, in the order they finished."""
    rewarded = (row for row in rows if row.purpose == "train" and row.reward is not None)
    return sorted(rewarded, key=lambda row: (row.finished_at, row.request_id))


def context_costs(episodes: Sequence[EpisodeRow], steps: Sequence[StepRow]) -> ContextCosts:
    """Summed over training episodes with a reward, and over what was trained."""
    return ContextCosts(
        num_cut_episodes=sum(row.num_cuts > 0 for row in episodes),
        num_cuts=sum(row.num_cuts for row in episodes),
        repeated_tokens=sum(row.repeated_tokens for row in episodes),
        num_episode_tokens=sum(row.num_tokens for row in episodes),
        num_samples=sum(row.num_samples for row in steps),
        num_sample_tokens=sum(row.num_sample_tokens for row in steps),
        num_unique_tokens=sum(row.num_unique_tokens for row in steps),
    )


def rate(episodes: Sequence[EpisodeRow]) -> Estimate:
    """Mean reward and its cluster-robust standard error: groups are the independent draws, not their members.

    With u_g the sum of a group's residuals and n episodes in G groups, SE = sqrt(G / (G - 1) * sum(u_g^2)) /
    n (Liang and Zeger, 1986).
    """
    if not episodes:
        return None, None
    n = len(episodes)
    mean = sum(row.reward or 0.0 for row in episodes) / n
    residuals: dict[str, float] = {}
    for row in episodes:
        residuals[row.group_id] = residuals.get(row.group_id, 0.0) + (row.reward or 0.0) - mean
    squares = sum(residual**2 for residual in residuals.values())
    correction = len(residuals) / max(1, len(residuals) - 1)
    return mean, (correction * squares) ** 0.5 / n


def success(rows: Iterable[EvaluationRow], name: str, *, greedy: bool | None = None) -> Estimate:
    """Success in the last evaluation of that name: the sampled one if there is one, unless `greedy` says which."""
    named = [row for row in rows if row.name == name and not row.tasks and greedy in (None, row.greedy)]
    if not named:
        return None, None
    chosen = min(reversed(named), key=lambda row: row.greedy)
    return chosen.success, chosen.standard_error


def count_requests(
    rows: Sequence[EpisodeRow],
    steps: Iterable[StepRow],
    endings: Sequence[EndRow],
    passed_over: AbstractSet[int] = frozenset(),
) -> RequestCounts:
    """Find requests that have no episode row.

    Groups have the places 0, 1, 2, ... in the task order, less those `passed_over`; each has members 0 ... size - 1.
    """
    members: dict[int | str, set[int]] = {}
    sizes: dict[int | str, int] = {}
    for row in rows:
        place = row.group_id if row.cursor < 0 else row.cursor
        members.setdefault(place, set()).add(row.member)
        sizes[place] = row.group_size
    places = [place for place in members if isinstance(place, int)]
    known = {*passed_over, *places}
    skipped = max(known, default=-1) + 1 - len(known)
    missing = sum(sizes[place] - len(found) for place, found in members.items())
    missing += skipped * max((sizes[place] for place in places), default=0)
    steps = list(steps)
    trained = Counter(request_id for row in steps for request_id in row.request_ids)
    last_step = max((row.step for row in steps), default=0)
    return RequestCounts(
        fates=dict(Counter(row.fate for row in rows if row.purpose == "train").most_common()),
        missing=missing,
        trained_twice=sum(times > 1 for times in trained.values()),
        dead=sum(row.outcome.startswith("failed:") for row in rows),
        is_complete=any(row.is_complete and row.step >= last_step for row in endings),
    )


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
        f"{'log-prob gap':<22}{_gap(summary)}",
        f"{'tokens':<22}{summary.num_trained_tokens:,} trained of {summary.num_sampled_tokens:,} sampled: "
        f"{_number(summary.trained_over_sampled, '.4f')}",
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
        *(
            f"{'quarantine':<22}{task_id}: {reason}"
            for task_id, reason in sorted(summary.quarantined.items())
        ),
    ]
    return "\n".join(lines)


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


def _weighted(pairs: Iterable[tuple[float, int]]) -> float | None:
    known = list(pairs)
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
