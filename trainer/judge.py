"""`python -m trainer.judge report RUN_DIR`: the quality of a run's judge, or the policy's distance from its teacher, also while the run
continues.

Exit status: 0 there is no warning; 1 there is one; 2 misuse.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec
import numpy as np
import numpy.typing as npt

from pipeline.commandline import VERB_PARSER, directory, program
from pipeline.intervals import HEADING, Estimate, clustered_mean, difference, mean, t_mean
from pipeline.journal.reading import MalformedJournal, NoJournal, found_journal, read
from pipeline.journal.rows import EpisodeRow, JudgementRow
from pipeline.message import json_line
from pipeline.screen import lines

NUM_RESAMPLES = 1000
INTERVAL = 0.95  # share of the bootstrap distribution within the interval
SEED = 0  # seed of the resampling, so that the same rollouts give the same interval

Floats = npt.NDArray[np.float64]


class Auc(msgspec.Struct, frozen=True, kw_only=True):
    """The area under one ROC curve, with its interval."""

    value: float
    low: float
    high: float
    num_solved: int  # number of solved rollouts that it compares
    num_unsolved: int


class ScoredRollouts:
    """The scores of rollouts, with each rollout's group and whether it is solved."""

    def __init__(self, scores: Sequence[float], solved: Sequence[bool], groups: Sequence[str]) -> None:
        self._solved_N = np.array(solved, np.bool_)
        self._groups_N = _numbered(groups)
        self._ranks_N = _numbered(scores)
        self._num_groups = int(self._groups_N.max(initial=-1)) + 1

    def area(self) -> float | None:
        """The area over all pairs of a solved and an unsolved rollout. None: there is no such pair."""
        value = self._area(np.ones(self._num_groups))
        return None if np.isnan(value) else value

    def auc(self) -> Auc | None:
        """The area with its interval."""
        return self._estimate(self._area)

    def auc_within_groups(self) -> Auc | None:
        """The area over the pairs that belong to one group, so that hard and easy tasks are not compared. None: there is no such pair."""
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
        """The area if each group counts `weights_G` times; NaN if there is no pair."""
        weights_N = weights_G[self._groups_N]
        num_ranks = int(self._ranks_N.max(initial=-1)) + 1
        solved = np.bincount(self._ranks_N, weights_N * self._solved_N, num_ranks)
        unsolved = np.bincount(self._ranks_N, weights_N * ~self._solved_N, num_ranks)
        pairs = solved.sum() * unsolved.sum()
        below = np.cumsum(unsolved) - unsolved
        return float(solved @ (below + unsolved / 2) / pairs) if pairs else np.nan

    def _estimate(self, area: Callable[[Floats], float]) -> Auc | None:
        """The estimate of what `area` computes from the number of times that each group counts; None if there is no pair."""
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
    """The index of each value in the sorted list of the distinct values."""
    return np.unique(np.array(values), return_inverse=True)[1].astype(np.int64)


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """The degree to which votes agree, over the turns that have two valid ones or more."""

    num_turns: int = 0
    unanimous: float | None = None  # share of these turns whose votes are all equal
    pairs: float | None = None  # share of pairs of votes on one turn that are equal
    # Krippendorff's alpha for nominal values: 1 is perfect agreement, 0 what chance brings about. None: all votes are equal.
    alpha: float | None = None


def agreement(turns: Iterable[Sequence[float]]) -> Agreement:
    """`turns` are the valid votes on each turn."""
    counts = [Counter(votes) for votes in turns if len(votes) > 1]
    if not counts:
        return Agreement()
    num_pairs = sum(_pairs(found.total()) for found in counts)
    equal_pairs = sum(_pairs(times) for found in counts for times in found.values())
    return Agreement(
        num_turns=len(counts),
        unanimous=sum(len(found) == 1 for found in counts) / len(counts),
        pairs=equal_pairs / num_pairs,
        alpha=_alpha(counts),
    )


def _alpha(counts: Sequence[Counter[float]]) -> float | None:
    """1 - observed disagreement / disagreement by chance. Each turn counts with its number of votes (Krippendorff, 2011)."""
    totals = sum(counts, Counter[float]())
    num_votes = totals.total()
    by_chance = num_votes**2 - sum(times**2 for times in totals.values())
    if not by_chance:
        return None
    observed = sum(
        (found.total() ** 2 - sum(times**2 for times in found.values())) / (found.total() - 1)
        for found in counts
    )
    return 1 - (num_votes - 1) * observed / by_chance


def _pairs(number: int) -> int:
    return number * (number - 1) // 2


