"""Plays all attacks through the production grader with controls on, and prints what stops each and a table.

    python -m tests.workers.attacks [-k WORDS] [--pytest 7 8 9] [--all-kinds] [--jobs 2] [--json OUT]

Exit status 1 if one of them is paid.
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.errors import GraderError
from tests.workers.attacks.families import EARLIER, FAMILIES
from tests.workers.attacks.scenes import Attack
from tests.workers.attacks.stage import STOPS, Stage, open_stage, stopped_by
from tests.workers.runners import DEBIANS, VERSIONS

PLAYED = {**FAMILIES, **EARLIER}


@dataclass(frozen=True, slots=True)
class Played:
    """One attack on one task, and what stopped it."""

    family: str
    name: str
    kind: str
    pytest: int
    stopped_by: str
    decided_by: str


async def play(stage: Stage, family: str, name: str, kind: str, major: int) -> Played:
    """Grades one attack on its calibrated task."""
    attack = PLAYED[family][name]
    task = await stage.calibrated(attack.scene, kind, major)
    try:
        reward = await stage.grade(task, attack.patch)
    except GraderError as error:
        return Played(family, name, kind, major, stopped_by(error), str(error))
    return Played(family, name, kind, major, stopped_by(reward), reward.decided_by)


def chosen(words: str, majors: list[int], all_kinds: bool) -> Iterator[tuple[str, str, str, int]]:
    """Family, name, kind of verdict and version of pytest of what is to be played."""
    for family, attacks in PLAYED.items():
        for name, attack in attacks.items():
            if words in f"{family}: {name}":
                for major in majors:
                    for kind in kinds_of(attack) if all_kinds and major == DEBIANS else ("exit_code",):
                        yield family, name, kind, major


def kinds_of(attack: Attack) -> tuple[str, ...]:
    return ("exit_code", *attack.kinds)


def table(played: list[Played]) -> str:
    """How many attacks of each family each check stopped, as Markdown."""
    counts = Counter((one.family, one.stopped_by) for one in played)
    lines = [f"| family | {' | '.join(STOPS)} |", f"|---|{'---|' * len(STOPS)}"]
    for family in PLAYED:
        if any(one.family == family for one in played):
            lines.append(f"| {family} | {' | '.join(str(counts[family, stop]) for stop in STOPS)} |")
    totals = Counter(one.stopped_by for one in played)
    return "\n".join([*lines, f"| all | {' | '.join(str(totals[stop]) for stop in STOPS)} |"])


async def main(arguments: argparse.Namespace) -> int:
    played: list[Played] = []
    async with open_stage() as stage:
        places = asyncio.Semaphore(arguments.jobs)

        async def one(*what: str | int) -> None:
            async with places:
                result = await play(stage, *what)  # pyright: ignore[reportArgumentType]
                played.append(result)
                print(
                    f"{result.stopped_by:18} {result.kind:12} pytest {result.pytest}  {result.name}: "
                    f"{result.decided_by}",
                    flush=True,
                )

        todo = chosen(arguments.words, arguments.pytest, arguments.all_kinds)
        await asyncio.gather(*(one(*what) for what in todo))
    print(f"\n{table(played)}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in played], indent=1))
    return int(any(one.stopped_by == "PAID" for one in played))


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.workers.attacks", description=__doc__)
    parser.add_argument(
        "-k", dest="words", default="", help="only attacks whose family or name has these words"
    )
    parser.add_argument("--pytest", type=int, nargs="+", default=[DEBIANS], choices=(DEBIANS, *VERSIONS))
    parser.add_argument(
        "--all-kinds", action="store_true", help="every kind of verdict that an attack matters to"
    )
    parser.add_argument("--jobs", type=int, default=2, help="attacks at a time")
    parser.add_argument("--json", type=Path, help="file for what was played")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parsed(sys.argv[1:]))))
