"""`python -m workers.harness build | ls | check | lock`: agent programs that play episodes, as images of a Docker host.

Exit status: 0 done, or everything is in order; 1 a program cannot be built or does not run, or the Docker host does not answer; 2 misuse.
"""

import argparse
import sys

from pipeline.commandline import VERB_PARSER, program
from pipeline.harness import shipped, untested


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    # Imported after parsing, so that `--help` and misuse load no Docker client.
    from workers.harness import commands

    return commands.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("workers.harness"),
        description="Agent programs that play episodes in place of the built-in loop.",
        epilog=f"NAME is one of {', '.join(shipped())}, the path of a harness file, or, of those that nobody has tested, one of "
        f"{', '.join(untested())} (docs/harnesses.md).",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=VERB_PARSER, metavar="VERB")
    build = verbs.add_parser("build", help="fetch a program with its runtime, and make its image")
    build.add_argument("names", nargs="+", metavar="NAME")
    build.add_argument("--force", action="store_true", help="make the image again if it is there")
    ls = verbs.add_parser("ls", help="list programs with their images and volumes on the Docker host")
    ls.add_argument("names", nargs="*", metavar="NAME", help="default: all whose files come with Swerve")
    ls.add_argument("--json", action="store_true", help="print one JSON object per line")
    check = verbs.add_parser("check", help="start programs in a container without a network")
    check.add_argument("names", nargs="+", metavar="NAME")
    check.add_argument(
        "--image",
        default="swerve/task-base:1",
        help="image of a task in which the program has to run; default %(default)s",
    )
    lock = verbs.add_parser("lock", help="choose the packages of a program and write down their hashes")
    lock.add_argument("names", nargs="+", metavar="NAME")
    return parser


if __name__ == "__main__":
    sys.exit(main())
