"""The summary of a run, computed from its journal: its result, its end, whether every request is accounted for, and where learner and
engine disagree about log-probs.

Episodes are the training episodes with a reward, in the order they finished; success is their mean reward. Its interval
counts the members of one group as related, not as independent draws.

The drift report is made from the audits of a run. Numerical noise is the same everywhere. A gap that grows with the position is evidence of
a fault in attention or positions; a gap in one version, of a fault in its publication; a gap in one kind of token, of a fault in rendering
or masking.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import msgspec

from pipeline.intervals import Estimate, difference, mean, paired_difference
from pipeline.journal.reading import RECIPE, journal_of, read
from pipeline.journal.rows import (
    AlarmRow,
    AuditRow,
    Drift,
    EndRow,
    EpisodeRow,
    EvaluationRow,
    JudgementRow,
    LagMetrics,
    PublicationRow,
    QuarantineRow,
    SkippedRow,
    StalenessRow,
    StepJudging,
    StepRow,
)
from pipeline.representation import represented
from pipeline.where.findings import WhereFindings, where
from trainer.batching.credit import has_signal
from trainer.judge import JudgeQuality, judge_quality
from trainer.recipe import load_recipe
from trainer.records.alarms import FROM_TREE
from trainer.records.run_directory import State, read_state
from trainer.records.source_tally import SourceResult, tally_of
from trainer.report.habits import AFTER, HabitReport, habit_report
from trainer.rollouts.admission import pooled

MAX_LINES = 8
"""The number of lines for weight versions; if there are more versions, neighbouring ones share a line."""


class DriftReport(msgspec.Struct, frozen=True, kw_only=True):
    """The combined audits of a run's log-probs: the differences between engine and learner."""

    num_tokens: int = 0  # number of measured tokens
    num_batch_tokens: int = 0  # number of tokens that the audited steps trained
    num_unmeasured: int = 0  # tokens that were selected, but sampled by weights that were no longer stored
    num_positions: int = 0  # number of positions that the learner computed for the audits
    audit_s: float = 0.0
    by_version: dict[str, Drift] = {}
    by_position: dict[str, Drift] = {}
    by_kind: dict[str, Drift] = {}


def drift_report(audits: Iterable[AuditRow]) -> DriftReport:
    rows = list(audits)
    return DriftReport(
        num_tokens=sum(row.num_tokens for row in rows),
        num_batch_tokens=sum(row.num_batch_tokens for row in rows),
        num_unmeasured=sum(row.num_unmeasured for row in rows),
        num_positions=sum(row.num_positions for row in rows),
        audit_s=sum(row.audit_s for row in rows),
        by_version=_added([row.by_version for row in rows]),
        by_position=_added([row.by_position for row in rows]),
        by_kind=_added([row.by_kind for row in rows]),
    )


def drift_lines(report: DriftReport) -> Iterator[str]:
    """The report as a table; one line if nothing was measured."""
    if not report.num_tokens:
        yield "drift: nothing was measured; it needs learner.snapshots_kept and audit.share above 0"
        return
    yield f"{'drift, nats':<22}{'tokens':>12}{'mean':>12}{'max':>12}{'bias':>12}"
    yield from _table("version", _joined(report.by_version))
    yield from _table("position", report.by_position)
    yield from _table("kind", report.by_kind)
    yield (
        f"{report.num_tokens:,} of {report.num_batch_tokens:,} trained tokens were measured, {report.num_unmeasured:,} drawn ones "
        f"could not be; the learner computed {report.num_positions:,} positions for it in {report.audit_s:.1f} s"
    )


def merged(drifts: Iterable[Drift]) -> Drift:
    """Returns the drift over the tokens of all `drifts` together."""
    parts = list(drifts)
    num_tokens = sum(part.num_tokens for part in parts)
    return Drift(
        num_tokens=num_tokens,
        mean=sum(part.mean * part.num_tokens for part in parts) / num_tokens,
        max=max(part.max for part in parts),
        bias=sum(part.bias * part.num_tokens for part in parts) / num_tokens,
    )


def _added(tables: Sequence[Mapping[str, Drift]]) -> dict[str, Drift]:
    """Several tables with the same labels combined into one, in the order of the numbers with which the labels begin."""
    labels = sorted({label for table in tables for label in table}, key=_place)
    return {label: merged(table[label] for table in tables if label in table) for label in labels}


def _place(label: str) -> tuple[int, str]:
    first = label.partition("-")[0]
    return (int(first), "") if first.isdecimal() else (0, label)


