"""`python -m trainer.compare.power EVALUATION [EVALUATION ...]`: how many tasks, episodes or seeds would tell two recipes apart?

EVALUATION is what `swerve compare` takes. It gives the rates of tasks; further ones, of the same recipe trained with other seeds, give the
spread between runs. Numbers are those of each side, for `swerve compare` with any number of looks. Exit status: 0; 2 misuse.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import ceil, sqrt
from statistics import fmean, variance

from pipeline.commandline import MISUSE, directory, program
from pipeline.errors import describe_error
from pipeline.intervals import TAIL, t_quantile
from pipeline.message import json_line
from pipeline.screen import lines
from trainer.compare.evaluations import checked, rewards_of
from trainer.compare.looks import INFLATION, Rewards, planned_information

EPISODES = (1, 2, 4, 8, 16)  # numbers of episodes per task for which the table shows how many tasks are needed
MOST_SEEDS = 100
MOST_EPISODES = 1000


@dataclass(frozen=True, slots=True)
class Noise:
    """What makes a difference uncertain. All but the first are of rewards, whose range is 0 to 1."""

    num_tasks: int
    success: float
    within: float  # variance of an episode's reward about the rate of its task
    correlation: float  # of the two recipes' episodes of one task
    task_spread: float  # standard deviation of the true difference over tasks
    seed_spread: float  # standard deviation of a recipe's success over seeds

    def of_difference(self, *, tasks: float, episodes: int, seeds: int = 1) -> float:
        """The variance of the difference, but for what seeds add."""
        return (self.task_spread**2 + 2 * self.within * (1 - self.correlation) / (episodes * seeds)) / tasks

    def of_seeds(self, seeds: int) -> float:
        return 2 * self.seed_spread**2 / seeds


@dataclass(frozen=True, slots=True)
class Needed:
    """What finds the difference. None: no number does."""

    tasks: dict[int, int]  # number of tasks by episodes of each, for one run of each recipe
    episodes: int | None  # of each task that there is, for one run of each recipe
    seeds: int | None  # runs of each recipe, each evaluated with `episodes_each` on the tasks that there are
    episodes_each: int
    naive_episodes: int  # in all, of two independent samples looked at once


def needed(noise: Noise, *, detect: float, power: float, episodes_each: int) -> Needed:
    planned = planned_information(detect, power)
    tasks = {k: ceil(planned * noise.of_difference(tasks=1, episodes=k)) for k in EPISODES}
    enough = (
        k
        for k in range(1, MOST_EPISODES + 1)
        if noise.of_difference(tasks=noise.num_tasks, episodes=k) * planned <= 1
    )
    seeds = (
        count for count in range(2, MOST_SEEDS + 1) if _is_found(noise, count, episodes_each, detect, power)
    )
    naive = planned / INFLATION * noise.success * (1 - noise.success)
    return Needed(tasks, next(enough, None), next(seeds, None), episodes_each, 4 * ceil(naive))


def _is_found(noise: Noise, seeds: int, episodes: int, detect: float, power: float) -> bool:
    """Whether `seeds` pairs of runs find the difference with the probability `power`. Degrees of freedom are Satterthwaite's, as in
    `difference_of`.
    """
    of_tasks = noise.of_difference(tasks=noise.num_tasks, episodes=episodes, seeds=seeds)
    total = of_tasks + noise.of_seeds(seeds)
    parts = noise.of_seeds(seeds) ** 2 / (seeds - 1) + of_tasks**2 / max(1, noise.num_tasks - 1)
    degrees = max(seeds - 1, int(total**2 / parts)) if parts else seeds - 1
    quantiles = t_quantile(degrees, TAIL) + t_quantile(degrees, 1 - power)
    return detect >= sqrt(INFLATION * total) * quantiles


def noise_of(
    runs: Sequence[Rewards], *, correlation: float, task_spread: float, seed_spread: float | None
) -> Noise:
    """The noise of one recipe, from its evaluations. With one episode of each task, all of the variance counts as that of episodes."""
    rates = [fmean(map(fmean, run.values())) for run in runs]
    several = [each for run in runs for each in run.values() if len(each) > 1]
    success = fmean(rates)
    within = fmean(map(variance, several)) if several else success * (1 - success)
    if seed_spread is None:
        num_tasks, num_episodes = len(runs[0]), fmean(map(len, runs[0].values()))
        of_episodes = within / (num_tasks * num_episodes)
        seed_spread = sqrt(max(0.0, variance(rates) - of_episodes)) if len(runs) > 1 else 0.0
    return Noise(len(runs[0]), success, within, correlation, task_spread, seed_spread)


def report(noise: Noise, found: Needed, *, detect: float, power: float) -> Iterator[str]:
    points = f"{100 * detect:g} points at {100 * power:g} % power, with 5 % of false alarms"
    yield f"to find {points}:"
    yield (
        f"assumed: {noise.num_tasks} tasks, success {100 * noise.success:.1f} %, correlation {noise.correlation:g}, "
        f"differences of tasks spread by {100 * noise.task_spread:.1f} points, runs of one recipe by {100 * noise.seed_spread:.1f}"
    )
    for episodes, tasks in found.tasks.items():
        yield f"{tasks:>8,} tasks of {episodes:>2} episodes each, {2 * tasks * episodes:,} episodes in all"
    these = "no number of" if found.episodes is None else f"{found.episodes:,}"
    yield f"{these} episodes of each of these {noise.num_tasks} tasks, for these weights"
    seeds = f"more than {MOST_SEEDS}" if found.seeds is None else str(found.seeds)
    yield f"{seeds} runs of each recipe, with {found.episodes_each} episodes of each of these tasks, for the recipes"
    yield f"{found.naive_episodes:,} episodes in all, if they were not paired by task"


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("trainer.compare.power"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("evaluations", type=directory, nargs="+", metavar="EVALUATION")
    add_choice(parser)
    parser.add_argument(
        "--detect", type=float, default=3.0, help="the difference to find, in points; default 3"
    )
    parser.add_argument(
        "--power", type=float, default=80.0, help="how often to find it, in percent; default 80"
    )
    parser.add_argument(
        "--correlation", type=float, default=0.0, help="of both recipes' episodes of a task; default 0"
    )
    parser.add_argument(
        "--task-spread", type=float, help="of the difference over tasks, in points; default --detect"
    )
    parser.add_argument(
        "--seed-spread", type=float, help="of a recipe's success over seeds, in points; default measured"
    )
    parser.add_argument(
        "--episodes", type=int, default=1, help="episodes of each task in each run; default 1"
    )
    options = parser.parse_args(argv)
    if not -1 <= options.correlation < 1:
        parser.error(f"--correlation {options.correlation:g}: give a number from -1 to below 1")
    if options.episodes < 1:
        parser.error(f"--episodes {options.episodes}: give 1 or more")
    if not 0 < options.detect <= 100:
        parser.error(f"--detect {options.detect:g}: give points above 0, and at most 100")
    if not 50 <= options.power < 100:
        parser.error(f"--power {options.power:g}: give percent from 50 to below 100")
    return options


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Adds what `swerve compare` and `swerve power` both have: which evaluation."""
    parser.add_argument("--evaluation", default="heldout_after", help="of a run; default heldout_after")
    parser.add_argument(
        "--set", default="", help="a held-out set of a run by its name; default tasks.heldout"
    )
    parser.add_argument("--greedy", action="store_true", help="greedy episodes; default sampled ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    detect, power = options.detect / 100, options.power / 100
    try:
        runs = [
            (path, rewards_of(path, name=options.evaluation, tasks=options.set, greedy=options.greedy))
            for path in options.evaluations
        ]
        checked([(runs[0], one) for one in runs])
    except (OSError, ValueError) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return MISUSE
    noise = noise_of(
        [rewards for _, rewards in runs],
        correlation=options.correlation,
        task_spread=detect if options.task_spread is None else options.task_spread / 100,
        seed_spread=None if options.seed_spread is None else options.seed_spread / 100,
    )
    found = needed(noise, detect=detect, power=power, episodes_each=options.episodes)
    told = {"noise": asdict(noise), "needed": asdict(found)}
    print(json_line(told) if options.json else lines(list(report(noise, found, detect=detect, power=power))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
