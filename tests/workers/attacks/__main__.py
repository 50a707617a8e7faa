"""Plays all attacks through the production grader, and prints what stops each and a table.

    python -m tests.workers.attacks [-k WORDS] [--pytest 7 8 9] [--all-kinds] [--kind KIND] [--as-user] [--jobs 2]
                                    [--json OUT]
                                    [--controls-off] [--witness-off] [--record-off] [--words-off]

Exit status 1 if one of them is paid that is not a cheat by chance. With a line of defence off, those paid are played once more with
all lines on, which says what the line adds, and the exit status is 0. Without the witness only a log can say what became of
the tests, so every task has the verdict `tests_json`, and attacks on unittest are left out.
"""

import argparse
import asyncio
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.errors import GraderError
from tests.workers.attacks.families import BY_CHANCE, EARLIER, FAMILIES
from tests.workers.attacks.scenes import Attack
from tests.workers.attacks.stage import (
    KIND_WITHOUT_WITNESS,
    LINES,
    PLAYED_ON,
    STOPS,
    Calibrations,
    Stage,
    open_stage,
    stopped_by,
)
from tests.workers.runners import DEBIANS, VERSIONS

PLAYED = {**FAMILIES, **BY_CHANCE, **EARLIER}


@dataclass(frozen=True, slots=True)
class Played:
    """One attack on one task, and what stopped it."""

    family: str
    name: str
    kind: str
    pytest: int
    stopped_by: str
    decided_by: str


@dataclass(frozen=True, slots=True)
class Part:
    """What is to be played: one attack by one kind of verdict with one version of pytest."""

    family: str
    name: str
    kind: str
    pytest: int


async def play(stage: Stage, part: Part) -> Played:
    """Grades one attack on its calibrated task."""
    attack = PLAYED[part.family][part.name]
    try:
        task = await stage.calibrated(attack.scene, part.kind, part.pytest)
        result = await stage.grade(task, attack.patch)
    except GraderError as error:
        return Played(part.family, part.name, part.kind, part.pytest, stopped_by(error), str(error))
    said = f"{result.decided_by} (control {result.control})"
    return Played(part.family, part.name, part.kind, part.pytest, stopped_by(result), said)


async def play_all(stage: Stage, parts: Iterable[Part], jobs: int) -> list[Played]:
    """Plays these, so many at a time, and says what became of each."""
    places = asyncio.Semaphore(jobs)

    async def one(part: Part) -> Played:
        async with places:
            result = await play(stage, part)
        print(
            f"{result.stopped_by:18} {result.kind:12} pytest {result.pytest}  {result.name}: {result.decided_by}",
            flush=True,
        )
        return result

    return await asyncio.gather(*map(one, parts))


def chosen(arguments: argparse.Namespace, off: frozenset[str]) -> Iterator[Part]:
    for family, attacks in PLAYED.items():
        for name, attack in attacks.items():
            if arguments.words in f"{family}: {name}":
                for major in arguments.pytest:
                    for kind in _kinds(attack, arguments, off, major):
                        yield Part(family, name, kind, major)


def _kinds(attack: Attack, arguments: argparse.Namespace, off: frozenset[str], major: int) -> tuple[str, ...]:
    if "witness" in off:
        return () if "unittest" in PLAYED_ON[attack.scene].command else (KIND_WITHOUT_WITNESS,)
    if arguments.kind:
        return (arguments.kind,) if arguments.kind in kinds_of(attack) else ()
    return kinds_of(attack) if arguments.all_kinds and major == DEBIANS else ("exit_code",)


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


def added(off: frozenset[str], played: list[Played], again: list[Played]) -> str:
    """What the lines of defence add that were off, by what was `again` played with all of them."""
    more = sum(one.stopped_by != "PAID" for one in again)
    return f"without {' and '.join(sorted(off))}: {len(again)} of {len(played)} are paid; {more} of these are not with all lines on"


async def main(arguments: argparse.Namespace) -> int:
    off = frozenset(line for line in LINES if getattr(arguments, f"{line}_off"))
    async with open_stage(off, as_user=arguments.as_user) as stage:
        played = await play_all(stage, chosen(arguments, off), arguments.jobs)
        print(f"\n{table(played)}", flush=True)
        paid = [
            Part(one.family, one.name, one.kind, one.pytest) for one in played if one.stopped_by == "PAID"
        ]
        if off:
            complete = dataclasses.replace(stage, calibrations=Calibrations(), off=frozenset())
            print(f"\n{added(off, played, await play_all(complete, paid, arguments.jobs))}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in played], indent=1))
    return int(not off and any(part.family not in BY_CHANCE for part in paid))


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.workers.attacks", description=__doc__)
    parser.add_argument(
        "-k", dest="words", default="", help="only attacks whose family or name has these words"
    )
    parser.add_argument("--pytest", type=int, nargs="+", default=[DEBIANS], choices=(DEBIANS, *VERSIONS))
    parser.add_argument(
        "--all-kinds", action="store_true", help="every kind of verdict that an attack matters to"
    )
    parser.add_argument("--kind", default="", help="only this kind of verdict")
    parser.add_argument("--as-user", action="store_true", help="in images whose user is not root")
    for line in LINES:
        parser.add_argument(f"--{line}-off", action="store_true", help=f"what the {line} would add")
    parser.add_argument("--jobs", type=int, default=2, help="attacks at a time")
    parser.add_argument("--json", type=Path, help="file for what was played")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parsed(sys.argv[1:]))))
