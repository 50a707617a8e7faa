"""Finished cells in a file, one JSON line each, and what they amount to."""

import contextlib
import math
import multiprocessing
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.simulation.cell import Cell, CellRow, CellRun, Settings, Workbench, workbench

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, and its standard error."""

    mean: float
    error: float
    num_seeds: int

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} ± {100 * self.error:.1f}"


def estimate(successes: Sequence[float], num_episodes: int) -> Estimate:
    """The mean of seeds' success in `num_episodes` each. The error is the spread of the seeds, or that of as many coin tosses if that is
    larger: few seeds may agree by chance.
    """
    mean, count = statistics.fmean(successes), len(successes)
    tosses = math.sqrt(mean * (1 - mean) / (num_episodes * count))
    seeds = statistics.stdev(successes) / math.sqrt(count) if count > 1 else 0.0
    return Estimate(mean, max(tosses, seeds), count)


def final_success(rows: Iterable[CellRow], key: Callable[[CellRow], Key]) -> dict[Key, Estimate]:
    """Held-out success after the last step, of the cells that have a key in common."""
    together: dict[Key, list[CellRow]] = defaultdict(list)
    for row in rows:
        together[key(row)].append(row)
    return {
        one: estimate([row.final.success for row in of], of[0].final.num_episodes)
        for one, of in together.items()
    }


def read(path: Path) -> list[CellRow]:
    """The rows of a file, none if there is no file. Raises ValueError for a line that is no row."""
    if not path.exists():
        return []
    try:
        return [msgspec.json.decode(line, type=CellRow) for line in path.read_bytes().splitlines()]
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}; remove the line, and run its cell again") from error


def missing(cells: Iterable[Cell], settings: Settings, rows: Iterable[CellRow]) -> list[Cell]:
    """The cells that no row has with these settings."""
    present = {row.cell for row in rows if row.settings == settings}
    return [cell for cell in cells if cell not in present]


def run(cells: list[Cell], settings: Settings, path: Path, *, jobs: int) -> Iterator[CellRow]:
    """Run cells in `jobs` processes, and append each to the file as it is finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for row in _run_all(cells, settings, jobs):
            file.write(msgspec.json.encode(row) + b"\n")
            file.flush()
            yield row


def _run_all(cells: list[Cell], settings: Settings, jobs: int) -> Iterator[CellRow]:
    if not cells:
        return
    if jobs == 1:
        with workbench() as bench:
            for cell in cells:
                yield CellRun(cell, settings, bench).run()
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=_set_up) as pool:
        yield from pool.imap_unordered(_run_here, [(cell, settings) for cell in cells])


_bench: list[Workbench] = []
_open = contextlib.ExitStack()
"""What the cells of one process of the pool share, for as long as it lives."""


def _set_up() -> None:
    _bench.append(_open.enter_context(workbench()))


def _run_here(task: tuple[Cell, Settings]) -> CellRow:
    return CellRun(*task, _bench[0]).run()