NUM_SCORE_BINS = 5
MAX_VERSION_BINS = 8

MIN_AUC = 0.6
MIN_ROLLOUTS = 50
"""The number of judged rollouts below which there is no warning."""
MIN_OF_EACH = 10
"""The number of solved or unsolved rollouts below which no warning compares them."""
MIN_VALID_SHARE = 0.5
MIN_VOTES = 40
"""The number of votes below which there is no warning."""


class ScoreBin(msgspec.Struct, frozen=True, kw_only=True):
    """Some rollouts, or turns, with the judge's mean score and the number of solved rollouts."""

    label: str
    num: int
    score_mean: float
    success: Estimate
    # AUC within this bin; None if it was not asked for, or there is nothing to compare
    auc: float | None = None


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """The change from the first third of the judged rollouts to the last, ordered by the weights that sampled them."""

    score_change: Estimate
    success_change: Estimate

    @property
    def is_gaming(self) -> bool:
        """Whether scores rise while success falls: both 95 % intervals exclude no change."""
        return self.score_change.low > 0 and self.success_change.high < 0


class Teaching(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's distance from its teacher, over the rollouts whose log-probs joined: means over tokens of log p - log p_teacher, in
    nats, with groups as draws. Thirds are of the rollouts, ordered by the weights that sampled them.
    """

    num_rollouts: int
    num_tokens: int
    reverse_kl: Estimate
    first_third: Estimate | None  # this and the next: None with fewer than 6 rollouts
    last_third: Estimate | None


class JudgeQuality(msgspec.Struct, frozen=True, kw_only=True):
    """The quality of one run's judge."""

    fates: dict[str, int]  # judge requests by fate
    errors: dict[str, int]  # final failures of the judge by reason
    judges: dict[str, int]  # judgements by the model and weights, or the rule, that made them
    waited_s_mean: float | None  # mean over judgements that arrived
    waited_s_max: float | None
    num_turns: int
    num_scored_turns: int
    unscored: dict[str, int]  # turns without a score, by reason
    num_votes: int
    num_valid_votes: int
    agreement: Agreement
    num_rollouts: int  # rollouts with a score and a reward; the fields below are about these
    auc: Auc | None  # how well a rollout's score predicts whether it is solved
    auc_within_groups: Auc | None
    reliability: tuple[ScoreBin, ...]  # bins by score
    by_turn: tuple[ScoreBin, ...]  # bins of turns, by number of the turn
    by_length: tuple[ScoreBin, ...]  # bins by the number of turns of the rollout
    by_version: tuple[ScoreBin, ...]  # bins by the oldest weight version in the rollout
    trend: Trend | None
    warnings: tuple[str, ...]
    teaching: Teaching | None = None  # None: the judge is no teacher, or none of its log-probs joined


@dataclass(frozen=True, slots=True)
class JudgedRollout:
    """A judgement with a score, and its rollout."""

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
    """The quality of the judge; None if nothing was judged in the run."""
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
        teaching=_teaching(rows),
    )


def _teaching(rows: Iterable[JudgementRow]) -> Teaching | None:
    taught = [row for row in rows if row.num_taught_tokens]
    taught.sort(key=lambda row: (-1 if row.version_first is None else row.version_first, row.cursor))
    whole, third = _reverse_kl(taught), len(taught) // 3
    if whole is None:
        return None
    return Teaching(
        num_rollouts=len(taught),
        num_tokens=sum(row.num_taught_tokens for row in taught),
        reverse_kl=whole,
        first_third=_reverse_kl(taught[:third]) if third > 1 else None,
        last_third=_reverse_kl(taught[-third:]) if third > 1 else None,
    )


def _reverse_kl(rows: Iterable[JudgementRow]) -> Estimate | None:
    groups = defaultdict[str, list[JudgementRow]](list)
    for row in rows:
        groups[row.group_id].append(row)
    return clustered_mean(
        (sum(row.reverse_kl_sum for row in group), sum(row.num_taught_tokens for row in group))
        for group in groups.values()
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
            f"scores rose by {trend.score_change.value:.3f} while success fell by {-100 * trend.success_change.value:.1f} points: "
            "the policy may be gaming the judge; lower credit.coefficient, or change the judge"
        )


def _trend(rollouts: Sequence[JudgedRollout]) -> Trend | None:
    """The trend; None if there are too few rollouts, or if the same weights sampled all of them."""
    third = len(rollouts) // 3
    if third < 2 or rollouts[0].version == rollouts[-1].version:
        return None
    first, last = rollouts[:third], rollouts[-third:]
    return Trend(
        score_change=difference(_score(first), _score(last)),
        success_change=difference(_success(first), _success(last)),
    )


