"""Receives weight versions for the engines of this host: `python -m infra.serving.receiver --directory DIR`.

Needed beside the engines where a recipe says `weights.transport = "delta"`. The trainer sends the blocks that changed; the receiver makes
each version's whole directory on local disk, checks it, and the engines load it from there, so they must see DIR under the same path.
One receiver serves all engines of a host.
"""

import argparse
import contextlib
import logging
import signal
import sys
from pathlib import Path

from infra import ports
from infra.commandline import refuse
from infra.serving.receiver.server import ReceiverServer
from infra.serving.receiver.versions import VersionStore, open_versions

PORT = 30300


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m infra.serving.receiver", description=__doc__)
    parser.add_argument(
        "--directory", type=Path, required=True, help="where versions are kept, on a local disk"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; the trainer must reach it")
    parser.add_argument(
        "--port", type=int, default=PORT, help="weights.receiver_port of the recipe (%(default)s)"
    )
    parser.add_argument("--keep", type=int, default=3, help="versions kept, those used last (%(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="receiver: %(message)s")
    try:
        if arguments.keep < 2:
            raise ValueError(
                f"--keep is {arguments.keep}; it must be 2 or more: a version is made from the one before"
            )
        ports.check_free(
            arguments.port, host=arguments.host, needed_by="receiver", fix="stop it or give another --port"
        )
        with open_versions(arguments.directory, keep=arguments.keep) as versions:
            serve(arguments, versions)
    except ValueError as error:
        refuse(error)
    except OSError as error:
        refuse(ValueError(str(error)))
    return 0


def serve(arguments: argparse.Namespace, versions: VersionStore) -> None:
    """Until SIGTERM or Ctrl-C. What is being received then is removed at the next start."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ReceiverServer(arguments.host, arguments.port, versions) as server:
        logging.getLogger("swerve.receiver").info("versions are kept in %s", arguments.directory)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
