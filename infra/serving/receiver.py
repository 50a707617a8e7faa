"""Receives weight versions for the engines of this host: `python -m infra.serving.receiver --directory DIR`.

It is needed on the engines' hosts if a recipe has `weights.transport = "delta"`. The trainer sends the blocks that changed; the receiver
makes each version's whole directory on local disk, checks it, and the engines load it from there, so they must see DIR under the same path.
One receiver serves all engines of a host.

A version is the directory RUN_ID@v000012 and the file RUN_ID@v000012.manifest beside it, written last. Promises: a directory with a
manifest is whole, forced to disk and byte for byte what the trainer exported; what a killed receiver left unfinished is removed at the
next start; the versions used last stay, the others are removed.
"""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import itertools
import logging
import os
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np
import zstandard
from numpy.typing import NDArray

from infra import ports
from pipeline.commandline import program, refuse
from pipeline.message import MalformedMessage, decode, encode
from pipeline.weight_patch import (
    BLOCK_BYTES,
    BlockHeader,
    DirectoryManifest,
    Encoding,
    FileContent,
    HeldVersions,
    PatchHeader,
    Readable,
    VersionReference,
    bounded_map,
    read_blocks,
    read_header,
)

log = logging.getLogger("swerve.receiver")

PORT = 30300
NUM_THREADS = min(16, os.cpu_count() or 1)

IDLE_S = 120.0
"""A connection without traffic for this long is closed."""

SKIPPED_BYTES = 1 << 20

_NUM_GAPS = struct.Struct("<I")


def rebuilt(encoding: int, content: bytes, base: bytes | None) -> bytes:
    """Returns the new block. Raises MalformedMessage if the content does not fit the base."""
    if encoding == Encoding.RAW:
        return content
    if encoding != Encoding.SPARSE or base is None or len(base) % 2:
        raise MalformedMessage(f"a block of encoding {encoding} cannot be rebuilt")
    words = np.frombuffer(base, dtype="<u2").copy()
    positions, differences = _unpacked(content)
    if len(positions) and positions[-1] >= len(words):
        raise MalformedMessage("a block of the patch changes words beyond its end")
    words[positions] += differences
    return words.tobytes()


def _unpacked(content: bytes) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """The indices of the changed words in ascending order, and new minus old of each, modulo 2^16."""
    try:
        plain = zstandard.ZstdDecompressor().decompress(content, max_output_size=4 * BLOCK_BYTES)
    except zstandard.ZstdError as error:
        raise MalformedMessage(f"a block of the patch is not zstd: {error}") from error
    if len(plain) < _NUM_GAPS.size:
        raise MalformedMessage("a block of the patch is too short")
    (num_gaps,) = _NUM_GAPS.unpack_from(plain)
    gaps = np.frombuffer(plain, dtype=np.uint8, offset=_NUM_GAPS.size)[:num_gaps]
    planes = np.frombuffer(plain, dtype=np.uint8, offset=_NUM_GAPS.size + len(gaps))
    leads = gaps < 255
    num_changed = np.count_nonzero(leads)
    if len(gaps) != num_gaps or len(planes) != 2 * num_changed:
        raise MalformedMessage("a block of the patch has not one difference for each changed word")
    # A gap byte below 255 skips that many unchanged words and then the changed word; 255 skips 255 unchanged words.
    positions = np.cumsum(gaps + leads.astype(np.int64))[leads] - 1
    zigzag = planes[:num_changed] | (planes[num_changed:].astype(np.uint16) << 8)
    return positions, ((zigzag >> 1) ^ (0 - (zigzag & 1))).astype(np.uint16)


class BaseMissing(Exception):
    """The base of a patch is not on this host, or has another content."""


class WrongContent(Exception):
    """The content of a rebuilt version differs from what the manifest describes."""


class _BlockToWrite(NamedTuple):
    """One block to be written: from the patch, from the base, or from both."""

    file: FileContent
    block: int
    into: int  # file descriptor to write to
    base: int | None
    patch: tuple[BlockHeader, bytes] | None


