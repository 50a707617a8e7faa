"""Kill processes of a running system at random instants, and check that nothing was lost.

    python -m infra.chaos [--kills 200] [--short] [--only worker,trainer,...] [--harness mini] [--seed N] [--json]

Starts a separate system under `runs/chaos` (Redis, dockerd, SGLang, router, two workers, a judge, trainer), kills its processes one
after another with SIGKILL, sometimes two at a time, waits each time until the system has recovered, lets the run end,
and accounts for every request. The machine's own Redis and Docker are not touched, and only logs, the run's journal and
`progress.json` are kept, even if this process is itself killed.

The first SIGINT or SIGTERM ends the campaign early and in order, with the table of what was measured; the second ends it
at once. Exit status: 0 if everything that must be zero is zero, 1 if not, 2 misuse, 130 after Ctrl-C, 143 after SIGTERM.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from infra.chaos.faults import KINDS, LONG, OF_DOCKERD, SHORT, Kind
from pipeline.commandline import program
from pipeline.message import json_line

if TYPE_CHECKING:
    from infra.chaos.campaign import Campaign
    from infra.chaos.injection import SignalListener

LONG_KILLS, SHORT_KILLS = 200, 7


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("infra.chaos"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, help=f"default: {LONG_KILLS}, or {SHORT_KILLS} with --short")
    parser.add_argument("--short", action="store_true", help="few kills in quick succession")
    kinds = ", ".join(KINDS)
    parser.add_argument(
        "--only",
        type=_kinds,
        metavar="KIND,...",
        help=f"of {kinds}; default: all but {', '.join(OF_DOCKERD)}",
    )
    parser.add_argument("--harness", choices=("mini",), help="the agent program that plays the episodes")
    parser.add_argument("--seed", type=int, default=0, help="decides which processes are killed and when")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/chaos"), help="emptied first; default: runs/chaos"
    )
    arguments = parser.parse_args(argv)
    arguments.pace = SHORT if arguments.short else LONG
    if arguments.kills is None:
        arguments.kills = SHORT_KILLS if arguments.short else LONG_KILLS
    if arguments.only is None:
        arguments.only = [kind for kind in KINDS if kind not in OF_DOCKERD]
    if arguments.kills < 1:
        parser.error(f"--kills {arguments.kills}: give 1 or more")
    if "program" in arguments.only and not arguments.harness:
        parser.error("--only program: no program plays; give --harness mini")
    return arguments


def _kinds(text: str) -> list[Kind]:
    named = dict.fromkeys(text.split(","))
    unknown = [one for one in named if one not in get_args(Kind)]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(KINDS)}")
    return [kind for kind in KINDS if kind in named]


def say(line: str) -> None:
    print(f"chaos: {line}", file=sys.stderr, flush=True)


def run_campaign(arguments: argparse.Namespace, signals: "SignalListener") -> int:
    """Start the system, inject faults, report progress, tear down. Returns the exit status. What still runs at the end
    ends with this process.
    """

    from infra.chaos.accounts import table
    from infra.chaos.injection import EndRequested, NotRecovered

    try:
        with redirect_stdout(sys.stderr):  # standard output is for the result only
            campaign = start_campaign(arguments, signals)
            request = campaign.inject_faults(arguments.only, seed=arguments.seed, pace=arguments.pace)
            if request is not None:
                say(f"{request}: ending in order; once more to end at once, see {campaign.file}")
            slo = campaign.conclude()
        print(json_line(slo) if arguments.json else table(slo), flush=True)
        if request is not None:
            return 128 + request.number
        return 0 if slo.is_kept else 1
    except EndRequested as second:
        say(f"{second}: ending at once")
        return 128 + second.number
    except (RuntimeError, ValueError, OSError, NotRecovered) as error:
        say(str(error))
        return 1


def start_campaign(arguments: argparse.Namespace, signals: "SignalListener") -> "Campaign":
    """Start the system and wait until it works. Raises RuntimeError, NotRecovered or EndRequested."""
    from infra.chaos.campaign import Campaign
    from infra.chaos.injection import FaultInjector, SystemMonitor
    from infra.chaos.system import new_system

    root = arguments.dir.resolve()
    system = new_system(root, seed=arguments.seed, with_program=arguments.harness is not None, say=say)
    logs = system.arguments.run_dir / "logs"
    injector = FaultInjector(system, SystemMonitor(system), say, signals, logs)
    starts_s = injector.start_all(arguments.only)
    return Campaign(injector, starts_s, arguments.kills, root / "progress.json")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from infra.chaos.confinement import run_confined
    from infra.chaos.injection import SIGNALS, SignalListener
    from infra.chaos.system import exclusive_directory, remove_data

    signals = SignalListener()
    try:
        with exclusive_directory(arguments.dir.resolve()) as root:
            try:
                return run_confined(lambda: run_campaign(arguments, signals), signals=SIGNALS)
            finally:
                remove_data(root)
    except (RuntimeError, OSError) as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
