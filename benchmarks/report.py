"""Comparisons, statistics and printing: a comparison is one figure of ours against a rival's from the same run.

Absolute times depend on the machine and on what else runs there. Only ratios may be compared between runs; each is shown
with the smallest and the largest of a single round.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

Statistic = Callable[[Sequence[float]], float]
Benchmark = Callable[[bool], Awaitable[list["Comparison"]]]
"""Called with whether it is to be short."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ours` and `rival` are in `unit`, which also names what was measured."""

    name: str
    ours: float
    rival: float
    rival_name: str
    unit: str
    rounds: tuple[float, ...] = ()  # the ratio in each round

    @property
    def ratio(self) -> float | None:
        """Ours over the rival's; None if the rival's is 0."""
        return self.ours / self.rival if self.rival else None

    def as_json(self) -> str:
        ratio = None if self.ratio is None else significant(self.ratio)
        return json.dumps(
            {
                "name": self.name,
                "ours": significant(self.ours),
                "rival": significant(self.rival),
                "rival_name": self.rival_name,
                "unit": self.unit,
                "ratio": ratio,
            }
        )


@dataclass(slots=True)
class Measurements:
    """What one method took in its blocks: an entry per round, with a sample per call or one for the whole block."""

    latencies_s: list[list[float]] = field(default_factory=list[list[float]])
    per_s: list[list[float]] = field(default_factory=list[list[float]])
    cpu_s: list[list[float]] = field(default_factory=list[list[float]])  # per call, where it is measured


def compared(
    name: str,
    ours: Sequence[Sequence[float]],
    rival: Sequence[Sequence[float]],
    statistic: Statistic,
    *,
    rival_name: str,
    unit: str,
    scale: float = 1.0,
) -> Comparison:
    """Compare samples by round. A round that lacks either side counts in the whole, and has no ratio of its own."""
    pairs = [(statistic(a), statistic(b)) for a, b in zip(ours, rival, strict=False) if a and b]
    return Comparison(
        name=name,
        ours=scale * statistic([sample for one in ours for sample in one]),
        rival=scale * statistic([sample for one in rival for sample in one]),
        rival_name=rival_name,
        unit=unit,
        rounds=tuple(a / b for a, b in pairs if b),
    )


def p50(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def p95(samples: Sequence[float]) -> float:
    """The smallest sample that 95 % of all do not exceed."""
    return sorted(samples)[math.ceil(0.95 * len(samples)) - 1]


def shuffled(items: Iterable[T]) -> list[T]:
    """A random order for one round: what always goes first would be measured under other conditions."""
    order = list(items)
    random.shuffle(order)
    return order


def significant(number: float, digits: int = 4) -> float:
    return float(f"{number:.{digits}g}")


def main(name: str, description: str | None, benchmark: Benchmark) -> int:
    """`python -m benchmarks.NAME`: the exit status says whether it ran, not whether anything was fast."""
    options = arguments(name, description)
    try:
        found = asyncio.run(run_reporting_load(name, benchmark, short=options.short))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    print_all(found, as_json=options.json)
    return 0


def arguments(name: str, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks{'.' + name if name else ''}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one comparison per line")
    parser.add_argument(
        "--short",
        action="store_true",
        help="seconds instead of minutes: shows that it runs, not how fast it is",
    )
    return parser.parse_args()


async def run_reporting_load(name: str, benchmark: Benchmark, *, short: bool) -> list[Comparison]:
    """Run it, and print on stderr how busy the machine was. SIGTERM cancels it, so that nothing is left behind."""
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    print(f"{name}: before: {machine_load()}", file=sys.stderr)
    found = await benchmark(short)
    print(f"{name}: after: {machine_load()}", file=sys.stderr)
    return found


def machine_load() -> str:
    """Other processes make every figure worse, and the rivals' by another factor than ours."""
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    pressure = Path("/proc/pressure/cpu")
    if not pressure.exists():
        return load
    average = pressure.read_text().split("avg10=")[1].split()[0]
    return f"{load}, a process waited for a core during {average} % of the last 10 s"


def print_all(found: Sequence[Comparison], *, as_json: bool) -> None:
    if as_json:
        for one in found:
            print(one.as_json())
        return
    rows = [("", "ours", "rival", "ratio", "by round", "against", "what")]
    rows += [_row(one) for one in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in (1, 2, 3) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _row(one: Comparison) -> tuple[str, ...]:
    ratio = "-" if one.ratio is None else f"{significant(one.ratio, 3):g}"
    spread = f"{min(one.rounds):.2g} to {max(one.rounds):.2g}" if len(one.rounds) > 1 else ""
    figures = (f"{significant(one.ours, 3):g}", f"{significant(one.rival, 3):g}")
    return (one.name, *figures, ratio, spread, one.rival_name, one.unit)
