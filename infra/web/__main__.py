"""`python -m infra.web`: pages that show runs in a browser. `swerve web` and `python -m pipeline web` are the same."""

import argparse
import sys
from pathlib import Path

from pipeline.commandline import directory, program

ACTION_LOG = Path("runs/web_actions.jsonl")


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    # Imported after parsing: `--help` and a mistyped flag need no server.
    from infra.web import app

    return app.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("infra.web"),
        description="Serves pages that show runs live, from Redis and the directories of runs. Without --allow-actions it changes nothing.",
        epilog="Exit status: 0 after a signal or an export; 2 for misuse.",
    )
    parser.add_argument(
        "--run-dir",
        type=directory,
        action="append",
        default=[],
        metavar="DIR",
        help="a run's directory or a folder of them; may be repeated; default runs, and those of Redis's runs on this machine",
    )
    parser.add_argument(
        "--redis", metavar="URL", help="default: $SWERVE_REDIS_URL, or redis://127.0.0.1:6379/0"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; any but loopback needs --token-file"
    )
    parser.add_argument("--port", type=int, default=8090, help="default 8090; 0 takes a free one")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="its text is needed once as ?token=TEXT in the address",
    )
    parser.add_argument(
        "--allow-actions",
        type=Path,
        nargs="?",
        const=ACTION_LOG,
        metavar="LOG",
        help="let pages requeue and drop dead letters; LOG, by default %(const)s, gets a line for each",
    )
    exported = parser.add_argument_group("a file instead of a server")
    exported.add_argument(
        "--export", type=Path, metavar="DIR", help="write the pages of one run as DIR/index.html, and end"
    )
    exported.add_argument("--run", metavar="RUN", help="its id, where --run-dir holds several")
    exported.add_argument(
        "--where",
        default="",
        metavar="QUERY",
        help="which rollouts it holds, as in the address of the table: 'reward=0&task=calc*'; default all",
    )
    exported.add_argument(
        "--rollouts",
        type=int,
        default=100,
        metavar="N",
        help="the newest N of them at most; default 100",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