def _score(rollouts: Sequence[JudgedRollout]) -> Estimate:
    found = t_mean(_groups(rollouts, lambda one: one.score))
    assert found is not None, "there are rollouts"
    return found


def _success(rollouts: Sequence[JudgedRollout]) -> Estimate:
    found = mean(_groups(rollouts, lambda one: float(one.is_solved)))
    assert found is not None, "there are rollouts"
    return found


def _groups(
    rollouts: Iterable[JudgedRollout], value_of: Callable[[JudgedRollout], float]
) -> list[list[float]]:
    groups = defaultdict[str, list[float]](list)
    for one in rollouts:
        groups[one.episode.group_id].append(value_of(one))
    return list(groups.values())


def _bin(label: str, scores: Sequence[float], rollouts: Sequence[JudgedRollout]) -> ScoreBin:
    return ScoreBin(label=label, num=len(scores), score_mean=fmean(scores), success=_success(rollouts))


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
    """The label of the numbers with this many bits: 0, 1, 2-3, 4-7, 8-15, ..."""
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
    """Spans of versions, MAX_VERSION_BINS at most, with about as many versions each."""
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


def quality_lines(quality: JudgeQuality) -> Iterator[str]:
    """The whole report. Success is in percent."""
    yield from short_lines(quality)
    yield _line("judged by", _counts(quality.judges))
    yield _line("failures", _counts(quality.errors))
    yield from _table("score", "rollouts", quality.reliability)
    yield from _table("turn", "turns", quality.by_turn)
    yield from _table("turns of rollout", "rollouts", quality.by_length)
    yield from _table("weight versions", "rollouts", quality.by_version)
    yield from _trend_lines(quality)


def short_lines(quality: JudgeQuality) -> Iterator[str]:
    """The lines for a run's report: the number of judgements, their quality, and every warning."""
    waited = (
        ""
        if quality.waited_s_mean is None
        else f"; judgements arrived after {quality.waited_s_mean:.1f} s on average, {quality.waited_s_max:.1f} s at most"
    )
    yield _line("judge requests", f"{_counts(quality.fates)}{waited}")
    if quality.teaching is not None:
        yield from _teaching_lines(quality.teaching)
        return
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


def _teaching_lines(found: Teaching) -> Iterator[str]:
    yield _line(
        "reverse KL",
        f"{found.reverse_kl.plain('.4f')} nats a token to the teacher; {found.num_tokens:,} tokens of {found.num_rollouts:,} rollouts",
    )
    if found.first_third is not None and found.last_third is not None:
        change = f"{found.first_third.plain('.4f')} in the first third, {found.last_third.plain('.4f')} in the last"
        yield _line("reverse KL, drift", change)


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
    yield f"{name:<22}{counted:>10}{'mean score':>14}{'success, %':>22}{'AUC' if has_auc else '':>10}   {HEADING}"
    for one in bins:
        auc = "" if one.auc is None else f"{one.auc:.3f}"
        yield f"  {one.label:<20}{one.num:>10,}{one.score_mean:>+14.3f}{one.success.cell():>22}{auc:>10}".rstrip()


def _trend_lines(quality: JudgeQuality) -> Iterator[str]:
    trend = quality.trend
    if trend is None:
        return
    yield ""
    yield _line(
        "drift",
        f"from the first third to the last, scores {trend.score_change.plain('+.3f')}, success "
        f"{trend.success_change.percent('+')}",
    )


def _line(name: str, text: str) -> str:
    return f"{name:<22}{text}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in counts.items()) or "none"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=program("trainer.judge"), description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=VERB_PARSER, metavar="VERB")
    report = verbs.add_parser(
        "report",
        prog=program("trainer.judge", "report"),
        help="compare the scores of a run's judge with the rewards, or the policy with its teacher",
    )
    report.add_argument(
        "run_dir", type=directory, metavar="RUN_DIR", help="the directory of a run, as in runs/demo"
    )
    report.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    options = parser.parse_args(argv)
    try:
        journal = found_journal(options.run_dir, EpisodeRow)
        quality = judge_quality(read(journal, JudgementRow), read(journal, EpisodeRow))
    except (NoJournal, MalformedJournal) as error:
        report.error(str(error))
    if quality is None:
        report.error(
            f"{options.run_dir} holds no judgement: set [judge] method in the recipe, and start `python -m workers.judge`"
        )
    if options.json:
        print(json_line(quality))
    else:
        print(lines(list(quality_lines(quality))))
    return 1 if quality.warnings else 0


if __name__ == "__main__":
    sys.exit(main())
