"""What a judge is worth, from the journal of a run: its scores beside the rewards of the rollouts that it judged.

A rollout is solved if its reward is 1; its score is the mean over its turns that have one. Judgements that came too late for
training count here too. A standard error and an interval count the members of one group as related.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from trainer.judge.agreement import Agreement, agreement
from trainer.judge.auc import Auc, ScoredRollouts
from trainer.records.journal import EpisodeRow
from trainer.records.judgement_row import JudgementRow
from trainer.records.statistics import mean_of_groups

NUM_SCORE_BINS = 5
MAX_VERSION_BINS = 8

MIN_AUC = 0.6
MIN_ROLLOUTS = 50
"""Fewer judged rollouts than this bring about no warning."""
MIN_OF_EACH = 10
"""Nor do fewer solved or unsolved ones, where they are compared."""
MIN_VALID_SHARE = 0.5
MIN_VOTES = 40
"""Fewer votes than this bring about no warning."""


class ScoreBin(msgspec.Struct, frozen=True, kw_only=True):
    """Some rollouts, or turns, with what the judge thinks of them and how many rollouts are solved."""

    label: str
    num: int
    score_mean: float
    success: float
    standard_error: float  # of `success`
    auc: float | None = None  # of these alone; None if it was not asked for, or there is nothing to compare


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """From the first third of the judged rollouts to the last, by the weights that sampled them."""

    score_change: float
    score_error: float  # standard error
    success_change: float
    success_error: float

    @property
    def is_gaming(self) -> bool:
        """Whether scores rise by more than two standard errors while success falls by more than one."""
        return self.score_change > 2 * self.score_error and self.success_change < -self.success_error


class JudgeQuality(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run."""

    fates: dict[str, int]  # of judge requests
    errors: dict[str, int]  # why the judge failed for good
    judges: dict[str, int]  # judgements by the model and weights, or the rule, that made them
    waited_s_mean: float | None  # over judgements that arrived
    waited_s_max: float | None
    num_turns: int
    num_scored_turns: int
    unscored: dict[str, int]  # turns without a score, by reason
    num_votes: int
    num_valid_votes: int
    agreement: Agreement
    num_rollouts: int  # with a score and a reward; the rest is about these
    auc: Auc | None  # of the rollout's score against whether it is solved
    auc_within_groups: Auc | None
    reliability: tuple[ScoreBin, ...]  # by score
    by_turn: tuple[ScoreBin, ...]  # turns, by their number
    by_length: tuple[ScoreBin, ...]  # by the number of turns of the rollout
    by_version: tuple[ScoreBin, ...]  # by the oldest weight version in the rollout
    trend: Trend | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JudgedRollout:
    """A judgement with a score, beside its rollout."""

    judgement: JudgementRow
    episode: EpisodeRow
    score: float

    @property
    def is_solved(self) -> bool:
        return self.episode.reward == 1

    @property
    def version(self) -> int:
        return -1 if self.episode.version_first is None else self.episode.version_first


def judge_quality(judgements: Iterable[JudgementRow], episodes: Iterable[EpisodeRow]) -> JudgeQuality | None:
    """None if nothing was judged in the run."""
    rows = list({row.rollout_id: row for row in judgements}.values())
    if not rows:
        return None
    arrived = [row for row in rows if row.turns]
    turns = [turn for row in arrived for turn in row.turns]
    rollouts = judged_rollouts(arrived, episodes)
    scored = _compared(rollouts)
    auc, trend = scored.auc(), _trend(rollouts)
    votes = [vote for turn in turns for vote in turn.votes]
    num_valid_votes = sum(vote is not None for vote in votes)
    return JudgeQuality(
        fates=dict(Counter(row.fate for row in rows).most_common()),
        errors=dict(Counter(row.error for row in rows if row.error).most_common()),
        judges=dict(Counter(row.judge for row in arrived).most_common()),
        waited_s_mean=fmean(row.waited_s for row in arrived) if arrived else None,
        waited_s_max=max((row.waited_s for row in arrived), default=None),
        num_turns=len(turns),
        num_scored_turns=sum(turn.score is not None for turn in turns),
        unscored=dict(
            Counter(turn.unscored or "unknown" for turn in turns if turn.score is None).most_common()
        ),
        num_votes=len(votes),
        num_valid_votes=num_valid_votes,
        agreement=agreement([vote for vote in turn.votes if vote is not None] for turn in turns),
        num_rollouts=len(rollouts),
        auc=auc,
        auc_within_groups=scored.auc_within_groups(),
        reliability=_binned(rollouts, _score_bin, _score_label),
        by_turn=_by_turn(rollouts),
        by_length=_binned(rollouts, lambda one: one.judgement.num_turns.bit_length(), _span_label),
        by_version=_by_version(rollouts),
        trend=trend,
        warnings=(*_vote_warnings(len(votes), num_valid_votes), *_warnings(auc, trend, len(rollouts))),
    )


def judged_rollouts(
    judgements: Iterable[JudgementRow], episodes: Iterable[EpisodeRow]
) -> list[JudgedRollout]:
    """The rollouts that have a score and a reward, in the order of their weights and then of their finish."""
    by_id = {row.request_id: row for row in episodes if row.reward is not None}
    found = [
        JudgedRollout(row, by_id[row.rollout_id], fmean(row.scores.values()))
        for row in judgements
        if row.scores and row.rollout_id in by_id
    ]
    return sorted(found, key=lambda one: (one.version, one.episode.finished_at, one.episode.request_id))


