"""What judging did to the steps of a run: how many trajectories were trained with a judgement, and how far scores moved credit."""

from collections.abc import Iterable

import msgspec


class StepJudging(msgspec.Struct, frozen=True, kw_only=True):
    """Of one step, or of all steps of a run. Rewards and scores stay apart: no score is part of a reward."""

    num_judged: int  # trajectories trained with a judgement
    num_scored: int  # of them, those that have a score
    num_unjudged: int  # trained without one, because it came too late or the judge failed
    num_scored_replies: int  # trained replies of turns that have a score
    num_replies: int  # trained
    num_tokens: int  # trained
    # Over trained trajectories that have scores, of the mean score of each; None: there is none.
    score_mean: float | None
    # Of the advantages, the mean size over trained tokens: by rewards alone, and of what scores change in them.
    outcome_size: float
    process_size: float


def summed(rows: Iterable[StepJudging]) -> StepJudging | None:
    """Of all steps. Each mean is weighted with what it was taken over, trajectories or tokens. None: there is no step."""
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


def judging_sentence(found: StepJudging) -> str:
    """For people, in one line."""
    total = found.num_judged + found.num_unjudged
    share = found.num_scored_replies / found.num_replies if found.num_replies else 0.0
    mean = "" if found.score_mean is None else f", mean score {found.score_mean:+.3f}"
    return (
        f"{found.num_judged:,} of {total:,} trajectories trained with a judgement, {share:.0%} of their replies with a score{mean}; "
        f"advantages of {found.outcome_size:.3f} by rewards, moved by {found.process_size:.3f}"
    )
