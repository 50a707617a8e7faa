"""The queue's command line: `python -m pipeline status | ls | show | tail | requeue | drop`.

Only `requeue` and `drop` change anything, and they say what they did. Exit status: 0 well, 1 unwell (`status`
names the reasons; any verb, if Redis does not answer), 2 misuse.
"""

import argparse
import sys


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

    ls = verbs.add_parser("ls", parents=[one_run], help="list requests")
    ls.add_argument("--state", choices=("queued", "claimed", "answered", "dead"), help="default: all four")
    ls.add_argument("--limit", type=_at_least_one, default=20, metavar="N", help="of each state; default 20")

    show = verbs.add_parser("show", parents=[everywhere], help="one request: its turns, or why it failed")
    show.add_argument("id")
    show.add_argument("--full", action="store_true", help="long outputs in full")

    tail = verbs.add_parser("tail", parents=[one_run], help="finished trajectories as they arrive")
    tail.add_argument(
        "-n", type=int, default=10, dest="past", metavar="N", help="begin with the last N; default 10"
    )

    for verb, text in (("requeue", "give dead requests a fresh budget"), ("drop", "forget dead requests")):
        mend = verbs.add_parser(verb, parents=[one_run], help=text)
        which = mend.add_mutually_exclusive_group(required=True)
        which.add_argument("id", nargs="?")
        which.add_argument("--all", action="store_true", help="every dead request")
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