def _compared(rollouts: Sequence[JudgedRollout]) -> ScoredRollouts:
    return ScoredRollouts(
        [one.score for one in rollouts],
        [one.is_solved for one in rollouts],
        [one.episode.group_id for one in rollouts],
    )


def _vote_warnings(num_votes: int, num_valid: int) -> Iterable[str]:
    if num_votes >= MIN_VOTES and num_valid < MIN_VALID_SHARE * num_votes:
        yield (
            f"{num_valid:,} of {num_votes:,} votes are valid: read some with `python -m pipeline show ROLLOUT`, and change the judge's "
            "model, its templates or judge.max_new_tokens"
        )


def _warnings(auc: Auc | None, trend: Trend | None, num_rollouts: int) -> Iterable[str]:
    if num_rollouts < MIN_ROLLOUTS:
        return
    if auc and min(auc.num_solved, auc.num_unsolved) >= MIN_OF_EACH and auc.value < MIN_AUC:
        yield (
            f"the AUC of the judge's mean score is {auc.value:.3f}, below {MIN_AUC}: its scores hardly tell solved rollouts from "
            "others, so do not train on them"
        )
    if trend and trend.is_gaming:
        yield (
            f"scores rose by {trend.score_change:.3f} while success fell by {-100 * trend.success_change:.1f} points: "
            "the policy may be gaming the judge; lower credit.coefficient, or change the judge"
        )


def _trend(rollouts: Sequence[JudgedRollout]) -> Trend | None:
    """None: there are too few rollouts, or all were sampled by the same weights."""
    third = len(rollouts) // 3
    if third < 2 or rollouts[0].version == rollouts[-1].version:
        return None
    first, last = rollouts[:third], rollouts[-third:]
    (score_before, score_error_before), (score_after, score_error_after) = map(_score, (first, last))
    (before, error_before), (after, error_after) = map(_success, (first, last))
    return Trend(
        score_change=score_after - score_before,
        score_error=(score_error_before**2 + score_error_after**2) ** 0.5,
        success_change=after - before,
        success_error=(error_before**2 + error_after**2) ** 0.5,
    )


def _score(rollouts: Sequence[JudgedRollout]) -> tuple[float, float]:
    return mean_of_groups([(one.episode.group_id, one.score) for one in rollouts])


def _success(rollouts: Sequence[JudgedRollout]) -> tuple[float, float]:
    return mean_of_groups([(one.episode.group_id, float(one.is_solved)) for one in rollouts])


def _bin(label: str, scores: Sequence[float], rollouts: Sequence[JudgedRollout]) -> ScoreBin:
    success, standard_error = _success(rollouts)
    return ScoreBin(
        label=label,
        num=len(scores),
        score_mean=fmean(scores),
        success=success,
        standard_error=standard_error,
    )


def _binned(
    rollouts: Iterable[JudgedRollout],
    number_of: Callable[[JudgedRollout], int],
    label_of: Callable[[int], str],
) -> tuple[ScoreBin, ...]:
    bins: dict[int, list[JudgedRollout]] = defaultdict(list)
    for one in rollouts:
        bins[number_of(one)].append(one)
    return tuple(
        _bin(label_of(number), [one.score for one in members], members)
        for number, members in sorted(bins.items())
    )


def _score_bin(one: JudgedRollout) -> int:
    return min(int((one.score + 1) / 2 * NUM_SCORE_BINS), NUM_SCORE_BINS - 1)


def _score_label(number: int) -> str:
    width = 2 / NUM_SCORE_BINS
    return f"{number * width - 1:+.1f} to {(number + 1) * width - 1:+.1f}"


def _span_label(bits: int) -> str:
    """Of the numbers that have so many bits: 0, 1, 2-3, 4-7, 8-15, ..."""
    first, last = (1 << bits) >> 1, (1 << bits) - 1
    return f"{first}" if first == last else f"{first}-{last}"


def _by_turn(rollouts: Iterable[JudgedRollout]) -> tuple[ScoreBin, ...]:
    bins: dict[int, list[tuple[float, JudgedRollout]]] = defaultdict(list)
    for one in rollouts:
        for turn, score in one.judgement.scores.items():
            bins[turn.bit_length()].append((score, one))
    return tuple(
        _bin(_span_label(number), [score for score, _ in members], [one for _, one in members])
        for number, members in sorted(bins.items())
    )


def _by_version(rollouts: Sequence[JudgedRollout]) -> tuple[ScoreBin, ...]:
    """At most MAX_VERSION_BINS spans of versions with about as many versions each."""
    versions = sorted({one.version for one in rollouts})
    size = -(-len(versions) // MAX_VERSION_BINS) or 1
    bins: list[ScoreBin] = []
    for start in range(0, len(versions), size):
        span = versions[start : start + size]
        members = [one for one in rollouts if span[0] <= one.version <= span[-1]]
        label = str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}"
        found = _bin(label, [one.score for one in members], members)
        bins.append(msgspec.structs.replace(found, auc=_compared(members).area()))
    return tuple(bins)
