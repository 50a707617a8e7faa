"""What a benchmark says, and how it is told: one comparison is one figure of ours against a rival's of the same run.

Absolute times belong to the machine and to whoever else uses it. Only ratios are meant to be compared between runs,
and each is shown with the smallest and largest that a single round gave.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

Statistic = Callable[[Sequence[float]], float]
Benchmark = Callable[[bool], Awaitable[list["Comparison"]]]
"""Given whether it is to be short."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ours` and `rival` are in `unit`, which also says what was measured."""

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
    """Of samples by round. Rounds that lack either side count in the whole, and show no ratio of their own."""
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
    """In the order of one round: whoever always goes first is measured under other conditions."""
    order = list(items)
    random.shuffle(order)
    return order


def significant(number: float, digits: int = 4) -> float:
    return float(f"{number:.{digits}g}")


def main(name: str, description: str | None, benchmark: Benchmark) -> int:
    """`python -m benchmarks.NAME`: the exit status says whether it ran, not whether anything was fast."""
    options = arguments(name, description)
    try:
        found = asyncio.run(told(name, benchmark, short=options.short))
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
        "--short", action="store_true", help="seconds instead of minutes: shows that it runs, not how fast"
    )
    return parser.parse_args()


async def told(name: str, benchmark: Benchmark, *, short: bool) -> list[Comparison]:
    """Run it, and say on stderr how busy the machine was. SIGTERM cancels it, so that nothing is left behind."""
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    print(f"{name}: before: {how_busy()}", file=sys.stderr)
    found = await benchmark(short)
    print(f"{name}: after: {how_busy()}", file=sys.stderr)
    return found


def how_busy() -> str:
    """Neighbours make every figure worse, and the rivals' not by the same factor."""
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    pressure = Path("/proc/pressure/cpu")
    if not pressure.exists():
        return load
    average = pressure.read_text().split("avg10=")[1].split()[0]
    return f"{load}, somebody waited for a core {average} % of the last 10 s"


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
