"""Finished cells in a file, one JSON line each, and what they amount to."""

import contextlib
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.simulation.cell import Cell, CellRow, CellRun, Settings, Workbench, workbench
from pipeline.intervals import t_mean


def over_seeds(values: Sequence[float], form: str = ".1f") -> str:
    """The mean over seeds and its 95 % interval by Student's t; empty without values, and a single seed has no interval."""
    return over_groups([[value] for value in values], form)


def over_groups(groups: Sequence[Sequence[float]], form: str = ".1f") -> str:
    """The mean of all values and its 95 % interval. The values of a group are related, as those of a seed are, so groups are the draws."""
    estimate = t_mean(groups)
    if estimate is None:
        return ""
    interval = f" ({estimate.low:{form}} to {estimate.high:{form}})" if estimate.num_draws > 1 else ""
    return f"{estimate.value:{form}}{interval}"


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
