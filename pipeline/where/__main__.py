"""`python -m pipeline.where RUN_DIR`: where the time of a run went, role by role, and the change that would help most.

The parts of each table add up to its wall time. It reads only the run's directory, also while the run continues.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.commandline import directory, program
from pipeline.journal.reading import MalformedJournal, NoJournal, found_journal
from pipeline.journal.rows import RankUse, StepRow
from pipeline.message import json_line
from pipeline.screen import lines
from pipeline.where.accounts import Account, RolloutWaits, Waiting
from pipeline.where.findings import WhereFindings, where

WIDTH = 60
MAX_RANKS = 16
TITLES = {
    "trainer": "trainer: from its first start to its last row",
    "slots": "workers' slots: all of them together",
    "engines": "engines: all of them together",
}


def text_of(found: WhereFindings, run_dir: Path) -> str:
    """The tables and the advice as text."""
    blocks = [[f"{run_dir}: where the time went"]]
    blocks += [list(_account(each)) for each in (found.trainer, found.slots, found.engines)]
    blocks += [list(_rollouts(found.rollouts)), list(_waiting(found.waiting))]
    blocks += [list(_gpus(found.gpus)), list(_advice(found))]
    return "\n\n".join(lines(block) for block in blocks if block)


def _account(one: Account) -> Iterator[str]:
    yield f"{TITLES[one.role]:<{WIDTH}}{'seconds':>12}{'share':>9}"
    for name, seconds in one.parts_s.items():
        if seconds:
            yield _line(name, seconds, one.share(name))
    if one.wall_s:
        yield _line("wall", one.wall_s, 1.0)
    yield from (f"  {sentence}" for sentence in one.unknown)


def _line(name: str, seconds: float, share: float) -> str:
    return f"  {name:<{WIDTH - 2}}{seconds:>12,.1f}{share:>9.1%}"


def _rollouts(found: RolloutWaits) -> Iterator[str]:
    title = f"rollouts: {found.num_rollouts:,} that were trained, from request to step"
    yield f"{title:<{WIDTH}}{'p50 s':>12}{'p90 s':>12}{'share':>9}"
    for name, one in found.waits.items():
        if one.share:
            yield f"  {name:<{WIDTH - 2}}{one.p50_s:>12,.1f}{one.p90_s:>12,.1f}{one.share:>9.1%}"
    if found.num_rollouts:
        yield f"  {'whole life':<{WIDTH - 2}}{found.life_p50_s:>12,.1f}{found.life_p90_s:>12,.1f}{1:>9.1%}"
    yield from (f"  {sentence}" for sentence in found.unknown)


def _waiting(found: Waiting | None) -> Iterator[str]:
    if found is None:
        return
    wait_s = sum(found.parts_s.values())
    yield f"{'what slots did while the trainer waited for groups':<{WIDTH}}{'seconds':>12}{'share':>9}"
    for name, seconds in found.parts_s.items():
        if seconds:
            yield _line(name, seconds, seconds / wait_s)
    if found.cpu_share is not None:
        yield f"  The processors of the machine were {found.cpu_share:.0%} busy meanwhile."


def _gpus(ranks: Sequence[RankUse]) -> Iterator[str]:
    """A row for each rank; of many ranks the least busy ones."""
    doing = sorted({name for one in ranks for name in one.num_samples})
    if ranks:
        title = "GPUs of the learner's ranks, share of the time in which a kernel ran"
        yield f"{title:<{WIDTH}}  " + "".join(f"{name:>12}" for name in [*doing, "samples"])
    for one in sorted(ranks, key=lambda one: sum(one.busy.values()))[:MAX_RANKS]:
        shares = (one.share(name) for name in doing)
        shown = "".join(f"{'-' if share is None else f'{share:.1%}':>12}" for share in shares)
        yield f"  {f'rank {one.rank}':<{WIDTH}}{shown}{sum(one.num_samples.values()):>12,}"
    if len(ranks) > MAX_RANKS:
        yield f"  {len(ranks) - MAX_RANKS} ranks that were busier are not listed."


def _advice(found: WhereFindings) -> Iterator[str]:
    yield "advice: what would help most, and the most that each can gain of the trainer's wall by itself"
    for number, one in enumerate(found.advice, 1):
        yield f"  {number}. {one.setting}, at most {one.gain:.1%}"
        yield f"     {one.text}"
    if not found.advice:
        yield "  Nothing that is known would gain 1 %."
    yield from (f"  {sentence}" for sentence in found.unknown)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=program("pipeline.where"), description=__doc__)
    parser.add_argument(
        "run_dir", type=directory, metavar="RUN_DIR", help="the directory of a run, as in runs/demo"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args(argv)
    try:
        found_journal(arguments.run_dir, StepRow)
        found = where(arguments.run_dir)
    except (NoJournal, MalformedJournal) as error:
        parser.error(str(error))
    print(json_line(found) if arguments.json else text_of(found, arguments.run_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
