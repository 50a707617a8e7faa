"""The summary of a run, computed from its journal: what it achieved, how it ended, whether every request is accounted for.

Episodes are the training episodes with a reward, in the order they finished; success is their mean reward. A standard error
counts the members of one group as related, not as independent draws.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec

from trainer.judge.quality import JudgeQuality, judge_quality
from trainer.records.alarm_row import AlarmRow
from trainer.records.audit_row import AuditRow
from trainer.records.drift import DriftReport, drift_report
from trainer.records.journal import (
    EndRow,
    EpisodeRow,
    EvaluationRow,
    PublicationRow,
    QuarantineRow,
    SkippedRow,
    StalenessRow,
    StepRow,
    journal_of,
    read,
)
from trainer.records.judgement_row import JudgementRow
from trainer.records.lags import StalenessReport, staleness_report
from trainer.records.run_state import State, read_state
from trainer.records.statistics import mean_of_groups
from trainer.records.step_judging import StepJudging, summed
from trainer.records.step_seconds import StepSeconds, step_seconds
from trainer.where.findings import WhereFindings, where

Estimate = tuple[float, float] | tuple[None, None]
"""A mean and its standard error; None where there is nothing to estimate from."""


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the run's requests."""

    fates: dict[str, int]  # of training requests
    missing: int  # without an episode row: lost if the run is complete, else still open
    trained_twice: int
    dead: int  # failed at their last try
    is_complete: bool  # the run ended, and every request should have an episode row

    @property
    def lost(self) -> int:
        return self.missing if self.is_complete else 0

    @property
    def open(self) -> int:
        return 0 if self.is_complete else self.missing


class ContextCosts(msgspec.Struct, frozen=True, kw_only=True):
    """How much was cut out of contexts, and what cuts and samples of single turns cost. Older journals tell nothing: zeros."""

    num_cut_episodes: int = 0  # training episodes with a reward of which something was cut
    num_cuts: int = 0  # turns before which that happened
    repeated_tokens: int = 0  # that engines computed again because of it
    num_episode_tokens: int = 0  # told and sampled in these episodes, each counted once
    num_samples: int = 0  # that the trained trajectories were trained as
    num_sample_tokens: int = 0  # in these samples, which repeat what they share
    num_unique_tokens: int = 0  # in the trained trajectories, each counted once


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Whether what was trained is what engines sampled, by the digests of the replies. Older journals tell nothing: zeros."""

    num_replies: int = 0  # trained, and exactly as they were sampled
    num_altered: int = 0  # trajectories rejected because they were not


class JudgingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run's judge, and what it did to training. Both are None where nobody judges."""

    quality: JudgeQuality | None = None
    steps: StepJudging | None = None  # over all steps


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
    drift: DriftReport = DriftReport()
    provenance: Provenance = Provenance()
    context: ContextCosts = ContextCosts()
    evaluations: tuple[EvaluationRow, ...] = ()  # in order, by set, version, and sampled or greedy
    seconds: StepSeconds = StepSeconds()
    staleness: StalenessReport = StalenessReport()
    judging: JudgingReport = JudgingReport()
    alarms: tuple[AlarmRow, ...] = ()  # in order: where each began, and where it was over
    where: WhereFindings  # where the time went; of engines, only what the journal tells

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
    (first, first_error), (last, last_error) = _quarters(episodes)
    before, before_error = success(evaluations, "heldout_before")
    after, after_error = success(evaluations, "heldout_after")
    counts = count_requests(rows, steps, endings, {row.cursor for row in read(directory, SkippedRow)})
    state, (gap_max, gap_mean) = read_state(run_dir, steps, endings), _gap_of(steps)
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
        logprob_gap_max=gap_max,
        logprob_gap_mean=gap_mean,
        trained_over_sampled=trained / sampled if sampled else None,
        lost=counts.lost,
        trained_twice=counts.trained_twice,
        dead=counts.dead,
        open=counts.open,
        ended=counts.is_complete,
        success_first_quarter_standard_error=first_error,
        success_last_quarter_standard_error=last_error,
        heldout_before_standard_error=before_error,
        heldout_after_standard_error=after_error,
        heldout_before_greedy=success(evaluations, "heldout_before", greedy=True)[0],
        heldout_after_greedy=success(evaluations, "heldout_after", greedy=True)[0],
        num_trained_tokens=trained,
        num_sampled_tokens=sampled,
        seconds=step_seconds(steps),
        staleness=staleness_report(steps, read(directory, StalenessRow)),
        publications=sum(1 for _ in read(directory, PublicationRow)),
        fates=counts.fates,
        quarantined={row.task_id: row.reason for row in read(directory, QuarantineRow)},
        state=state.state,
        state_sentence=state.sentence,
        controls=dict(Counter(row.control for row in episodes if row.control)),
        drift=drift_report(read(directory, AuditRow)),
        provenance=_provenance(steps, counts),
        context=context_costs(episodes, steps),
        evaluations=tuple(sorted(evaluations, key=lambda row: (row.tasks, row.greedy, row.version))),
        judging=_judging_report(directory, rows, steps),
        alarms=tuple(read(directory, AlarmRow)),
        where=where(run_dir, read_rollouts=False),
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


def rate(episodes: Sequence[EpisodeRow]) -> Estimate:
    """Mean reward and its standard error: groups are the independent draws, not their members."""
    if not episodes:
        return None, None
    return mean_of_groups([(row.group_id, row.reward or 0.0) for row in episodes])


def _quarters(episodes: Sequence[EpisodeRow]) -> tuple[Estimate, Estimate]:
    """The rates of the first quarter and of the last."""
    quarter = max(1, len(episodes) // 4)
    return rate(episodes[:quarter]), rate(episodes[-quarter:])


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


def _weighted(pairs: Iterable[tuple[float, int]]) -> float | None:
    known = list(pairs)
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