class VersionStore:
    """The versions in `directory`. Several threads may call the methods."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        """Use `open_versions`, which keeps a second receiver out of the directory."""
        self._directory = directory
        self._keep = keep
        self._numbers = itertools.count()
        self._turn = threading.Lock()  # held while names in the directory change
        self._remove_unfinished()

    def held(self) -> tuple[VersionReference, ...]:
        return tuple(manifest.reference for manifest in self._manifests())

    def path_of(self, run_id: str, version: int) -> Path | None:
        """The directory of a version that is about to be used, which protects it from removal; None if the version is not on this host."""
        directory = self._path(run_id, version)
        with self._turn:
            try:
                _note_use(_manifest_path(directory))
            except FileNotFoundError:
                return None
        return directory

    def apply(self, header: PatchHeader, blocks: Iterable[tuple[BlockHeader, bytes]]) -> Path:
        """Make the target's directory. A version that already exists with that content is not changed.

        Raises BaseMissing, WrongContent, MalformedMessage, OSError; then nothing has changed.
        """
        target = header.target
        directory = self._path(target.run_id, target.version)
        if self._manifest(directory) == target:
            return directory
        base = None if header.base is None else self._base(header.base)
        self._check_space(target)
        partial = self._directory / f".{directory.name}.{next(self._numbers)}.partial"
        partial.mkdir()
        try:
            self._write(target, base, partial, blocks)
            self._finish(target, partial, directory)
        except FileNotFoundError as error:
            raise BaseMissing(f"the base was removed meanwhile: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return directory

    def _check_space(self, target: DirectoryManifest) -> None:
        free_bytes = shutil.disk_usage(self._directory).free
        if free_bytes < target.num_bytes:
            said = f"version {target.version} has {target.num_bytes} bytes, and {free_bytes} are free"
            raise OSError(errno.ENOSPC, said, str(self._directory))

    def _path(self, run_id: str, version: int) -> Path:
        return self._directory / f"{run_id}@v{version:06d}"

    def _manifests(self) -> Iterator[DirectoryManifest]:
        for path in sorted(self._directory.glob("*.manifest")):
            manifest = self._manifest(path.with_suffix(""))
            if manifest is not None:
                yield manifest

    def _manifest(self, directory: Path) -> DirectoryManifest | None:
        try:
            return decode(_manifest_path(directory).read_bytes(), DirectoryManifest)
        except (FileNotFoundError, MalformedMessage):
            return None

    def _base(self, reference: VersionReference) -> tuple[DirectoryManifest, Path]:
        directory = self.path_of(reference.run_id, reference.version)
        manifest = None if directory is None else self._manifest(directory)
        if directory is None or manifest is None or manifest.reference != reference:
            raise BaseMissing(
                f"version {reference.version} of {reference.run_id} is not here as the patch has it"
            )
        return manifest, directory

    def _write(
        self,
        target: DirectoryManifest,
        base: tuple[DirectoryManifest, Path] | None,
        partial: Path,
        blocks: Iterable[tuple[BlockHeader, bytes]],
    ) -> None:
        with contextlib.ExitStack() as files, ThreadPoolExecutor(NUM_THREADS, "blocks") as pool:
            wanted = _wanted(target, base, partial, blocks, files)
            for _ in bounded_map(pool, _write_block, wanted, ahead=2 * NUM_THREADS):
                pass

    def _finish(self, target: DirectoryManifest, partial: Path, directory: Path) -> None:
        """Gives the directory its name. A version of that name with another content is replaced."""
        for path in (*partial.iterdir(), partial):
            _sync(path)
        manifest = partial.with_suffix(".manifest-partial")
        manifest.write_bytes(encode(target))
        _note_use(manifest)
        _sync(manifest)
        with self._turn:
            # Another call installed it first, and an engine may be reading it
            if self._manifest(directory) == target:
                manifest.unlink()
                return
            _remove(directory)
            partial.rename(directory)
            _sync(self._directory)
            manifest.rename(_manifest_path(directory))
            _sync(self._directory)
            self._prune()

    def _prune(self) -> None:
        by_use = sorted(self._directory.glob("*.manifest"), key=lambda path: path.stat().st_mtime)
        for manifest in by_use[: -self._keep]:
            _remove(manifest.with_suffix(""))

    def _remove_unfinished(self) -> None:
        for path in self._directory.iterdir():
            if path.name.endswith((".partial", ".manifest-partial")):
                log.info("remove %s, which was never finished", path.name)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.is_dir() and "@v" in path.name and not _manifest_path(path).exists():
                log.info("remove %s, which has no manifest", path.name)
                shutil.rmtree(path)


@contextlib.contextmanager
def open_versions(directory: Path, *, keep: int) -> Iterator[VersionStore]:
    """Yields the store in `directory`. Raises ValueError if another receiver uses the directory, OSError if it cannot be used."""
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another receiver uses {directory}; stop it or give another directory"
            ) from error
        yield VersionStore(directory, keep=keep)


def _manifest_path(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.manifest")


def _note_use(manifest: Path) -> None:
    """Sets the manifest's time stamp to now, in nanoseconds: the kernel's own stamps are too coarse to order two close uses."""
    now = time.time_ns()
    os.utime(manifest, ns=(now, now))


def _remove(directory: Path) -> None:
    """Removes a version. The manifest is removed first, because a directory with a manifest counts as complete."""
    _manifest_path(directory).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)


def _wanted(
    target: DirectoryManifest,
    base: tuple[DirectoryManifest, Path] | None,
    partial: Path,
    blocks: Iterable[tuple[BlockHeader, bytes]],
    files: contextlib.ExitStack,
) -> Iterator[_BlockToWrite]:
    """Yields every block of the target with its origin.

    Raises MalformedMessage for a block that neither the patch nor the base contains.
    """
    known = {} if base is None else {file.name: file for file in base[0].files}
    incoming = iter(blocks)
    patch = next(incoming, None)
    for number, file in enumerate(target.files):
        into = files.enter_context((partial / file.name).open("wb"))
        into.truncate(file.num_bytes)
        old: int | None = None
        if base is not None and file.name in known and known[file.name].num_bytes == file.num_bytes:
            old = files.enter_context((base[1] / file.name).open("rb")).fileno()
        for block in range(file.num_blocks):
            is_next = patch is not None and (patch[0].file, patch[0].block) == (number, block)
            if not is_next and old is None:
                raise MalformedMessage(f"the patch lacks block {block} of {file.name}")
            yield _BlockToWrite(file, block, into.fileno(), old, patch if is_next else None)
            if is_next:
                patch = next(incoming, None)


def _write_block(block: _BlockToWrite) -> None:
    num_bytes, offset = block.file.block_bytes(block.block), block.block * BLOCK_BYTES
    content = None if block.base is None else os.pread(block.base, num_bytes, offset)
    if block.patch is not None:
        header, sent = block.patch
        content = rebuilt(header.encoding, sent, content)
    assert content is not None
    if len(content) != num_bytes or hashlib.sha256(content).digest() != block.file.digest_of(block.block):
        raise WrongContent(f"block {block.block} of {block.file.name} is not what the trainer exported")
    written = os.pwrite(block.into, content, offset)
    if written != num_bytes:
        raise OSError(f"only {written} of {num_bytes} bytes could be written")


def _sync(path: Path) -> None:
    """Force a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        log.info("versions are kept in %s", arguments.directory)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
