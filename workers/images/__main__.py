"""`python -m workers.images pull | build | ls | evict`: the task images of this machine's Docker host.

Exit status: 0 all images are present, or within the budget; 1 some are not (the last lines name them and the reasons), or the Docker host
does not answer; 2 misuse; 130 interrupted. `--json` prints one object per line on standard output; progress goes to standard error.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pipeline.commandline import VERB_PARSER, directory, program
from workers.images.names import parse_bytes, parse_name, parse_proxy

T = TypeVar("T")


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    # Imported after parsing, so that `--help` and misuse load no Docker client.
    from workers.images import commands

    return commands.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("workers.images"), description="Task images on this machine's Docker host."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    everywhere = argparse.ArgumentParser(add_help=False)
    everywhere.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object per line"
    )
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=VERB_PARSER, metavar="VERB")
    _pull(verbs.add_parser("pull", parents=[everywhere], help="pull the images of tasks from registries"))
    _build(verbs.add_parser("build", parents=[everywhere], help="build images of task directories"))
    ls = verbs.add_parser(
        "ls", parents=[everywhere], help="list images: those of tasks, or all that Swerve manages"
    )
    ls.add_argument("tasks", nargs="*", help=_TASKS)
    _evict(
        verbs.add_parser(
            "evict", parents=[everywhere], help="remove the least recently used images until a budget is met"
        )
    )
    return parser


_TASKS = "tasks.jsonl, or @FILE with an image name at the start of each line"


def _pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tasks", nargs="*", help=_TASKS)
    parser.add_argument(
        "--image",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        type=_as(_named),
        help="also pull these images",
    )
    parser.add_argument("--first", type=_count, metavar="N", help="only the first N images")
    parser.add_argument(
        "--proxy",
        nargs="+",
        action="extend",
        type=_as(parse_proxy),
        metavar="PREFIX",
        help="tried in turn before the registry itself: a mirror of docker.io, or SOURCE=PREFIX; "
        "default: SWERVE_IMAGE_PROXIES",
    )
    parser.add_argument(
        "--jobs", type=_count, default=4, metavar="N", help="pull N images at once; default 4"
    )
    parser.add_argument(
        "--retries", type=_number, default=5, metavar="N", help="retry temporary failures N times; default 5"
    )
    parser.add_argument(
        "--failures",
        type=Path,
        metavar="FILE",
        help="write the failed images to FILE; `pull @FILE` tries them again",
    )
    parser.add_argument(
        "--platform",
        metavar="OS/ARCH",
        type=_as(_platform),
        help="platform of the images; default: the Docker host's own",
    )
    _budget(parser, required=False)


def _build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        type=directory,
        help="holds task directories: a Dockerfile beside a task.json with an image_name",
    )
    parser.add_argument(
        "--only", nargs="+", action="extend", metavar="TASKS", help=f"only the images of these: {_TASKS}"
    )
    parser.add_argument("--first", type=_count, metavar="N", help="only the first N images")
    parser.add_argument(
        "--jobs", type=_count, default=2, metavar="N", help="build N images at once; default 2"
    )
    parser.add_argument(
        "--build-arg",
        action="append",
        default=[],
        type=_as(_pair),
        metavar="NAME=VALUE",
        help="for the Dockerfile's ARG NAME",
    )
    parser.add_argument(
        "--network", metavar="MODE", help="network of RUN commands; default: the Docker host's"
    )
    parser.add_argument("--force", action="store_true", help="build images that are there, too")
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="DIR",
        help="where logs of failed builds go; default: in SWERVE_STATE_DIR",
    )
    parser.add_argument(
        "--failures",
        type=Path,
        metavar="FILE",
        help="write the failed images to FILE; `--only @FILE` tries them again",
    )


def _evict(parser: argparse.ArgumentParser) -> None:
    _budget(parser, required=True)
    parser.add_argument(
        "--keep",
        nargs="+",
        action="extend",
        default=[],
        metavar="TASKS",
        help=f"never remove the images of these: {_TASKS}",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _budget(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--budget-bytes",
        type=_as(parse_bytes),
        required=required,
        metavar="SIZE",
        help="limit for all images that Swerve manages, shared layers counted once; e.g. 300GB"
        + ("" if required else "; default: SWERVE_IMAGE_BUDGET, or no limit"),
    )


def _as(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A `type=` for argparse that keeps the text of a ValueError."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _named(text: str) -> str:
    return str(parse_name(text))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"{text!r}: give NAME=VALUE")
    return name, value


def _platform(text: str) -> str:
    if text.count("/") not in (1, 2) or not all(text.split("/")):
        raise ValueError(f"{text!r}: give a platform such as linux/amd64")
    return text


def _number(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number")
    return int(text)


def _count(text: str) -> int:
    if _number(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
