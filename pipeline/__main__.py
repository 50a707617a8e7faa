"""The queue's command line: `python -m pipeline status | ls | show | tail | requeue | drop`.

Only `requeue` and `drop` change anything, and they say what they did. Exit status: 0 well, 1 unwell (`status`
names the reasons; any verb, if Redis does not answer), 2 misuse.
"""

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    # After parsing: `--help` and a mistyped verb need neither Redis nor what speaks to it.
    from pipeline.cli import verbs

    return verbs.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline", description="Look into the queue, and mend what died in it."
    )
    parser.add_argument(
        "--redis", metavar="URL", help="default: SWERVE_REDIS_URL, else redis://127.0.0.1:6379/0"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    choices = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    status = choices.add_parser(
        "status", help="who is alive, how much of everything; exit status 1 if unwell"
    )
    status.add_argument("--run", help="this run only")

    ls = choices.add_parser("ls", help="list requests")
    ls.add_argument("--run", help="this run only")
    ls.add_argument("--state", choices=("queued", "claimed", "answered", "dead"), help="default: all four")
    ls.add_argument(
        "--limit", type=_at_least_one, default=20, help="at most so many of each state; default 20"
    )

    show = choices.add_parser("show", help="one request, its trajectory or its failures, to read")
    show.add_argument("id")
    show.add_argument("--full", action="store_true", help="long outputs in full")

    tail = choices.add_parser("tail", help="follow finished trajectories as they arrive")
    tail.add_argument("--run", help="this run only")
    tail.add_argument("-n", type=int, default=10, dest="past", help="begin with the last so many; default 10")

    for verb, text in (("requeue", "give dead requests a fresh budget"), ("drop", "forget dead requests")):
        mend = choices.add_parser(verb, help=text)
        which = mend.add_mutually_exclusive_group(required=True)
        which.add_argument("id", nargs="?")
        which.add_argument("--all", action="store_true", help="every dead request")
        mend.add_argument("--run", help="this run only")
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
