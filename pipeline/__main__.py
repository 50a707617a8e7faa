"""The queue's command line: `python -m pipeline status | ls | show | tail | explain | top | dead | requeue | drop`.

Only `requeue` and `drop` change anything, and they say what they did. Exit status: 0 well, 1 unwell (`status`
names the reasons; any verb, if Redis does not answer), 2 misuse.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import FAILURE_CLASSES

STATES = ("queued", "claimed", "answered", "dead")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv, argparse.Namespace(redis=None, json=False))
    # After parsing: `--help` and a mistyped verb need neither Redis nor what speaks to it.
    from pipeline.cli import verbs

    return verbs.run(arguments)


def _parser() -> argparse.ArgumentParser:
    everywhere = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    everywhere.add_argument(
        "--redis", metavar="URL", help="default: SWERVE_REDIS_URL, or redis://127.0.0.1:6379/0"
    )
    everywhere.add_argument("--json", action="store_true", help="one JSON object a line")
    one_run = argparse.ArgumentParser(add_help=False, parents=[everywhere])
    one_run.add_argument("--run", default=None, help="this run only")
    parser = argparse.ArgumentParser(
        prog="python -m pipeline",
        description="Look into the queue, and mend what died in it.",
        parents=[everywhere],
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser(
        "status", parents=[one_run], help="who is alive, how much of everything; exit status 1 if unwell"
    )
    _add_listing(verbs.add_parser("ls", parents=[one_run], help="list requests"))

    show = verbs.add_parser("show", parents=[everywhere], help="one request: its turns, or why it failed")
    show.add_argument("id")
    show.add_argument("--full", action="store_true", help="long outputs in full")

    tail = verbs.add_parser("tail", parents=[one_run], help="the last finished trajectories")
    tail.add_argument("-n", type=int, default=10, dest="past", metavar="N", help="so many; default 10")
    tail.add_argument("-f", "--follow", action="store_true", help="and each as it arrives, until interrupted")

    explain = verbs.add_parser(
        "explain", parents=[everywhere], help="one request's life, and why it was trained or not"
    )
    explain.add_argument("id")
    explain.add_argument("--run-dir", type=Path, metavar="DIR", help="the run's directory, for its journal")

    live = verbs.add_parser("top", parents=[one_run], help="the fleet, live; q quits; into a pipe, once")
    live.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds between two looks")
    _add_mending(verbs.add_parser, one_run)
    return parser


def _add_listing(ls: argparse.ArgumentParser) -> None:
    ls.add_argument("--state", choices=STATES, help="default: all four")
    for name, what in (
        ("task", "task ids"),
        ("worker", "workers"),
        ("group", "groups"),
        ("outcome", "outcomes"),
    ):
        ls.add_argument(
            f"--{name}", default="", metavar="PATTERN", help=f"{what} such as this; * stands for anything"
        )
    ls.add_argument("--older-than", type=_duration_s, metavar="AGE", help="as in 90s, 10m, 2h or 1d")
    ls.add_argument("--limit", type=_at_least_one, default=20, metavar="N", help="of each state; default 20")


def _add_mending(
    add_parser: Callable[..., argparse.ArgumentParser], one_run: argparse.ArgumentParser
) -> None:
    dead = add_parser("dead", parents=[one_run], help="dead requests and what they died of")
    dead.add_argument("--class", dest="kind", choices=FAILURE_CLASSES, help="of this class only")
    dead.add_argument("--full", action="store_true", help="with the evidence of every attempt")
    for verb, text in (("requeue", "give dead requests a fresh budget"), ("drop", "forget dead requests")):
        mend = add_parser(verb, parents=[one_run], help=text)
        which = mend.add_mutually_exclusive_group(required=True)
        which.add_argument("ids", nargs="*", default=[], metavar="ID")
        which.add_argument("--class", dest="kind", choices=FAILURE_CLASSES, help="all of this class")
        which.add_argument("--all-dead", action="store_true", help="every dead request")


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least 1")
    return int(text)


def _duration_s(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in SECONDS else (text, "s")
    try:
        return float(number) * SECONDS[unit]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write it as in 90s, 10m, 2h or 1d") from error


if __name__ == "__main__":
    sys.exit(main())
