"""`python -m pipeline VERB`: look at runs, workers and requests; repair or forget what is no longer wanted.

`ls`, `show` and `explain` also read the rollouts in the directory of a run (`--run-dir`), and do so without Redis. Only
`requeue`, `drop` and `forget` change anything, and they say what they did. Exit status: 0; 1 if `status` finds something
unwell (it names the reasons), if a request could not be changed, or if Redis does not answer; 2 for misuse, which includes
a Redis that refuses the password.
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
    # Imported after parsing: `--help` and a mistyped verb need no Redis client.
    from pipeline.cli import verbs

    return verbs.run(arguments)


def _parser() -> argparse.ArgumentParser:
    everywhere = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    everywhere.add_argument(
        "--redis", metavar="URL", help="default: $SWERVE_REDIS_URL, or redis://127.0.0.1:6379/0"
    )
    everywhere.add_argument("--json", action="store_true", help="one JSON object a line")
    one_run = argparse.ArgumentParser(add_help=False, parents=[everywhere])
    one_run.add_argument("--run", default=None, metavar="RUN", help="only this run")
    parser = argparse.ArgumentParser(
        prog="python -m pipeline",
        description="Shows runs, workers and requests; repairs or forgets what is no longer wanted.",
        epilog="Exit status: 0; 1 if status finds something unwell or Redis does not answer; 2 for misuse or a "
        "refused password. VERB --help explains one verb.",
        parents=[everywhere],
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser(
        "status", parents=[one_run], help="runs and workers in short; exit status 1 if something is unwell"
    )
    _add_listing(verbs.add_parser("ls", parents=[one_run], help="list requests"))

    show = verbs.add_parser(
        "show", parents=[everywhere], help="one request: issue, turns, patch and verdict, or why it failed"
    )
    show.add_argument("id", metavar="ID", help="of the request")
    _add_run_dir(show)
    show.add_argument("--full", action="store_true", help="issue, outputs and log in full")

    tail = verbs.add_parser("tail", parents=[one_run], help="the last finished trajectories")
    tail.add_argument("-n", type=int, default=10, dest="past", metavar="N", help="how many; default 10")
    tail.add_argument("-f", "--follow", action="store_true", help="then each new one, until interrupted")

    explain = verbs.add_parser(
        "explain", parents=[everywhere], help="one request's events, and why it was trained or not"
    )
    explain.add_argument("id", metavar="ID", help="of the request")
    _add_run_dir(explain)

    live = verbs.add_parser("top", parents=[one_run], help="status, redrawn until q; into a pipe, once")
    live.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds between two redraws")
    _add_dead_letters(verbs.add_parser, one_run)
    _add_forget(verbs.add_parser("forget", parents=[everywhere], help="delete all that Redis holds of a run"))
    return parser


def _add_run_dir(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="the run's directory, for what Redis has forgotten; without Redis, only it is read",
    )


def _add_listing(ls: argparse.ArgumentParser) -> None:
    _add_run_dir(ls)
    ls.add_argument("--state", choices=STATES, help="default: all four")
    for name, what in (
        ("task", "task id"),
        ("worker", "worker"),
        ("group", "group"),
        ("outcome", "outcome"),
    ):
        ls.add_argument(
            f"--{name}", default="", metavar="PATTERN", help=f"only where the {what} matches; * is any text"
        )
    ls.add_argument("--reward", type=_reward, metavar="0|1|none", help="only answered ones with this reward")
    ls.add_argument(
        "--older-than", type=_duration_s, metavar="AGE", help="only older ones; as in 90s, 10m, 2h or 1d"
    )
    ls.add_argument("--limit", type=_at_least_one, default=20, metavar="N", help="lines in all; default 20")


def _add_dead_letters(
    add_parser: Callable[..., argparse.ArgumentParser], one_run: argparse.ArgumentParser
) -> None:
    dead = add_parser("dead", parents=[one_run], help="dead requests and why they failed")
    dead.add_argument("--class", dest="kind", choices=FAILURE_CLASSES, help="only those of this class")
    dead.add_argument("--full", action="store_true", help="with the evidence of every attempt")
    for verb, text in (("requeue", "give dead requests a fresh budget"), ("drop", "delete dead requests")):
        parser = add_parser(verb, parents=[one_run], help=text)
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("ids", nargs="*", default=[], metavar="ID", help="of a dead request")
        which.add_argument("--class", dest="kind", choices=FAILURE_CLASSES, help="all of this class")
        which.add_argument("--all-dead", action="store_true", help="every dead request")


def _add_forget(forget: argparse.ArgumentParser) -> None:
    forget.description = "Deletes every key of the run and of its requests. Its directory is not touched."
    forget.add_argument("runs", nargs="+", metavar="RUN", help="id of a run, as status shows it")
    forget.add_argument("--force", action="store_true", help="even if its trainer is alive")


def _reward(text: str) -> str:
    try:
        return text if text == "none" else f"{float(text):g}"
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number such as 0 or 1, or none") from error


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
