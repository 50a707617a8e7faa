"""What `swerve compare` takes to tell two recipes apart, against two independent samples of a fixed size; and how often it is wrong.

python -m benchmarks.compare [--json] [--short]

A model of evaluations, without a policy: rates of 200 tasks have a beta distribution of mean 0.5 and concentration 1, and B's are moved in
logits so that their mean is 3 points higher. A share of the episodes, `common`, has the same random number for both. The rival
has two samples of independent episodes of drawn tasks, as large as its 80 % power wants. Twins are runs of one recipe: the level of each
differs by its seed, with a standard deviation of 2 points, and pairs are added one by one.
"""

import random
import sys
from collections.abc import Callable
from functools import partial
from math import exp, log

from benchmarks.report import Comparison, main
from pipeline.intervals import wilson_interval
from trainer.compare.looks import Look, Pair, looks
from trainer.compare.power import Needed, Noise, needed

DETECT, POWER = 0.03, 0.8
NUM_TASKS = 200
MOST_PAIRS = 10
NUM_TWINS = 40
SEED_SPREAD = 0.02


def planned(common: float) -> Needed:
    """What `swerve power` plans for these rates."""
    noise = Noise(NUM_TASKS, 0.5, 0.125, common, 0.0, SEED_SPREAD)
    return needed(noise, detect=DETECT, power=POWER, episodes_each=1)


NAIVE_EPISODES = planned(0.0).naive_episodes


def rates(draw: random.Random) -> list[float]:
    return [min(max(draw.betavariate(0.5, 0.5), 1e-6), 1 - 1e-6) for _ in range(NUM_TASKS)]


def moved(before: list[float], points: float) -> list[float]:
    """The rates moved by one number of logits, so that their mean is higher by `points`."""
    low, high = -5.0, 5.0
    for _ in range(20):
        shift = (low + high) / 2
        after = [1 / (1 + exp(-log(one / (1 - one)) - shift)) for one in before]
        is_enough = sum(after) - sum(before) > points * len(before)
        low, high = (low, shift) if is_enough else (shift, high)
    return after


def evaluated(draw: random.Random, a: list[float], b: list[float], episodes: int, common: float) -> Pair:
    first: dict[str, list[float]] = {}
    second: dict[str, list[float]] = {}
    for task, (rate_a, rate_b) in enumerate(zip(a, b, strict=True)):
        numbers = [draw.random() for _ in range(episodes)]
        others = [one if draw.random() < common else draw.random() for one in numbers]
        first[str(task)] = [float(one < rate_a) for one in numbers]
        second[str(task)] = [float(one < rate_b) for one in others]
    return first, second


def weights(draw: random.Random, *, points: float, common: float) -> list[Look]:
    before = rates(draw)
    plan = planned(common).episodes
    assert plan is not None, "some number of episodes finds it"
    return looks([evaluated(draw, before, moved(before, points), plan, common)], plan)


def recipes(draw: random.Random, *, points: float) -> list[Look]:
    """Pairs of runs with other seeds, one episode of each task."""
    base, pairs = rates(draw), list[Pair]()
    for _ in range(MOST_PAIRS):
        a, b = (moved(base, draw.gauss(mean, SEED_SPREAD)) for mean in (0.0, points))
        pairs.append(evaluated(draw, a, b, 1, 0.0))
    return looks(pairs, MOST_PAIRS)


def naive(draw: random.Random, points: float) -> bool:
    """Whether two independent samples differ, at 95 %, by the pooled test of two shares."""
    count = NAIVE_EPISODES // 2
    a, b = (sum(draw.random() < rate for _ in range(count)) / count for rate in (0.5, 0.5 + points))
    pooled = (a + b) / 2
    return abs(a - b) > 1.96 * (2 * pooled * (1 - pooled) / count) ** 0.5


def shown(name: str, made: list[list[Look]], goal: float) -> Comparison:
    """The share of comparisons that decide, against a goal. It is printed with its 95 % interval."""
    num = sum(one[-1].is_decided for one in made)
    low, high = wilson_interval(num / len(made), len(made))
    what = f"decided, {name}: {num} of {len(made)} ({100 * low:.1f} to {100 * high:.1f} %, 95 %)"
    return Comparison("compare", num / len(made), goal, "the goal", what)


async def measure(is_short: bool) -> list[Comparison]:
    draw, num = random.Random(0), 4 if is_short else 300

    def repeated(one: Callable[..., list[Look]], num: int) -> list[list[Look]]:
        return [one(draw) for _ in range(num)]

    found = [
        shown(
            f"twins of {MOST_PAIRS} pairs", repeated(partial(recipes, points=0.0), min(num, NUM_TWINS)), 0.05
        ),
        shown("twins, more of them", repeated(partial(recipes, points=0.0), num), 0.05),
        shown("the same weights", repeated(partial(weights, points=0.0, common=0.0), num), 0.05),
    ]
    for common in (0.0, 0.3):
        made = repeated(partial(weights, points=DETECT, common=common), num)
        name = f"{100 * DETECT:g} points, {100 * common:g} % common"
        found.append(shown(name, made, POWER))
        episodes = sum(one[-1].num_episodes for one in made) / num
        found.append(Comparison("compare", episodes, NAIVE_EPISODES, "unpaired", f"episodes, {name}"))
    num_found = sum(naive(draw, DETECT) for _ in range(num))
    found.append(Comparison("compare", num_found / num, POWER, "the goal", "decided by the unpaired test"))
    return found


if __name__ == "__main__":
    sys.exit(main("compare", __doc__, measure))
