"""Receives weight versions for the engines of this host: `python -m infra.serving.receiver --directory DIR`.

It is needed on the engines' hosts if a recipe has `weights.transport = "delta"`. The trainer sends the blocks that changed; the receiver
makes each version's whole directory on local disk, checks it, and the engines load it from there, so they must see DIR under the same path.
One receiver serves all engines of a host.
"""

import argparse
import contextlib
import logging
import signal
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from infra import ports
from infra.serving.receiver.versions import BaseMissing, VersionStore, WrongContent, open_versions
from pipeline.commandline import program, refuse
from pipeline.message import MalformedMessage, encode
from pipeline.weight_patch import HeldVersions, PatchHeader, Readable, read_blocks, read_header

log = logging.getLogger("swerve.receiver")

IDLE_S = 120.0
"""A connection without traffic for this long is closed."""

SKIPPED_BYTES = 1 << 20


class ReceiverServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, versions: VersionStore) -> None:
        super().__init__((host, port), _Handler)
        self.versions = versions


class _Body:
    """The request's body, which ends after its declared length."""

    def __init__(self, stream: Readable, num_bytes: int) -> None:
        self._stream = stream
        self.num_bytes_left = num_bytes

    def read(self, num_bytes: int, /) -> bytes:
        content = self._stream.read(min(num_bytes, self.num_bytes_left))
        self.num_bytes_left -= len(content)
        return content

    def skip(self) -> None:
        """Reads to the end, because a client that still sends would not read the answer."""
        while self.read(SKIPPED_BYTES):
            pass


class _Handler(BaseHTTPRequestHandler):
    server: ReceiverServer
    timeout = IDLE_S
    server_version = "swerve-receiver"

    def do_GET(self) -> None:
        if self.path == "/health":
            return self._answer(HTTPStatus.OK, b"")
        if self.path == "/versions":
            return self._answer(HTTPStatus.OK, encode(HeldVersions(versions=self.server.versions.held())))
        named = self._named()
        directory = None if named is None else self.server.versions.path_of(*named)
        if directory is None:
            return self._answer(HTTPStatus.NOT_FOUND, b"this version is not here")
        return self._answer(HTTPStatus.OK, str(directory).encode())

    def do_PUT(self) -> None:
        body = _Body(self.rfile, int(self.headers.get("Content-Length", 0)))
        try:
            header = read_header(body)
            if self._named() != (header.target.run_id, header.target.version):
                raise MalformedMessage(f"{self.path} is not the address of the patch's target")
            status, text = self._applied(header, body)
        except MalformedMessage as error:
            status, text = HTTPStatus.BAD_REQUEST, str(error)
        except (TimeoutError, ConnectionError) as error:
            log.warning("%s: the connection is gone, and the patch is dropped: %s", self.path, error)
            self.close_connection = True
            return
        with contextlib.suppress(ConnectionError):
            body.skip()
            self._answer(status, text.encode())

    def _applied(self, header: PatchHeader, body: _Body) -> tuple[HTTPStatus, str]:
        target, versions = header.target, self.server.versions
        try:
            directory = versions.apply(header, read_blocks(body, target))
        except BaseMissing as error:
            return HTTPStatus.CONFLICT, str(error)
        except WrongContent as error:
            return HTTPStatus.UNPROCESSABLE_ENTITY, str(error)
        except (TimeoutError, ConnectionError):
            raise
        except OSError as error:
            return HTTPStatus.INSUFFICIENT_STORAGE, str(error)
        form = "whole" if header.base is None else f"from v{header.base.version}"
        log.info("%s v%d is in %s, made %s", target.run_id, target.version, directory, form)
        return HTTPStatus.CREATED, str(directory)

    def _named(self) -> tuple[str, int] | None:
        """The run and the version in the request's path."""
        match self.path.split("/"):
            case ["", "versions", run_id, version] if version.isdecimal():
                return unquote(run_id), int(version)
            case _:
                return None

    def _answer(self, status: HTTPStatus, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: the sentences above are more informative."""


PORT = 30300


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=program("infra.serving.receiver"), description=__doc__)
    parser.add_argument(
        "--directory", type=Path, required=True, help="directory that keeps the versions, on a local disk"
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
    """Serves until SIGTERM or Ctrl-C. A version that is being received then is removed at the next start."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ReceiverServer(arguments.host, arguments.port, versions) as server:
        logging.getLogger("swerve.receiver").info("versions are kept in %s", arguments.directory)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
