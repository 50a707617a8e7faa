"""Kill processes of a running system at random instants, and prove that nothing was lost.

    python -m infra.chaos [--kills 200] [--short] [--only worker,trainer,...] [--seed N] [--json]

Brings up a system of its own under ``runs/chaos`` (Redis, Docker engine, SGLang, router, two workers, trainer), kills one
of its processes after another with SIGKILL, sometimes two, waits each time until it goes on, lets the run end, and
settles the accounts. Nothing of the machine's own services is touched, and nothing but logs, the run's journal and
``progress.json`` is kept, even if this process is itself killed. The first SIGINT or SIGTERM ends it early and in good
order, with the table of what was done, the second at once. Exit status: 0 if everything is zero that must be, 1 if not, 2
misuse, 130 after Ctrl-C, 143 after SIGTERM.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from infra.chaos.victims import KINDS, LONG, SHORT, Kind

if TYPE_CHECKING:
    from infra.chaos.campaign import Campaign
    from infra.chaos.stopping import Stop

LONG_KILLS, SHORT_KILLS = 200, 6


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m infra.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, help=f"default: {LONG_KILLS}, or {SHORT_KILLS} with --short")
    parser.add_argument("--short", action="store_true", help="in close order")
    kinds = ", ".join(KINDS)
    parser.add_argument(
        "--only", type=_kinds, metavar="KIND,...", help=f"of {kinds}; default: all but containerd"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides who is killed and when")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/chaos"), help="is made anew; default: runs/chaos"
    )
    arguments = parser.parse_args(argv)
    arguments.temper = SHORT if arguments.short else LONG
    if arguments.kills is None:
        arguments.kills = SHORT_KILLS if arguments.short else LONG_KILLS
    if arguments.only is None:
        arguments.only = [kind for kind in KINDS if kind != "containerd"]
    if arguments.kills < 1:
        parser.error(f"--kills {arguments.kills}: give 1 or more")
    return arguments


def _kinds(text: str) -> list[Kind]:
    named = dict.fromkeys(text.split(","))
    unknown = [one for one in named if one not in get_args(Kind)]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(KINDS)}")
    return [kind for kind in KINDS if kind in named]


def say(line: str) -> None:
    print(f"chaos: {line}", file=sys.stderr, flush=True)


def reign(arguments: argparse.Namespace, stop: "Stop") -> int:
    """A system's whole life, told on the way; what is left of it at the end ends with this process."""
    import msgspec

    from infra.chaos.recovery import Hopeless
    from infra.chaos.slo import table
    from infra.chaos.stopping import Stopped

    try:
        with redirect_stdout(sys.stderr):  # standard output is for what it amounts to
            campaign = muster(arguments, stop)
            stopped = campaign.wage(arguments.only, seed=arguments.seed, temper=arguments.temper)
            if stopped is not None:
                say(f"{stopped}: ending in good order; once more to end at once, see {campaign.file}")
            slo = campaign.conclude()
        print(msgspec.json.encode(slo).decode() if arguments.json else table(slo), flush=True)
        if stopped is not None:
            return 128 + stopped.number
        return 0 if slo.is_kept else 1
    except Stopped as once_more:
        say(f"{once_more}: ending at once")
        return 128 + once_more.number
    except (RuntimeError, ValueError, OSError, Hopeless) as error:
        say(str(error))
        return 1


def muster(arguments: argparse.Namespace, stop: "Stop") -> "Campaign":
    """The system, up and sound. Raises RuntimeError, Hopeless or Stopped."""
    from infra.chaos.campaign import Campaign
    from infra.chaos.recovery import Ring
    from infra.chaos.system import prepare
    from infra.chaos.watch import Watch

    root = arguments.dir.resolve()
    system = prepare(root, seed=arguments.seed, say=say)
    ring = Ring(system, Watch(system), say, stop, system.arguments.run_dir / "logs")
    starts_s = ring.start_in_quiet(arguments.only)
    return Campaign(ring, starts_s, arguments.kills, root / "progress.json")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from infra.chaos.confinement import confined
    from infra.chaos.stopping import SIGNALS, Stop
    from infra.chaos.system import clear, place_of_its_own

    stop = Stop()
    try:
        with place_of_its_own(arguments.dir.resolve()) as root:
            try:
                return confined(lambda: reign(arguments, stop), signals=SIGNALS)
            finally:
                clear(root)
    except (RuntimeError, OSError) as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
