"""How long episodes are, and how many have to run at once: Little's law.

Lengths come from a run's journal where one is given, from the recipe's table [plan] otherwise, and from its limits where that
leaves them out.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import msgspec

from trainer.plan.engines import EnginePlan
from trainer.recipe import Recipe
from trainer.records.journal import EpisodeRow, journal_of, read

SAMPLED_SHARE = 0.3  # of an episode's tokens, where nothing is known
ROUNDS = 40  # of the fixed point between the episodes that run and their length; it converges in about ten


class EpisodeLength(msgspec.Struct, frozen=True, kw_only=True):
    """The mean episode."""

    turns: float
    tokens: float  # of its last context: prompt, replies and observations
    sampled_tokens: float
    tool_s: float  # that no engine works on it: commands, containers, grading
    # From claim to verdict, where it is known; None: it follows from the engines' speed.
    seconds: float | None
    source: str  # where the numbers are from, for people


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Episodes that must run at once so that the learner never waits, and what limits them."""

    num_needed: int  # 0: the engines cannot keep up with the learner, however many run
    episode_s: float  # with so many at once, or with as many as are possible
    num_possible: int  # that slots, admission and the KV cache allow
    episodes_per_s: float  # with as many as are possible, or as are needed if those are fewer


def episode_length(recipe: Recipe, run_dir: Path | None) -> EpisodeLength:
    """Raises ValueError if `run_dir` holds no finished episode."""
    if run_dir is not None:
        return _measured(run_dir)
    plan, limits = recipe.plan, recipe.rollout.limits
    turns = plan.episode_turns or max(limits.turns / 2, 1)
    tokens = plan.episode_tokens or limits.context_tokens / 2
    given = [plan.episode_turns, plan.episode_tokens, plan.episode_sampled_tokens]
    return EpisodeLength(
        turns=turns,
        tokens=tokens,
        sampled_tokens=plan.episode_sampled_tokens or tokens * SAMPLED_SHARE,
        tool_s=turns * plan.command_s + plan.grade_s,
        seconds=plan.episode_s,
        source="given" if all(given) else "assumed from the recipe's limits, except for what [plan] gives",
    )


def _measured(run_dir: Path) -> EpisodeLength:
    rows = [
        row
        for row in read(journal_of(run_dir), EpisodeRow)
        if row.purpose == "train" and row.num_turns and row.claimed_at and row.finished_at
    ]
    if not rows:
        raise ValueError(f"--measured {run_dir}: its journal holds no finished training episode")
    seconds = fmean([row.finished_at - row.claimed_at for row in rows])
    return EpisodeLength(
        turns=fmean([row.num_turns for row in rows]),
        tokens=fmean([row.num_tokens for row in rows]),
        sampled_tokens=fmean([row.sampled_tokens for row in rows]),
        tool_s=0.0,
        seconds=seconds,
        source=f"measured over {len(rows)} episodes of {run_dir}",
    )


def episode_s(length: EpisodeLength, engines: EnginePlan, num_at_once: float) -> float:
    """Seconds of an episode where `num_at_once` run: tools, prompts, and replies at the speed that so many requests leave each."""
    if length.seconds is not None:
        return length.seconds
    # A context grows from its opening to its end; the radix cache holds what is repeated.
    context_tokens, told_tokens = length.tokens / 2, length.tokens - length.sampled_tokens
    seconds = length.tool_s
    for _ in range(ROUNDS):
        generating = num_at_once * max(1 - length.tool_s / seconds, 0.01) / engines.num_engines
        reading_s = told_tokens / engines.prompt_tokens_per_s() * max(generating, 1)
        replying_s = length.sampled_tokens * engines.decode_s_per_token(generating, context_tokens)
        seconds = (seconds + length.tool_s + reading_s + replying_s) / 2
    return seconds


def demand(length: EpisodeLength, engines: EnginePlan, *, episodes_per_s: float, num_possible: int) -> Demand:
    """Little's law: as many run at once as end in a second times the seconds that each takes."""
    most = max(num_possible * 16, 4096)
    needed = _least(lambda count: count >= episodes_per_s * episode_s(length, engines, count), most)
    running = min(needed or num_possible, num_possible)
    seconds = episode_s(length, engines, running)
    return Demand(
        num_needed=needed,
        episode_s=seconds,
        num_possible=num_possible,
        episodes_per_s=running / seconds,
    )


def _least(holds: Callable[[int], bool], most: int) -> int:
    """The smallest count up to `most` for which `holds`; 0 if there is none. What holds for one count holds for all above."""
    if not holds(most):
        return 0
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