def _joined(by_version: Mapping[str, Drift]) -> dict[str, Drift]:
    """Spans of versions, MAX_LINES at most, with about as many versions each."""
    labels = list(by_version)
    size = -(-len(labels) // MAX_LINES)
    spans = (labels[start : start + size] for start in range(0, len(labels), size))
    return {
        span[0] if len(span) == 1 else f"{span[0]}-{span[-1]}": merged(by_version[label] for label in span)
        for span in spans
    }


def _table(name: str, drifts: Mapping[str, Drift]) -> Iterator[str]:
    for label, drift in drifts.items():
        yield (
            f"  {name + ' ' + label:<20}{drift.num_tokens:>12,}{drift.mean:>12.2e}{drift.max:>12.2e}{drift.bias:>+12.2e}"
        )


UNCOUNTED = ("running", "crashed")
"""States in which no end of a process has counted the open requests."""


class SuccessChange(msgspec.Struct, frozen=True, kw_only=True):
    """Success before and after, each with its 95 % interval; None if there is no data."""

    before: Estimate | None = None
    after: Estimate | None = None
    change: Estimate | None = None  # paired by task where the same tasks were played


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The fates of the run's requests."""

    fates: dict[str, int]  # training requests by fate
    missing: int  # requests without an episode row: lost if the run is complete, otherwise open
    trained_twice: int
    dead: int  # requests that failed at their last try
    is_complete: bool  # the run ended, and every request should have an episode row

    @property
    def lost(self) -> int:
        return self.missing if self.is_complete else 0

    @property
    def open(self) -> int:
        """A lower bound for the number of open requests, because the journal misses only members of groups that it knows."""
        return 0 if self.is_complete else self.missing


class ContextCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The amount that was cut out of contexts, and the cost of cuts and of samples of single turns. All fields are 0 for older journals."""

    num_cut_episodes: int = 0  # training episodes with a reward from whose context turns were cut
    num_cuts: int = 0  # number of turns before which something was cut
    repeated_tokens: int = 0  # tokens that engines computed again because of cuts
    num_episode_tokens: int = 0  # tokens given and sampled in these episodes, each counted once
    num_samples: int = 0  # number of samples made of the trained trajectories
    num_sample_tokens: int = 0  # tokens in these samples, shared ones counted in each
    num_unique_tokens: int = 0  # tokens in the trained trajectories, each counted once


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the trained replies are those that engines sampled, by their digests. All fields are 0 for older journals."""

    num_replies: int = 0  # trained replies that are exactly as they were sampled
    num_altered: int = 0  # trajectories rejected because a reply was changed


class StalenessReport(msgspec.Struct, frozen=True, kw_only=True):
    """The lags of trained trajectories. Older journals have no lags, and a run with a fixed limit has no changes."""

    by_lag: tuple[LagMetrics, ...] = ()  # sums over all steps, in order of lag
    # Changes of the number of versions that admission may run ahead, in order
    changes: tuple[StalenessRow, ...] = ()


class LearnerSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The learner's speed over the steps whose rows contain it. It is 0 for older journals."""

    tokens_per_s: float = 0.0  # tokens of all samples, per second in which the learner trained
    # Share of the devices' peak FLOP/s while the learner trained; None if the peak is not known.
    utilisation: float | None = None


class JudgingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The quality of a run's judge, and how its scores changed training. Both fields are None in a run without a judge."""

    quality: JudgeQuality | None = None
    steps: StepJudging | None = None  # sums over all steps


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    episodes: int
    success_first_quarter: float | None
    success_last_quarter: float | None
    heldout_before: float | None
    heldout_after: float | None
    steps: int
    lag_mean: float | None  # mean lag of trained trajectories in weight versions
    lag_max: int | None
    logprob_gap_max: float | None  # nats between engine and learner under the same weights
    logprob_gap_mean: float | None
    # Trained tokens divided by sampled tokens of the trained trajectories; 1 is the correct value.
    trained_over_sampled: float | None
    lost: int
    trained_twice: int
    dead: int
    # Requests in Redis while the run can continue: the number at its end, or the number that the journal misses, which is a lower bound.
    open: int
    ended: bool  # whether it cannot continue: it finished, or nothing was left to learn
    quarters: SuccessChange  # training episodes
    heldout: SuccessChange
    heldout_greedy: SuccessChange
    heldout_before_greedy: float | None
    heldout_after_greedy: float | None
    num_trained_tokens: int
    # Sampled tokens in trained trajectories, without those in asides, each counted once
    num_sampled_tokens: int
    num_aside_tokens: int  # tokens sampled in asides of trained trajectories
    num_not_taken: int  # replies that agent programs of trained trajectories never took: no turns, and in neither of the numbers above
    publications: int
    fates: dict[str, int]
    quarantined: dict[str, str]  # reason of the quarantine of each task, by the task's id
    state: State
    state_sentence: str
    # Training episodes whose tests passed, by the result of their control runs ("refuted": the reward is 0).
    controls: dict[str, int] = {}
    num_from_tree: int = 0  # training episodes whose tree was graded in place of what the agent printed
    drift: DriftReport = DriftReport()
    provenance: Provenance = Provenance()
    context: ContextCosts = ContextCosts()
    evaluations: tuple[EvaluationRow, ...] = ()  # sorted by set, version, and sampled or greedy
    habits: dict[str, HabitReport] = {}  # by the name of the held-out set; "": tasks.heldout
    speed: LearnerSpeed = LearnerSpeed()
    staleness: StalenessReport = StalenessReport()
    judging: JudgingReport = JudgingReport()
    alarms: tuple[AlarmRow, ...] = ()  # the beginning and the end of each alarm, in order
    sources: dict[str, SourceResult] = {}  # by name; empty where the recipe has no [[sources]]
    # Share of the closed groups whose rewards are all equal, by size of the group; empty if all groups have one size.
    without_signal: dict[int, Estimate] = {}
    # Sentences about lengths and difficulties that are trained less often than they are asked for, beyond chance.
    rarer: tuple[str, ...] = ()
    where: WhereFindings  # where the time went; about engines, only what the journal contains

    @property
    def is_accounted_for(self) -> bool:
        """Whether no request was lost and no trajectory was trained twice."""
        return not (self.lost or self.trained_twice)


def summarize(run_dir: Path) -> RunSummary:
    """Read the journal of the run in `run_dir`. Raises MalformedJournal."""
    directory = journal_of(run_dir)
    rows, steps, endings = _settled(directory), list(read(directory, StepRow)), list(read(directory, EndRow))
    evaluations, (trained, sampled, asides) = list(read(directory, EvaluationRow)), _tokens(steps)
    episodes, state = finished_episodes(rows), read_state(run_dir, steps, endings)
    quarters, (gap_max, gap_mean) = quarters_of(episodes), _gap_of(steps)
    counts = count_requests(rows, steps, endings, {row.cursor for row in read(directory, SkippedRow)})
    return RunSummary(
        episodes=len(episodes),
        success_first_quarter=quarters.before and quarters.before.value,
        success_last_quarter=quarters.after and quarters.after.value,
        **_heldout(evaluations),
        steps=len(steps),
        lag_mean=_weighted((row.lag_mean, row.num_trajectories) for row in steps),
        lag_max=max((row.lag_max for row in steps), default=None),
        logprob_gap_max=gap_max,
        logprob_gap_mean=gap_mean,
        trained_over_sampled=trained / sampled if sampled else None,
        lost=counts.lost,
        trained_twice=counts.trained_twice,
        dead=counts.dead,
        open=_open(counts, state.state, endings),
        ended=counts.is_complete,
        quarters=quarters,
        num_trained_tokens=trained,
        num_sampled_tokens=sampled,
        num_aside_tokens=asides,
        num_not_taken=sum(row.num_not_taken for row in steps),
        speed=learner_speed(steps),
        staleness=staleness_report(steps, read(directory, StalenessRow)),
        publications=sum(1 for _ in read(directory, PublicationRow)),
        fates=counts.fates,
        quarantined={row.task_id: row.reason for row in read(directory, QuarantineRow)},
        state=state.state,
        state_sentence=state.sentence,
        controls=dict(Counter(row.control for row in episodes if row.control)),
        num_from_tree=sum(row.outcome == FROM_TREE for row in episodes),
        drift=drift_report(read(directory, AuditRow)),
        provenance=_provenance(steps, counts),
        context=context_costs(episodes, steps),
        evaluations=tuple(sorted(evaluations, key=lambda row: (row.tasks, row.greedy, row.version))),
        habits=_habits(run_dir, evaluations),
        judging=_judging_report(directory, rows, steps),
        alarms=tuple(read(directory, AlarmRow)),
        sources=tally_of(rows).results(_shares(run_dir)) if any(row.source for row in rows) else {},
        without_signal=without_signal(rows),
        rarer=tuple(represented(rows).warnings),
        where=where(run_dir, max_rollout_bytes=0),
    )


def _heldout(evaluations: Sequence[EvaluationRow]) -> dict[str, Any]:
    """The fields of the summary about held-out success."""
    sampled, greedy = heldout_change(evaluations), heldout_change(evaluations, greedy=True)
    return {
        "heldout": sampled,
        "heldout_before": sampled.before and sampled.before.value,
        "heldout_after": sampled.after and sampled.after.value,
        "heldout_greedy": greedy,
        "heldout_before_greedy": greedy.before and greedy.before.value,
        "heldout_after_greedy": greedy.after and greedy.after.value,
    }


def _settled(directory: Path) -> list[EpisodeRow]:
    """The last row of each request."""
    return list({row.request_id: row for row in read(directory, EpisodeRow)}.values())


def _shares(run_dir: Path) -> dict[str, float]:
    """The shares of the sources by name, as the run's recipe has them; empty if it cannot be read."""
    try:
        return {source.name: source.share for source in load_recipe(run_dir / RECIPE).sources}
    except ValueError:
        return {}


def _habits(run_dir: Path, evaluations: Sequence[EvaluationRow]) -> dict[str, HabitReport]:
    """The report of each held-out set that was played before and after the run and whose rollouts the run keeps."""
    names = dict.fromkeys(row.tasks for row in evaluations if row.name == AFTER and not row.greedy)
    reports = {name: habit_report(run_dir, name) for name in names}
    return {name: report for name, report in reports.items() if report is not None}


def _tokens(steps: Sequence[StepRow]) -> tuple[int, int, int]:
    """The numbers of tokens that were trained, sampled to be trained, and sampled in asides."""
    trained = sum(row.num_trained_tokens for row in steps)
    sampled = sum(row.num_unique_sampled_tokens for row in steps)
    return trained, sampled, sum(row.num_aside_tokens for row in steps)


def _open(counts: RequestCounts, state: State, endings: Sequence[EndRow]) -> int:
    num_open = endings[-1].num_open if endings and state not in UNCOUNTED else None
    return counts.open if num_open is None else num_open


def finished_episodes(rows: Iterable[EpisodeRow]) -> list[EpisodeRow]:
    """Training episodes with a reward, in the order they finished."""
    rewarded = (row for row in rows if row.purpose == "train" and row.reward is not None)
    return sorted(rewarded, key=lambda row: (row.finished_at, row.request_id))


def without_signal(rows: Iterable[EpisodeRow]) -> dict[int, Estimate]:
    """The share of the groups without a signal among those that closed with enough valid members, by size, with Wilson's interval. Empty if
    all of these groups have one size.
    """
    groups = defaultdict[tuple[int, int], list[EpisodeRow]](list)
    for row in rows:
        if row.purpose == "train" and row.fate not in ("refused", "altered", "failed", "withdrawn"):
            groups[row.group_size, row.cursor].append(row)
    found = defaultdict[int, list[list[float]]](list)
    for (size, _), members in groups.items():
        fates = {row.fate for row in members}
        rewards = [row.reward for row in members if row.reward is not None]
        if fates & {"too_few_valid", "quarantined"}:
            continue
        if "zero_variance" in fates:
            found[size].append([1.0])
        elif fates & {"trained", "not_finite", "overlong", "unjudged", "late"} and len(rewards) > 1:
            found[size].append([float(not has_signal(rewards))])
    shares = {size: mean(each) for size, each in sorted(found.items())} if len(found) > 1 else {}
    return {size: share for size, share in shares.items() if share is not None}


def staleness_report(steps: Sequence[StepRow], changes: Iterable[StalenessRow]) -> StalenessReport:
    """The report from the rows of a run."""
    return StalenessReport(by_lag=tuple(pooled(row.by_lag for row in steps)), changes=tuple(changes))


def learner_speed(rows: Sequence[StepRow]) -> LearnerSpeed:
    """The speed over the rows of a run."""
    told = [row for row in rows if row.wall_s]
    train_s = sum(row.train_s for row in told)
    shares = [row.utilisation * row.train_s for row in told if row.utilisation is not None]
    return LearnerSpeed(
        tokens_per_s=sum(row.num_sample_tokens for row in told) / train_s if train_s else 0.0,
        utilisation=sum(shares) / train_s if train_s and len(shares) == len(told) else None,
    )


def summed(rows: Iterable[StepJudging]) -> StepJudging | None:
    """The effect of judging over all steps. Each mean is weighted with its number of trajectories or tokens. None: there is no step."""
    steps = list(rows)
    if not steps:
        return None
    num_scored = sum(row.num_scored for row in steps)
    num_tokens = sum(row.num_tokens for row in steps)
    scores = sum(row.score_mean * row.num_scored for row in steps if row.score_mean is not None)
    return StepJudging(
        num_judged=sum(row.num_judged for row in steps),
        num_scored=num_scored,
        num_unjudged=sum(row.num_unjudged for row in steps),
        num_scored_replies=sum(row.num_scored_replies for row in steps),
        num_replies=sum(row.num_replies for row in steps),
        num_tokens=num_tokens,
        score_mean=scores / num_scored if num_scored else None,
        outcome_size=sum(row.outcome_size * row.num_tokens for row in steps) / (num_tokens or 1),
        process_size=sum(row.process_size * row.num_tokens for row in steps) / (num_tokens or 1),
    )


def context_costs(episodes: Sequence[EpisodeRow], steps: Sequence[StepRow]) -> ContextCosts:
    """The sums over training episodes with a reward, and over the trained trajectories."""
    return ContextCosts(
        num_cut_episodes=sum(row.num_cuts > 0 for row in episodes),
        num_cuts=sum(row.num_cuts for row in episodes),
        repeated_tokens=sum(row.repeated_tokens for row in episodes),
        num_episode_tokens=sum(row.num_tokens for row in episodes),
        num_samples=sum(row.num_samples for row in steps),
        num_sample_tokens=sum(row.num_sample_tokens for row in steps),
        num_unique_tokens=sum(row.num_unique_tokens for row in steps),
    )


def _gap_of(steps: Iterable[StepRow]) -> tuple[float | None, float | None]:
    """The largest and the mean gap over the tokens on which it was measured."""
    rows = [row for row in steps if row.is_gap_measured]
    if not rows:
        return None, None
    mean = _weighted(
        (row.logprob_gap_mean or 0.0, row.num_gap_tokens or row.num_trained_tokens) for row in rows
    )
    return max(row.logprob_gap_max or 0.0 for row in rows), mean


def _judging_report(directory: Path, rows: Iterable[EpisodeRow], steps: Iterable[StepRow]) -> JudgingReport:
    return JudgingReport(
        quality=judge_quality(read(directory, JudgementRow), rows),
        steps=summed(row.judging for row in steps if row.judging),
    )


def _provenance(steps: Iterable[StepRow], counts: RequestCounts) -> Provenance:
    return Provenance(
        num_replies=sum(row.num_proved_replies for row in steps), num_altered=counts.fates.get("altered", 0)
    )


def rate(episodes: Iterable[EpisodeRow]) -> Estimate | None:
    """Mean reward: groups are the independent draws, not their members."""
    groups = defaultdict[str, list[float]](list)
    for row in episodes:
        groups[row.group_id].append(row.reward or 0.0)
    return mean(groups.values())


def quarters_of(episodes: Sequence[EpisodeRow]) -> SuccessChange:
    """The rates of the first quarter and of the last."""
    quarter = max(1, len(episodes) // 4)
    return _change(rate(episodes[:quarter]), rate(episodes[-quarter:]))


def heldout_change(rows: Sequence[EvaluationRow], *, greedy: bool | None = None) -> SuccessChange:
    """Success before and after the run. `greedy` chooses the kind; by default it is the sampled one if there is one."""
    before, after = (evaluation(rows, name, greedy=greedy) for name in ("heldout_before", "heldout_after"))
    paired = before and after and paired_difference(before.rewards, after.rewards)
    return _change(before and before.estimate, after and after.estimate, paired)


def _change(before: Estimate | None, after: Estimate | None, paired: Estimate | None = None) -> SuccessChange:
    apart = difference(before, after) if before and after else None
    return SuccessChange(before=before, after=after, change=paired or apart)


def evaluation(
    rows: Iterable[EvaluationRow], name: str, *, greedy: bool | None = None
) -> EvaluationRow | None:
    """The last evaluation of that name on tasks.heldout. `greedy` chooses the kind; by default it is the sampled one if there is one."""
    named = [row for row in rows if row.name == name and not row.tasks and greedy in (None, row.greedy)]
    return min(reversed(named), key=lambda row: row.greedy, default=None)


def count_requests(
    rows: Sequence[EpisodeRow],
    steps: Iterable[StepRow],
    endings: Sequence[EndRow],
    passed_over: AbstractSet[int] = frozenset(),
) -> RequestCounts:
    """Counts requests, and finds those without an episode row.

    Groups have the positions 0, 1, 2, ... in the task order, except those in `passed_over`; each has members 0 ... size - 1.
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
    missing += skipped * min((sizes[place] for place in places), default=0)
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


def _weighted(pairs: Iterable[tuple[float, int]]) -> float | None:
    known = list(pairs)
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
