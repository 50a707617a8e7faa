"""`python -m trainer.evaluate RECIPE --run-dir DIR`: the share of held-out tasks that given weights solve, without training.

The weights are published to the engines as a version of a run of their own, and each engine confirms them. Then the tasks go
through the same queue, workers and grader as in training. DIR/evaluations/RUN_ID holds the journal, and `outcomes.jsonl` with a
line per task and temperature. Exit status: 0 every episode was graded; 1 some were not, or the evaluation did not finish;
2 misuse, with what to change.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from pipeline.commandline import directory
from pipeline.intervals import HEADING, Estimate, mean
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow
from pipeline.message import json_line
from trainer import process
from trainer.inputs import Inputs, check_learner, check_precision, read_inputs
from trainer.process import TrainerSettings
from trainer.recipe import EvaluationRecipe, Recipe, load_recipe
from trainer.records.run_directory import sole_trainer, writable
from trainer.rollouts.heldout import Round

if TYPE_CHECKING:
    from trainer.loop.evaluations import Ending
    from trainer.records.console import Console
    from trainer.weights.publish import Exports

CHECKPOINTS = "checkpoints"  # directory of checkpoints in a run's directory


class TaskOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `outcomes.jsonl`: a task at one temperature."""

    temperature: float
    task_id: str
    rewards: tuple[float | None, ...]  # rewards of its episodes; None: without a verdict
    outcomes: tuple[str, ...]  # outcomes of the same episodes
    request_ids: tuple[str, ...]


class TemperatureResult(msgspec.Struct, frozen=True, kw_only=True):
    """Success at one temperature: the mean reward of the episodes that have one."""

    temperature: float
    success: float | None
    interval: tuple[float, float] | None  # at 95 %, with tasks as the draws
    episodes: int
    tasks: int
    failed: int  # episodes without a verdict; not in `success`


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    weights: str
    ending: str
    results: tuple[TemperatureResult, ...]
    outcomes: str  # path of outcomes.jsonl


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that are evaluated: a checkpoint of the learner, or a Hugging Face directory."""

    directory: Path
    is_checkpoint: bool


def main() -> int:
    arguments = _parse()
    return process.exit_status(lambda settings: _evaluate(arguments, settings))


def _evaluate(arguments: argparse.Namespace, settings: TrainerSettings) -> int:
    recipe = _recipe(arguments)
    weights = _weights(arguments, recipe)
    if not weights.is_checkpoint:  # they are whole, and so is their version
        recipe = replace(recipe, weights=replace(recipe.weights, adapters="merged"))
        check_precision(recipe, weights.directory)
    if weights.is_checkpoint:
        process.check_processes(recipe, settings)
        check_learner(recipe)
    if settings.rank != 0:  # only a learner that is spread over several processes needs them
        return process.follow(recipe, settings) if weights.is_checkpoint else 0
    inputs = read_inputs(recipe)
    rounds = list(_rounds(arguments, recipe, len(inputs.heldout)))
    with writable(arguments.run_dir):
        arguments.run_dir.mkdir(parents=True, exist_ok=True)
    with sole_trainer(arguments.run_dir):
        return _lead(recipe, inputs, weights, rounds, arguments, settings)


def _parse() -> argparse.Namespace:
    parser = process.recipe_parser("trainer.evaluate", __doc__, example="rollout.limits.turns=20")
    parser.add_argument(
        "--run-dir",
        type=Path,
        required=True,
        help="the directory of a run, or a new one; the results go below it",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--checkpoint",
        type=directory,
        help="evaluate this checkpoint; default the newest of --run-dir, else the recipe's model",
    )
    which.add_argument(
        "--model", type=directory, help="evaluate this Hugging Face directory, with its own tokenizer"
    )
    parser.add_argument(
        "--tasks", type=Path, help="the tasks to evaluate on; default the recipe's tasks.heldout"
    )
    parser.add_argument("--episodes", type=int, help="episodes at each temperature; default one per task")
    parser.add_argument(
        "--temperature",
        type=float,
        action="append",
        metavar="T",
        help="sampling temperature; may be repeated; default the recipe's and 0 (greedy: one episode per task at most)",
    )
    parser.add_argument(
        "--harness",
        metavar="NAME",
        help="an agent program plays in place of the recipe's agent, as rollout.harness says it; its context is not cut",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_args()


def _recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe, with the tasks, the model and the agent program of the command line."""
    changes = [*arguments.set, "evaluation.episodes=0", "evaluation.greedy_episodes=0"]
    if arguments.harness:
        changes += [f"rollout.harness={arguments.harness}", "rollout.context.policy=stop"]
    recipe = load_recipe(arguments.recipe, changes)
    if arguments.tasks:
        recipe = replace(recipe, tasks=replace(recipe.tasks, heldout=str(arguments.tasks.resolve())))
    if not recipe.tasks.heldout:
        raise ValueError("there are no tasks to evaluate on: give --tasks, or tasks.heldout in the recipe")
    if arguments.model:
        recipe = replace(recipe, model=str(arguments.model.resolve()))
    return recipe


def _weights(arguments: argparse.Namespace, recipe: Recipe) -> Weights:
    """The weights to evaluate. Raises ValueError for a directory without the expected content."""
    from trainer.loop.checkpoints import Checkpoints

    newest = Checkpoints(arguments.run_dir / CHECKPOINTS, keep=1).latest()
    checkpoint: Path | None = arguments.checkpoint or (None if arguments.model else newest)
    if checkpoint is not None:
        if not (checkpoint / "metadata.json").is_file():
            raise ValueError(
                f"{checkpoint} holds no checkpoint: give a directory as in runs/demo/checkpoints/step-00000008"
            )
        return Weights(checkpoint.resolve(), is_checkpoint=True)
    model = Path(recipe.model)
    if not any(model.glob("*.safetensors")):
        raise ValueError(f"{model} holds no .safetensors file: give a Hugging Face directory")
    return Weights(model, is_checkpoint=False)


