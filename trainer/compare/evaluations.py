"""Rewards by task of an evaluation, from the directory of a run or of an evaluation of either kind."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipeline.journal.reading import identity, journal_of, read
from pipeline.journal.rows import EvaluationRow
from trainer.compare.looks import Pair, Rewards
from trainer.evaluate.results import RECORD, EvaluationDirectory, graded_runs
from trainer.evaluate.weights import TaskOutcome

OUTCOMES = "outcomes.jsonl"
SHOWN_AT_MOST = 3  # number of tasks named in an error


def rewards_of(path: Path, *, name: str, tasks: str, greedy: bool) -> Rewards:
    """The rewards of the evaluation in `path`: of a run, those of its last evaluation with that name, on that held-out set. Raises
    ValueError if there are none.
    """
    if (path / RECORD).is_file():
        found = EvaluationDirectory(path, "")
        found.open()
        rewards: Rewards = graded_runs(found.known.values())
    elif (path / OUTCOMES).is_file():
        rewards = _of_outcomes(path / OUTCOMES, greedy=greedy)
    else:
        rewards = _of_run(path, name=name, tasks=tasks, greedy=greedy)
    graded = {task: runs for task, runs in rewards.items() if runs}
    if not graded:
        raise ValueError(f"{path} has no episode with a verdict: evaluate again before comparing")
    return graded


def _of_outcomes(file: Path, *, greedy: bool) -> Rewards:
    lines = [msgspec.json.decode(line, type=TaskOutcome) for line in file.read_bytes().splitlines()]
    temperatures = {one.temperature for one in lines if (one.temperature == 0) == greedy}
    if len(temperatures) != 1:
        raise ValueError(
            f"{file} has {len(temperatures)} {'greedy' if greedy else 'sampled'} temperatures, and one is compared: "
            "evaluate with one --temperature, or choose with --greedy"
        )
    return {
        one.task_id: [reward for reward in one.rewards if reward is not None]
        for one in lines
        if one.temperature in temperatures
    }


def _of_run(path: Path, *, name: str, tasks: str, greedy: bool) -> Rewards:
    if identity(path).kind == "sft":
        raise ValueError(
            f"{path} is of supervised fine-tuning, which plays no episodes: evaluate its weights with swerve evaluate, and compare the "
            "directories of evaluations"
        )
    rows = list(read(journal_of(path), EvaluationRow))
    chosen = [row for row in rows if (row.name, row.tasks, row.greedy) == (name, tasks, greedy)]
    if not chosen:
        known = ", ".join(sorted({row.name for row in rows})) or "none"
        raise ValueError(
            f"{path} has no {'greedy' if greedy else 'sampled'} evaluation {name!r} on {tasks or 'tasks.heldout'}: it has {known}; "
            "name one with --evaluation, or set evaluation.episodes in the recipe"
        )
    if chosen[-1].num_episodes and not chosen[-1].rewards:
        raise ValueError(
            f"{path}: evaluations.jsonl has no rewards by task, because an earlier release wrote it; "
            "evaluate its weights with swerve evaluate"
        )
    return chosen[-1].rewards


def checked(pairs: Sequence[tuple[tuple[Path, Rewards], tuple[Path, Rewards]]]) -> list[Pair]:
    """The pairs, if all evaluations are of the same tasks. Raises ValueError for the first that is not."""
    (first, expected), _ = pairs[0]
    for path, rewards in (one for pair in pairs for one in pair):
        if missing := [*(expected.keys() ^ rewards.keys())]:
            named = ", ".join(sorted(missing)[:SHOWN_AT_MOST])
            raise ValueError(
                f"tasks.heldout: {first} and {path} have verdicts of different tasks ({len(missing)} in one only, as {named}): "
                "evaluate both on the same tasks, and play again what has no verdict"
            )
    return [(a, b) for (_, a), (_, b) in pairs]
