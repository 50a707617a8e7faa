"""Kill processes of a running system at random instants, and prove that nothing was lost.

    python -m infra.chaos [--kills 200] [--short] [--only worker,trainer,...] [--seed N] [--json]

Brings up a system of its own under ``runs/chaos`` (Redis, Docker engine, SGLang, router, two workers, trainer), kills one
of its processes after another with SIGKILL, sometimes two, waits each time until it goes on, lets the run end, and
settles the accounts. Nothing of the machine's own services is touched, and nothing but logs and the run's journal is
kept. Exit status: 0 if everything is zero that must be, 1 if not, 2 misuse, 130 after Ctrl-C.
"""

import argparse
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from infra.chaos.victims import LONG, SHORT, Kind, blows

if TYPE_CHECKING:
    from infra.chaos.recovery import Recovery, Ring
    from infra.chaos.slo import Slo

SHORT_KILLS = 12
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m infra.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--short", action="store_true", help=f"{SHORT_KILLS} kills, not of containerd, in close order"
    )
    parser.add_argument(
        "--only",
        type=_kinds,
        default=list(get_args(Kind)),
        metavar="KIND,...",
        help=", ".join(get_args(Kind)),
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/chaos"), help="is made anew; default: runs/chaos"
    )
    arguments = parser.parse_args(argv)
    arguments.temper = LONG
    if arguments.short:
        arguments.kills, arguments.temper = SHORT_KILLS, SHORT
        arguments.only = [kind for kind in arguments.only if kind != "containerd"] or arguments.only
    if arguments.kills < 1:
        parser.error(f"--kills {arguments.kills}: give 1 or more")
    return arguments


def _kinds(text: str) -> list[str]:
    named = text.split(",")
    unknown = [one for one in named if one not in get_args(Kind)]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(get_args(Kind))}")
    return named


def say(line: str) -> None:
    print(f"chaos: {line}", file=sys.stderr, flush=True)


def run(arguments: argparse.Namespace, cleanup: ExitStack) -> "Slo":
    """A system's whole life. Raises RuntimeError or Hopeless if it does not come up."""
    from infra.chaos.recovery import Hopeless, Recovery, Ring
    from infra.chaos.system import prepare
    from infra.chaos.watch import Watch

    system = prepare(arguments.dir.resolve(), seed=arguments.seed, say=say, cleanup=cleanup)
    ring = Ring(system, Watch(system), say, system.arguments.run_dir / "logs")
    starts_s = ring.start_in_quiet()
    began_at, dice = time.monotonic(), random.Random(arguments.seed)
    recoveries, faults = list[Recovery](), list[str]()
    try:
        for blow in blows(arguments.only, arguments.kills, seed=arguments.seed, temper=arguments.temper):
            recovery = ring.strike(blow, dice, starts_s)
            if recovery is not None:
                recoveries.append(recovery)
                say(told(recovery, recoveries))
    except Hopeless as error:
        faults.append(str(error))
    return conclude(ring, recoveries, starts_s, faults, (time.monotonic() - began_at) / 60)


def told(recovery: "Recovery", recoveries: "Sequence[Recovery]") -> str:
    num_kills = sum(len(one.victims) for one in recoveries)
    return f"{num_kills}: {' and '.join(recovery.victims)} killed, back after {recovery.total_s:.1f} s"


def conclude(
    ring: "Ring",
    recoveries: "Sequence[Recovery]",
    starts_s: "Mapping[Kind, float]",
    faults: list[str],
    minutes: float,
) -> "Slo":
    """End the run, and add everything up."""
    from infra.chaos.books import settle
    from infra.chaos.ending import client, run_out, second_opinion, what_is_left
    from infra.chaos.recovery import Hopeless
    from infra.chaos.slo import amount_to

    try:
        run_out(ring)
    except Hopeless as error:
        faults.append(str(error))
    left = what_is_left(ring)
    with client(ring.system) as redis:
        books = settle(redis, ring.system.arguments.run_dir, ring.watch.asked)
    faults += second_opinion(ring.system)
    return amount_to(recoveries, starts_s, books, left, faults=faults, steps=ring.watch.step, minutes=minutes)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    import msgspec

    from infra import local
    from infra.chaos.recovery import Hopeless
    from infra.chaos.slo import table

    local.listen_to_signals(SIGNALS)
    with ExitStack() as cleanup:
        try:
            slo = run(arguments, cleanup)
            print(msgspec.json.encode(slo).decode() if arguments.json else table(slo), flush=True)
            status = 0 if slo.is_kept else 1
        except local.Stopped as stopped:
            say(f"{signal.Signals(stopped.number).name}: stopping")
            status = 128 + stopped.number
        except (RuntimeError, ValueError, OSError, Hopeless) as error:
            say(str(error))
            status = 1
        finally:
            local.ignore_signals(SIGNALS)
    return status


if __name__ == "__main__":
    sys.exit(main())