def _rounds(arguments: argparse.Namespace, recipe: Recipe, num_tasks: int) -> Iterator[Round]:
    wanted: int = num_tasks if arguments.episodes is None else arguments.episodes
    if wanted < 1 or (wanted > num_tasks and wanted % num_tasks):
        raise ValueError(
            f"--episodes {wanted}: there are {num_tasks} tasks; give their number, a smaller one, or a multiple"
        )
    per_task = max(1, wanted // num_tasks)
    for temperature in dict.fromkeys(arguments.temperature or (recipe.rollout.sampling.temperature, 0.0)):
        if temperature < 0:
            raise ValueError(f"--temperature {temperature:g}: it must be 0, which is greedy, or above")
        sampled = EvaluationRecipe(episodes=wanted, samples_per_task=per_task)
        greedy = EvaluationRecipe(greedy_episodes=min(wanted, num_tasks))
        yield Round(temperature, sampled if temperature else greedy)


def _lead(
    recipe: Recipe,
    inputs: Inputs,
    weights: Weights,
    rounds: Sequence[Round],
    arguments: argparse.Namespace,
    settings: TrainerSettings,
) -> int:
    run_id = f"evaluate-{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    root: Path = arguments.run_dir.resolve() / "evaluations" / run_id
    with process.console_on(sys.stderr) as console:
        ending = asyncio.run(_conduct(recipe, inputs, weights, rounds, root, settings, console))
    summary = _summed_up(root, rounds, str(weights.directory), ending)
    print(json_line(summary) if arguments.json else table(summary))
    judged = all(result.episodes and not result.failed for result in summary.results)
    return 0 if ending == "finished" and judged else 1


async def _conduct(
    recipe: Recipe,
    inputs: Inputs,
    weights: Weights,
    rounds: Sequence[Round],
    root: Path,
    settings: TrainerSettings,
    console: "Console",
) -> "Ending":
    from trainer.loop.evaluations import StandaloneEvaluation

    stop = asyncio.Event()
    process.stop_on_signal(stop.set)
    async with _export(recipe, weights, settings) as export:
        evaluation = StandaloneEvaluation(recipe, inputs, root, console, stop, router_url=settings.router_url)
        return await evaluation.run(rounds, export)


@contextlib.asynccontextmanager
async def _export(recipe: Recipe, weights: Weights, settings: TrainerSettings) -> AsyncIterator["Exports"]:
    """Yields a function that writes the weights at a path as an export of the learner does. The function may block, in any thread."""
    if not weights.is_checkpoint:
        yield lambda _, place: shutil.copytree(weights.directory, place, copy_function=_link)
        return
    from trainer.loop.learner_thread import LearnerThread

    learner = await LearnerThread.start(lambda: process.make_feed(recipe, settings))
    try:
        await learner.call("restore", weights.directory)
        yield learner.call_blocking
    finally:
        await learner.stop()


def _link(source: str, target: str) -> None:
    """Hard-link the file, which nobody writes into; copy it across file systems."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)


def _summed_up(root: Path, rounds: Sequence[Round], weights: str, ending: str) -> EvaluationSummary:
    """Write `outcomes.jsonl`, and compute success at each temperature."""
    rows = list(read(root / "journal", EpisodeRow))
    path, results = root / "outcomes.jsonl", list[TemperatureResult]()
    with path.open("wb") as file:
        for one in rounds:
            played = [row for row in rows if row.evaluation == one.name and row.fate != "withdrawn"]
            judged = [row for row in played if row.reward is not None]
            results.append(_result(one.temperature, judged, num_failed=len(played) - len(judged)))
            file.writelines(msgspec.json.encode(line) + b"\n" for line in _outcomes(one, played))
    return EvaluationSummary(
        run_id=root.name, weights=weights, ending=ending, results=tuple(results), outcomes=str(path)
    )


def _result(temperature: float, judged: Sequence[EpisodeRow], *, num_failed: int) -> TemperatureResult:
    by_task = defaultdict[str, list[float]](list)
    for row in judged:
        by_task[row.task_id].append(row.reward or 0.0)
    found = mean(list(by_task.values()))
    return TemperatureResult(
        temperature=temperature,
        success=found and found.value,
        interval=found and (found.low, found.high),
        episodes=len(judged),
        tasks=len(by_task),
        failed=num_failed,
    )


def _outcomes(one: Round, played: Sequence[EpisodeRow]) -> Iterator[TaskOutcome]:
    for task_id in dict.fromkeys(row.task_id for row in played):
        mine = sorted((row for row in played if row.task_id == task_id), key=lambda row: row.member)
        yield TaskOutcome(
            temperature=one.temperature,
            task_id=task_id,
            rewards=tuple(row.reward for row in mine),
            outcomes=tuple(row.outcome for row in mine),
            request_ids=tuple(row.request_id for row in mine),
        )


def table(summary: EvaluationSummary) -> str:
    """The summary as text: success in percent."""
    lines = [
        f"{summary.weights}: {summary.ending}",
        f"success in percent, {HEADING}",
        "temperature             success  episodes  tasks  without a verdict",
    ]
    for one in summary.results:
        success = (
            "-"
            if one.success is None or one.interval is None
            else Estimate(one.success, *one.interval, one.tasks).cell()
        )
        lines.append(f"{one.temperature:>11g}{success:>20}{one.episodes:>10}{one.tasks:>7}{one.failed:>19}")
    return "\n".join([*lines, summary.outcomes])


if __name__ == "__main__":
    sys.exit(main())
