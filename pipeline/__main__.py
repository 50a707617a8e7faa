"""`python -m pipeline VERB`: look at runs, workers and requests; repair or delete data that is no longer wanted.

`ls`, `show` and `explain` also read the rollouts in the directory of a run (`--run-dir`), and do so without Redis. `web` starts
`python -m infra.web`. Only `requeue`, `drop` and `forget` change anything, and they report what they did.

Exit status: 0; 1 if `status` finds something unwell (it names the reasons), if a request could not be changed, or if Redis does not
answer; 2 for misuse, which includes a Redis that refuses the password; 3 if `status` asks a Redis that knows neither a run nor a worker.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pipeline.commandline import VERB_PARSER, directory, program
from pipeline.errors import FAILURE_CLASSES

# The names in pipeline/kinds.py, which imports packages that parsing does not need.
KIND_NAMES = ("rollout", "judge")
STATES = ("queued", "claimed", "answered", "dead")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv, argparse.Namespace(redis=None, json=False))
    if arguments.verb == "web":
        _become_web(arguments.redis, arguments.words)
    if arguments.verb == "trace":
        from pipeline.cli import trace

        return trace.run(arguments)
    # Imported after parsing: `--help` and a mistyped verb need no Redis client.
    from pipeline.cli import verbs

    return verbs.run(arguments)


def _become_web(redis_url: str | None, words: list[str]) -> NoReturn:
    """Replace this process: the pages are served by a program of infra/, which this package does not import."""
    redis = [] if redis_url is None else ["--redis", redis_url]
    os.execv(sys.executable, [sys.executable, "-m", "infra.web", *redis, *words])


def _parser() -> argparse.ArgumentParser:
    everywhere = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    everywhere.add_argument(
        "--redis", metavar="URL", help="default: $SWERVE_REDIS_URL, or redis://127.0.0.1:6379/0"
    )
    everywhere.add_argument("--json", action="store_true", help="one JSON object a line")
    one_run = argparse.ArgumentParser(add_help=False, parents=[everywhere])
    one_run.add_argument("--run", default=None, metavar="RUN", help="only this run")
    parser = argparse.ArgumentParser(
        prog=program("pipeline"),
        description="Shows runs, workers and requests; repairs or forgets what is no longer wanted.",
        epilog="Exit status: 0; 1 if status finds something unwell or Redis does not answer; 2 for misuse or a "
        "refused password; 3 if status asks a Redis that knows neither a run nor a worker. VERB --help explains one verb.",
        parents=[everywhere],
    )
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=VERB_PARSER, metavar="VERB")
    verbs.add_parser(
        "status",
        parents=[one_run],
        help="runs and workers in short; exit status 1 if something is unwell, 3 if Redis knows nothing",
    )
    _add_listing(verbs.add_parser("ls", parents=[one_run], help="list requests"))

    show = verbs.add_parser(
        "show", parents=[everywhere], help="one request: issue, turns, patch and verdict, or why it failed"
    )
    show.add_argument("id", metavar="ID", help="of the request")
    _add_run_dir(show)
    show.add_argument("--full", action="store_true", help="issue, outputs and log in full")

    tail = verbs.add_parser("tail", parents=[one_run], help="the last finished trajectories or judgements")
    _add_kind(tail, "default rollout", default=KIND_NAMES[0])
    tail.add_argument("-n", type=int, default=10, dest="past", metavar="N", help="how many; default 10")
    tail.add_argument("-f", "--follow", action="store_true", help="then each new one, until interrupted")

    explain = verbs.add_parser(
        "explain", parents=[everywhere], help="one request's events, and why it was trained or not"
    )
    explain.add_argument("id", metavar="ID", help="of the request")
    _add_run_dir(explain)

    _add_trace(verbs.add_parser("trace", parents=[everywhere], help="where one rollout's time went"))

    live = verbs.add_parser("top", parents=[one_run], help="status, redrawn until q; into a pipe, once")
    live.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds between two redraws")
    _add_web(verbs.add_parser)
    _add_dead_letters(verbs.add_parser, one_run)
    _add_forget(verbs.add_parser("forget", parents=[everywhere], help="delete all that Redis holds of a run"))
    return parser


def _add_web(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    # Its flags are those of `python -m infra.web`. No argument starts with this prefix, so argparse passes all arguments on unchanged.
    web = add_parser(
        "web", help="pages for a browser: runs, fleet, rollouts, tasks", add_help=False, prefix_chars="\0"
    )
    web.add_argument("words", nargs="*")


def _add_run_dir(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--run-dir",
        type=directory,
        metavar="DIR",
        help="the run's directory, for what Redis has forgotten; without Redis, only it is read",
    )


def _add_trace(trace: argparse.ArgumentParser) -> None:
    trace.description = (
        "Prints the spans of a rollout, or of an optimizer step, from files of spans. Needs no Redis."
    )
    trace.add_argument("id", metavar="ID", help="of the request; with --step, of the run")
    trace.add_argument("--step", type=int, metavar="N", help="the trace of this optimizer step of the run ID")
    trace.add_argument(
        "--file",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="as SWERVE_TRACE_FILE named them while the run went on; default $SWERVE_TRACE_FILE",
    )
    trace.add_argument(
        "--run-dir",
        type=directory,
        metavar="DIR",
        help="directory of a run of make demo, which keeps its spans in traces/",
    )


def _add_kind(verb: argparse.ArgumentParser, unless_given: str, *, default: str | None) -> None:
    verb.add_argument("--kind", choices=KIND_NAMES, default=default, help=f"of requests; {unless_given}")


def _add_listing(ls: argparse.ArgumentParser) -> None:
    _add_run_dir(ls)
    _add_kind(ls, "default rollout", default=KIND_NAMES[0])
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
    dead.add_argument(
        "--class", dest="failure_class", choices=FAILURE_CLASSES, help="only those of this class"
    )
    _add_kind(dead, "default all", default=None)
    dead.add_argument("--full", action="store_true", help="with the evidence of every attempt")
    for verb, text in (("requeue", "give dead requests a fresh budget"), ("drop", "delete dead requests")):
        parser = add_parser(verb, parents=[one_run], help=text)
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("ids", nargs="*", default=[], metavar="ID", help="of a dead request")
        which.add_argument("--class", dest="failure_class", choices=FAILURE_CLASSES, help="all of this class")
        which.add_argument("--all-dead", action="store_true", help="every dead request")
        _add_kind(parser, "default all", default=None)


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
