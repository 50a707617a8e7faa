"""Code under test that bends its test runner at random, or cheats by parts drawn at random: however it does, it must not be paid.

    python -m tests.workers.attacks.fuzz [--tries 500] [--seed 0] [--what bends combinations] [--controls on|off] [--pytest 7] [--jobs 2]

Each try is a patch that fixes nothing. One that bends replaces a few attributes of what `bending.py` finds in pytest, pluggy and
unittest, as the code is imported or called; a combination has three parts of `combining.py`. Its seed says which: `--seed N --tries 1`
plays try N again and prints its doings. Each is graded by itself, as in production. Exit status 1 if one is paid with controls on,
but for those that find out which run this is in a way that is right now and then.
"""

import argparse
import asyncio
import random
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import GraderError
from pipeline.trajectory import Reward
from tests.workers.attacks.combining import TELLS_BY_CHANCE, combined
from tests.workers.attacks.patches import edited, new
from tests.workers.attacks.stage import STOPS, Stage, open_stage, stopped_by
from tests.workers.runners import DEBIANS, VERSIONS

BENDING = (Path(__file__).with_name("bending.py")).read_text("utf-8")
SCENES = (
    "asserts",
    "imported early",
    "raises",
    "cases",
    "mocks",
    "unittest",
    "unittest, many ways",
    "unittest's raises",
)
COMBINATION_SCENES = (
    "asserts",
    "cases",
    "close",
    "raises",
    "unittest",
    "an expectation in a local",
    "a table in a loop",
    "a constant of the module",
    "a fixture",
    "an attribute made in setUp",
    "a helper of the test file",
    "a value in the test's name",
    "what works comes first",
)
MOST_BENDS = 8
_BENT = re.compile(r"^bent (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Try:
    """A patch that bends the runner or combines `parts`, and the scene that it is played on."""

    seed: int
    scene: str
    patch: bytes
    parts: tuple[str, ...] = ()

    @property
    def by_chance(self) -> bool:
        """Whether it may be paid now and then."""
        return not TELLS_BY_CHANCE.keys().isdisjoint(self.parts)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a try, and what it bent."""

    tried: Try
    stopped_by: str
    decided_by: str
    bent: tuple[str, ...]


def make_bends(seed: int, scenes: tuple[str, ...] = SCENES) -> Try:
    """The try of that seed that bends. At import the code bends before it returns to the test module, at a call before it returns."""
    chance = random.Random(f"try {seed}")
    scene, num_bends = chance.choice(scenes), chance.randint(1, MOST_BENDS)
    call = f"from bending import bend; bend('{seed}', {num_bends})"
    if chance.random() < 0.5:
        changed = edited("calc.py", "def add", f"{call}\n\n\ndef add")
    else:
        changed = edited("calc.py", "def add(a, b):\n", f"def add(a, b):\n    {call}\n")
    return Try(seed, scene, changed + new("bending.py", BENDING))


def make_combination(
    seed: int, scenes: tuple[str, ...] = COMBINATION_SCENES, *, by_chance: bool = True
) -> Try:
    """The combination of that seed. Only `by_chance` it may have a part that is right now and then."""
    chance = random.Random(f"combination {seed}")
    scene = chance.choice(scenes)
    parts, patch = combined(chance, by_chance=by_chance)
    return Try(seed, scene, patch, parts)


MAKERS: dict[str, Callable[[int], Try]] = {"bends": make_bends, "combinations": make_combination}


async def play(stage: Stage, tried: Try, *, controls: bool = True, major: int = DEBIANS) -> Result:
    """Grades the try. Without `controls` the task is as it was imported: no control, and no set of expected tests."""
    if controls:
        task = await stage.calibrated(tried.scene, major=major)
    else:
        task = stage.task(tried.scene, major=major)
    result: Reward | GraderError
    try:
        result = await stage.grade(task, tried.patch)
    except GraderError as error:
        return Result(tried, stopped_by(error), str(error), ())
    bent = tuple(_BENT.findall(result.log_tail))
    return Result(tried, stopped_by(result), result.decided_by, bent)


async def fuzz(
    graded: Callable[[Try], Awaitable[Result]],
    tries: Iterable[Try],
    jobs: int,
    seen: Callable[[Result], None],
) -> list[Result]:
    """Plays the tries, so many at a time."""
    places = asyncio.Semaphore(jobs)

    async def one(tried: Try) -> Result:
        async with places:
            result = await graded(tried)
        seen(result)
        return result

    return await asyncio.gather(*map(one, tries))


def told(result: Result) -> str:
    tried = result.tried
    doings = (
        f"parts: {' | '.join(tried.parts)}" if tried.parts else f"bent {', '.join(result.bent) or 'unknown'}"
    )
    return f"{result.stopped_by}: seed {tried.seed}, {tried.scene}: {result.decided_by}; {doings}"


async def main(arguments: argparse.Namespace) -> int:
    controls = arguments.controls == "on"
    one_alone = arguments.tries == 1

    def seen(result: Result) -> None:
        if one_alone or result.stopped_by in STOPS[2:]:
            print(told(result), flush=True)

    seeds = range(arguments.seed, arguments.seed + arguments.tries)
    async with open_stage() as stage:
        results = await fuzz(
            lambda tried: play(stage, tried, controls=controls, major=arguments.pytest),
            (MAKERS[what](seed) for seed in seeds for what in arguments.what),
            arguments.jobs,
            seen,
        )
    counts = Counter(result.stopped_by for result in results)
    paid = [result for result in results if result.stopped_by == "PAID"]
    by_chance = sum(result.tried.by_chance for result in paid)
    print(", ".join(f"{stop}: {counts[stop]}" for stop in STOPS))
    print(
        f"{len(paid)} of {len(results)} paid with controls {arguments.controls}, {by_chance} of them by chance"
    )
    return int(controls and len(paid) > by_chance)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.workers.attacks.fuzz", description=__doc__)
    parser.add_argument("--tries", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first try; the others' follow")
    parser.add_argument("--what", nargs="+", default=list(MAKERS), choices=MAKERS)
    parser.add_argument("--controls", choices=("on", "off"), default="on")
    parser.add_argument("--pytest", type=int, default=DEBIANS, choices=(DEBIANS, *VERSIONS))
    parser.add_argument("--jobs", type=int, default=2, help="tries at a time")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parsed(sys.argv[1:]))))
