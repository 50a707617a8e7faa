"""Code under test that bends its test runner at random: however it does, it must not be paid.

    python -m tests.workers.attacks.fuzz [--tries 500] [--seed 0] [--controls on|off] [--pytest 7] [--jobs 2]

Each try is a patch that fixes nothing and replaces a few attributes of what `bending.py` finds in pytest, pluggy and unittest, as
the code is imported or called. Its seed says which: `--seed N --tries 1` plays try N again and prints the patch's doings. Each
is graded by itself, as in production. Exit status 1 if one is paid with controls on.
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
MOST_BENDS = 8
_BENT = re.compile(r"^bent (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Try:
    """A patch that bends the runner, and the scene that it is played on."""

    seed: int
    scene: str
    patch: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a try, and what it bent."""

    tried: Try
    stopped_by: str
    decided_by: str
    bent: tuple[str, ...]


def make_try(seed: int, scenes: tuple[str, ...] = SCENES) -> Try:
    """The try of that seed. At import the code bends before it returns to the test module, at a call before it returns."""
    chance = random.Random(f"try {seed}")
    scene, num_bends = chance.choice(scenes), chance.randint(1, MOST_BENDS)
    call = f"from bending import bend; bend('{seed}', {num_bends})"
    if chance.random() < 0.5:
        changed = edited("calc.py", "def add", f"{call}\n\n\ndef add")
    else:
        changed = edited("calc.py", "def add(a, b):\n", f"def add(a, b):\n    {call}\n")
    return Try(seed, scene, changed + new("bending.py", BENDING))


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
    return (
        f"{result.stopped_by}: seed {result.tried.seed}, {result.tried.scene}: {result.decided_by}; bent "
        + (", ".join(result.bent) or "unknown")
    )


async def main(arguments: argparse.Namespace) -> int:
    controls = arguments.controls == "on"
    one_alone = arguments.tries == 1

    def seen(result: Result) -> None:
        if one_alone or result.stopped_by in STOPS[2:]:
            print(told(result), flush=True)

    async with open_stage() as stage:
        results = await fuzz(
            lambda tried: play(stage, tried, controls=controls, major=arguments.pytest),
            map(make_try, range(arguments.seed, arguments.seed + arguments.tries)),
            arguments.jobs,
            seen,
        )
    counts = Counter(result.stopped_by for result in results)
    print(", ".join(f"{stop}: {counts[stop]}" for stop in STOPS))
    print(f"{counts['PAID']} of {len(results)} paid with controls {arguments.controls}")
    return int(controls and counts["PAID"] > 0)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.workers.attacks.fuzz", description=__doc__)
    parser.add_argument("--tries", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first try; the others' follow")
    parser.add_argument("--controls", choices=("on", "off"), default="on")
    parser.add_argument("--pytest", type=int, default=DEBIANS, choices=(DEBIANS, *VERSIONS))
    parser.add_argument("--jobs", type=int, default=2, help="tries at a time")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parsed(sys.argv[1:]))))
