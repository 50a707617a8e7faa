"""`python -m trainer.report RUN_DIR`: what a run achieved, and whether its books balance.

Episodes are the training episodes with a reward, in the order they finished; success is their mean reward. A
standard error counts the members of one group as related, not as independent draws. Exit status: 0 well, 1 if
an episode was lost or trained twice, 2 misuse.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec

from trainer.records.journal import (
    EndRow,
    EpisodeRow,
    EvaluationRow,
    MalformedJournal,
    PublicationRow,
    QuarantineRow,
    SkippedRow,
    StepRow,
    journal_of,
    read,
)

Estimate = tuple[float, float] | tuple[None, None]
"""A mean and its standard error, or nothing to tell."""


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """What became of everything that was asked for, by count of requests."""

    fates: dict[str, int]  # of training requests
    missing: int  # neither answered nor withdrawn: lost if the run has ended, else still open
    trained_twice: int
    dead: int  # ended as failures after their last try
    ended: EndRow | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
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
    open: int  # asked for and not yet accounted for; only while the run has not ended
    ended: bool
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

    @property
    def healthy(self) -> bool:
        return not (self.lost or self.trained_twice)


def report_on(directory: Path) -> Report:
    """Read the journal in `directory`. Raises MalformedJournal."""
    rows = list({row.request_id: row for row in read(directory, EpisodeRow)}.values())
    steps = list(read(directory, StepRow))
    evaluations = list(read(directory, EvaluationRow))
    episodes = finished_episodes(rows)
    quarter = max(1, len(episodes) // 4)
    first, first_error = rate(episodes[:quarter])
    last, last_error = rate(episodes[-quarter:])
    before, before_error = success(evaluations, "heldout_before")
    after, after_error = success(evaluations, "heldout_after")
    passed_over = {row.cursor for row in read(directory, SkippedRow)}
    books = books_of(rows, steps, list(read(directory, EndRow)), passed_over)
    gaps = [
        (row.logprob_gap_max, row.logprob_gap_mean, row.num_trained_tokens)
        for row in steps
        if row.logprob_gap_max is not None and row.logprob_gap_mean is not None
    ]
    trained = sum(row.num_trained_tokens for row in steps)
    sampled = sum(row.num_unique_sampled_tokens for row in steps)
    return Report(
        episodes=len(episodes),
        success_first_quarter=first,
        success_last_quarter=last,
        heldout_before=before,
        heldout_after=after,
        steps=len(steps),
        lag_mean=_weighted((row.lag_mean, row.num_trajectories) for row in steps),
        lag_max=max((row.lag_max for row in steps), default=None),
        logprob_gap_max=max((gap_max for gap_max, _, _ in gaps), default=None),
        logprob_gap_mean=_weighted((gap_mean, num_tokens) for _, gap_mean, num_tokens in gaps),
        trained_over_sampled=trained / sampled if sampled else None,
        lost=books.missing if books.ended else 0,
        trained_twice=books.trained_twice,
        dead=books.dead,
        open=0 if books.ended else books.missing,
        ended=books.ended is not None,
        success_first_quarter_standard_error=first_error,
        success_last_quarter_standard_error=last_error,
        heldout_before_standard_error=before_error,
        heldout_after_standard_error=after_error,
        heldout_before_greedy=success(evaluations, "heldout_before", greedy=True)[0],
        heldout_after_greedy=success(evaluations, "heldout_after", greedy=True)[0],
        num_trained_tokens=trained,
        num_sampled_tokens=sampled,
        publications=sum(1 for _ in read(directory, PublicationRow)),
        fates=books.fates,
        quarantined={row.task_id: row.reason for row in read(directory, QuarantineRow)},
    )


def finished_episodes(rows: Iterable[EpisodeRow]) -> list[EpisodeRow]:
    """Training episodes with a reward, in the order they finished."""
    rewarded = (row for row in rows if row.purpose == "train" and row.reward is not None)
    return sorted(rewarded, key=lambda row: (row.finished_at, row.request_id))


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
    """Of the last evaluation with that name: the sampled one if there is one, unless `greedy` says which."""
    named = [row for row in rows if row.name == name and greedy in (None, row.greedy)]
    if not named:
        return None, None
    chosen = min(reversed(named), key=lambda row: row.greedy)
    return chosen.success, chosen.standard_error


def books_of(
    rows: Sequence[EpisodeRow],
    steps: Iterable[StepRow],
    endings: Sequence[EndRow],
    passed_over: AbstractSet[int] = frozenset(),
) -> Books:
    """Settle the accounts. Groups have places 0, 1, 2, ... in the task order, less those `passed_over`, and members
    0 ... size - 1; each has a row.
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
    complete = [row for row in endings if row.is_complete and row.step >= last_step]
    return Books(
        fates=dict(Counter(row.fate for row in rows if row.purpose == "train").most_common()),
        missing=missing,
        trained_twice=sum(times > 1 for times in trained.values()),
        dead=sum(row.outcome.startswith("failed:") for row in rows),
        ended=complete[-1] if complete else None,
    )


def table(report: Report, directory: Path) -> str:
    """The report for a person: percent with one standard error."""
    state = "ended" if report.ended else "still going, or stopped without a word"
    lines = [
        f"{directory}   {report.steps} steps, {report.publications} weight versions, {state}",
        "",
        f"{'success':<22}{'before':>16}{'after':>16}{'change':>12}",
        _comparison(
            "training (quarters)",
            (report.success_first_quarter, report.success_first_quarter_standard_error),
            (report.success_last_quarter, report.success_last_quarter_standard_error),
        ),
        _comparison(
            "held out",
            (report.heldout_before, report.heldout_before_standard_error),
            (report.heldout_after, report.heldout_after_standard_error),
        ),
        _comparison(
            "held out, greedy", (report.heldout_before_greedy, None), (report.heldout_after_greedy, None)
        ),
        "",
        f"{'lag':<22}mean {_number(report.lag_mean, '.2f')}, max {_number(report.lag_max, 'd')} versions",
        f"{'log-prob gap':<22}mean {_number(report.logprob_gap_mean, '.2e')}, "
        f"max {_number(report.logprob_gap_max, '.2e')} nats, engine against learner",
        f"{'tokens':<22}{report.num_trained_tokens:,} trained of {report.num_sampled_tokens:,} sampled: "
        f"{_number(report.trained_over_sampled, '.4f')}",
        f"{'episodes':<22}{report.episodes:,} with a reward; "
        + (
            ", ".join(f"{count:,} {fate.replace('_', ' ')}" for fate, count in report.fates.items())
            or "none yet"
        ),
        f"{'books':<22}{report.lost} lost, {report.trained_twice} trained twice, "
        f"{report.dead} dead, {report.open} open",
        *(f"{'quarantine':<22}{task_id}: {reason}" for task_id, reason in sorted(report.quarantined.items())),
    ]
    return "\n".join(lines)


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.report", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args(argv)
    journal = journal_of(arguments.run_dir)
    if not (journal / "episodes.jsonl").exists():
        parser.error(f"{arguments.run_dir} holds no episodes.jsonl; give the directory of a run")
    try:
        report = report_on(journal)
    except MalformedJournal as error:
        parser.error(str(error))
    print(msgspec.json.encode(report).decode() if arguments.json else table(report, arguments.run_dir))
    return 0 if report.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
