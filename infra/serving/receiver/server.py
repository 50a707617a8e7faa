"""The receiver's HTTP server.

    GET  /health                        200
    GET  /versions                      200, HeldVersions (msgpack)
    GET  /versions/RUN_ID/VERSION       200, the version's directory as text; 404
    PUT  /versions/RUN_ID/VERSION       a patch; 201, the directory as text

A patch that cannot be applied: 409 (its base is not here), 422 (what was rebuilt is not what the trainer exported), 400 (it is no
patch, or broke off), 507 (the disk is full). Nothing has changed then, and the trainer sends the version whole.
"""

import contextlib
import logging
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

from infra.serving.receiver.versions import BaseMissing, VersionStore, WrongContent
from pipeline.message import MalformedMessage, encode
from pipeline.weight_patch import HeldVersions, PatchHeader, Readable, read_blocks, read_header

log = logging.getLogger("swerve.receiver")

IDLE_S = 120.0
"""A connection that moves no byte for so long is closed."""

SKIPPED_BYTES = 1 << 20


class ReceiverServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, versions: VersionStore) -> None:
        super().__init__((host, port), _Handler)
        self.versions = versions


class _Body:
    """The request's body, which ends where its length says."""

    def __init__(self, stream: Readable, num_bytes: int) -> None:
        self._stream = stream
        self.num_bytes_left = num_bytes

    def read(self, num_bytes: int, /) -> bytes:
        content = self._stream.read(min(num_bytes, self.num_bytes_left))
        self.num_bytes_left -= len(content)
        return content

    def skip(self) -> None:
        """Read to the end. A client that still sends would not read the answer."""
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
        """The run and the version in the path."""
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
        """The sentences above say more."""
