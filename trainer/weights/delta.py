"""Weights through a receiver on each engine host: only the blocks that changed are sent, and no file system is shared.

The trainer exports each version to its own disk. A receiver (`infra/serving/receiver.py`) reports which versions it has. The trainer sends
it the patch from the newest of them that the trainer also has. From that the receiver makes the version's directory on local disk, checked
by hash. The engines of that host load it from there. If no patch applies (the receiver is new, or its base is lost or different), the
trainer sends the whole version and logs a line.

`pipeline/weight_patch.py` describes the patches. Files are read block by block on several threads; no more than a few blocks are in
memory at a time. numpy, no torch.
"""

import asyncio
import hashlib
import logging
import os
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote, urlsplit

import aiohttp
import numpy as np
import zstandard

from pipeline.message import MalformedMessage, decode
from pipeline.weight_patch import (
    BLOCK_BYTES,
    BLOCK_HEADER_BYTES,
    BlockHeader,
    DirectoryManifest,
    Encoding,
    FileContent,
    HeldVersions,
    PatchHeader,
    VersionReference,
    bounded_map,
    pack_header,
)
from pipeline.weights import WeightVersion
from trainer.weights.engines import CONTROL_S, EngineFailure, Engines, PauseMode, Served
from trainer.weights.transport import DiskTransport, Whole

NUM_THREADS = min(16, os.cpu_count() or 1)
_NUM_GAPS = struct.Struct("<I")


class _Place(NamedTuple):
    """A block of the target, and the base's file with the block at the same position, if there is one."""

    file: int
    block: int
    path: Path
    base: Path | None


def manifest_of(directory: Path, run_id: str, version: int) -> DirectoryManifest:
    """The description of a directory's files, which are all that an engine reads: merged weights have a folder with their adapters beside
    them, which stays on the trainer's disk.
    """
    paths = sorted(path for path in directory.iterdir() if path.is_file())
    with ThreadPoolExecutor(NUM_THREADS, "manifest") as pool:
        return DirectoryManifest(
            run_id=run_id, version=version, files=tuple(_content_of(path, pool) for path in paths)
        )


def _content_of(path: Path, pool: Executor) -> FileContent:
    num_bytes = path.stat().st_size
    blocks = range(-(-num_bytes // BLOCK_BYTES))
    digests = bounded_map(pool, lambda block: _digest(_read(path, block)), blocks, ahead=2 * NUM_THREADS)
    return FileContent(name=path.name, num_bytes=num_bytes, digests=b"".join(digests))


def write_patch(
    path: Path, target: tuple[DirectoryManifest, Path], base: tuple[DirectoryManifest, Path]
) -> int:
    """Writes the patch that makes the target's directory from the base's. Returns its size; the file appears when it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    header = PatchHeader(target=target[0], base=base[0].reference)
    with partial.open("wb") as file, ThreadPoolExecutor(NUM_THREADS, "patch") as pool:
        file.write(pack_header(header))
        for block in bounded_map(pool, _encoded, _places(target, base), ahead=2 * NUM_THREADS):
            file.write(block)
        num_bytes = file.tell()
    partial.rename(path)
    return num_bytes


def whole(target: DirectoryManifest, directory: Path) -> tuple[int, Iterator[bytes]]:
    """The size in bytes and the content of the patch with every block of `target`, which can be applied without a base."""
    header = pack_header(PatchHeader(target=target))
    num_blocks = sum(file.num_blocks for file in target.files)
    num_bytes = len(header) + num_blocks * BLOCK_HEADER_BYTES + target.num_bytes
    return num_bytes, _whole_pieces(header, target, directory)


def _whole_pieces(header: bytes, target: DirectoryManifest, directory: Path) -> Iterator[bytes]:
    yield header
    for file, block, path, _ in _places((target, directory), None):
        yield _raw(file, block, _read(path, block))


def _places(
    target: tuple[DirectoryManifest, Path], base: tuple[DirectoryManifest, Path] | None
) -> Iterator[_Place]:
    """Yields every block of the target whose content the base does not have at the same position."""
    manifest, directory = target
    known = {} if base is None else {file.name: file for file in base[0].files}
    for number, file in enumerate(manifest.files):
        before = known.get(file.name)
        if before is None or before.num_bytes != file.num_bytes:
            before = None
        for block in range(file.num_blocks):
            if before is None or base is None:
                yield _Place(number, block, directory / file.name, None)
            elif before.digest_of(block) != file.digest_of(block):
                yield _Place(number, block, directory / file.name, base[1] / file.name)


def _encoded(place: _Place) -> bytes:
    new = _read(place.path, place.block)
    if place.base is None or len(new) % 2:
        return _raw(place.file, place.block, new)
    sparse = encode_sparse(_read(place.base, place.block), new)
    if len(sparse) >= len(new):
        return _raw(place.file, place.block, new)
    return BlockHeader(place.file, place.block, Encoding.SPARSE, len(sparse)).pack() + sparse


def encode_sparse(old: bytes, new: bytes) -> bytes:
    """The words of `new` that differ from those of `old`, which has the same even length."""
    before, after = np.frombuffer(old, dtype="<u2"), np.frombuffer(new, dtype="<u2")
    positions = np.flatnonzero(before != after)
    difference = after[positions] - before[positions]
    zigzag = ((difference << 1) ^ (0 - (difference >> 15))).astype(np.uint16)
    unchanged = np.diff(positions, prepend=-1) - 1
    # Each changed word has one byte for the rest of its distance, preceded by one byte of 255 for each 255 in the distance.
    skips, rest = np.divmod(unchanged, 255)
    ends = np.cumsum(skips + 1)
    gaps = np.full(int(ends[-1]) if len(ends) else 0, 255, dtype=np.uint8)
    gaps[ends - 1] = rest
    low, high = (zigzag & 0xFF).astype(np.uint8), (zigzag >> 8).astype(np.uint8)
    plain = b"".join((_NUM_GAPS.pack(len(gaps)), gaps.tobytes(), low.tobytes(), high.tobytes()))
    return zstandard.ZstdCompressor(level=1).compress(plain)


def _raw(file: int, block: int, content: bytes) -> bytes:
    return BlockHeader(file, block, Encoding.RAW, len(content)).pack() + content


def _read(path: Path, block: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(block * BLOCK_BYTES)
        return _read_up_to(file.fileno(), BLOCK_BYTES)


def _read_up_to(descriptor: int, num_bytes: int) -> bytes:
    pieces: list[bytes] = []
    while num_bytes and (piece := os.read(descriptor, num_bytes)):
        pieces.append(piece)
        num_bytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def unused_patches(directory: Path, kept: Iterable[int]) -> list[Path]:
    """The patch files in a directory whose target or base is no longer kept."""
    versions = {f"{version:06d}" for version in kept}
    return [path for path in directory.glob("*.patch") if not set(path.stem.split("-")) <= versions]


class PatchRefused(EngineFailure):
    """The receiver cannot apply this patch, but could make the version from a whole one."""


class Receivers:
    """Connections to receivers, as an async context manager; it holds no state about receivers.
    Calls that transfer no weights have a deadline here; the caller sets the deadline of the others.
    """

    def __init__(self, port: int, *, control_s: float = CONTROL_S) -> None:
        self._port = port
        self._control_s = control_s

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(sock_connect=self._control_s),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    def url_beside(self, engine_url: str) -> str:
        """The receiver on an engine's host."""
        host = urlsplit(engine_url).hostname or ""
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    async def held(self, receiver_url: str) -> tuple[VersionReference, ...]:
        """The versions that the receiver has completely."""
        status, answer = await self._call("GET", f"{receiver_url}/versions")
        if status != 200:
            raise _failure(receiver_url, status, answer)
        try:
            return decode(answer, HeldVersions).versions
        except MalformedMessage as error:
            raise EngineFailure(f"{receiver_url} answered something unexpected: {error}") from error

    async def directory_of(self, receiver_url: str, run_id: str, version: int) -> str | None:
        """Returns the directory in which the engines of the host find a version; None if the receiver does not have it."""
        status, answer = await self._call("GET", _address(receiver_url, run_id, version))
        if status == 404:
            return None
        if status != 200:
            raise _failure(receiver_url, status, answer)
        return answer.decode()

    async def send_file(self, receiver_url: str, run_id: str, version: int, patch: Path) -> None:
        """Send a patch that has a base. Raises PatchRefused if the receiver's base is not the patch's."""
        with patch.open("rb") as file:
            status, answer = await self._call("PUT", _address(receiver_url, run_id, version), data=file)
        if status in (409, 422):
            raise PatchRefused(answer.decode(errors="replace"))
        if status != 201:
            raise _failure(receiver_url, status, answer)

    async def send_whole(
        self, receiver_url: str, run_id: str, version: int, num_bytes: int, pieces: Iterator[bytes]
    ) -> None:
        status, answer = await self._call(
            "PUT",
            _address(receiver_url, run_id, version),
            data=_sent(pieces),
            headers={"Content-Length": str(num_bytes)},
        )
        if status != 201:
            raise _failure(receiver_url, status, answer)

    async def _call(
        self, method: str, url: str, data: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """The status and the body of the answer. Only this function translates aiohttp's errors into ours."""
        timeout_s = self._control_s if data is None else None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.request(method, url, data=data, headers=headers) as response,
            ):
                return response.status, await response.read()
        except TimeoutError as error:
            raise EngineFailure(f"{method} {url}: no answer within {timeout_s} s") from error
        except aiohttp.ClientConnectorError as error:
            raise EngineFailure(
                f"{method} {url}: {error}; start python -m infra.serving.receiver on that host, or set another weights.transport"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailure(f"{method} {url}: {error}") from error


def _address(receiver_url: str, run_id: str, version: int) -> str:
    return f"{receiver_url}/versions/{quote(run_id, safe='')}/{version}"


def _failure(receiver_url: str, status: int, answer: bytes) -> EngineFailure:
    return EngineFailure(f"{receiver_url}: {status} {answer[:500].decode(errors='replace')}")


async def _sent(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the pieces of `pieces`, each read from disk in a thread."""
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece


log = logging.getLogger("swerve.weights")


class _Exported(NamedTuple):
    """A version on the trainer's disk."""

    manifest: DirectoryManifest
    directory: Path


class DeltaTransport(Whole):
    """Delivers weights to engines through receivers on their hosts; a `WeightTransport`."""

    def __init__(self, disk: DiskTransport, receivers: Receivers, *, directory: Path) -> None:
        """`disk` makes versions ready; `directory` stores the patches between them."""
        self._disk = disk
        self._receivers = receivers
        self._directory = directory
        self._exported: dict[int, asyncio.Task[_Exported]] = {}
        self._patches: dict[tuple[int, int], asyncio.Task[Path]] = {}
        # There is one delivery to a host at a time; the host's other engines then find the version there.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def prepare(self, version: int, step: int) -> WeightVersion:
        return await self._disk.prepare(version, step)

    async def is_available(self, version: WeightVersion) -> bool:
        return await self._disk.is_available(version)

    def is_current(self, served: Served, version: WeightVersion) -> bool:
        """Whether the engine serves this version, which the name of its directory shows: a receiver names it after run and version."""
        return Path(served.model_path).name == f"{version.run_id}@v{version.version:06d}"

    async def prefetch(self, engine_url: str, version: WeightVersion) -> None:
        """Makes the version's directory on the engine's host. Raises EngineFailure."""
        url = self._receivers.url_beside(engine_url)
        try:
            async with self._turns[url]:
                target = await self._exported_version(
                    version.run_id, version.version, Path(version.directory)
                )
                held = await self._receivers.held(url)
                if target.manifest.reference in held:
                    return
                if not await self._send_changes(url, target, held):
                    await self._send_whole(url, target)
        except OSError as error:
            raise EngineFailure(f"weights v{version.version} cannot be sent to {url}: {error}") from error

    async def deliver(
        self, engines: Engines, engine_url: str, version: WeightVersion, mode: PauseMode
    ) -> None:
        await self.prefetch(engine_url, version)
        url = self._receivers.url_beside(engine_url)
        directory = await self._receivers.directory_of(url, version.run_id, version.version)
        if directory is None:
            raise EngineFailure(f"{url} has removed weights v{version.version} already")
        await engines.update(engine_url, version, directory=directory, mode=mode)

    async def discard_old(self, oldest_needed: int) -> None:
        await self._disk.discard_old(oldest_needed)
        kept = await asyncio.to_thread(self._disk.kept_versions)
        self._exported = {version: task for version, task in self._exported.items() if version in kept}
        self._patches = {pair: task for pair, task in self._patches.items() if {*pair} <= kept}
        for path in unused_patches(self._directory, kept):
            path.unlink(missing_ok=True)

    async def _send_changes(self, url: str, target: _Exported, held: tuple[VersionReference, ...]) -> bool:
        """Sends a patch from a version that the receiver has. Returns False if a whole version has to be sent instead."""
        version, run_id = target.manifest.version, target.manifest.run_id
        base = await self._newest_base(target, held)
        if base is None:
            log.info("weights v%d to %s: whole, it has no version that this run still has", version, url)
            return False
        patch = await self._patch(target, base)
        num_bytes = patch.stat().st_size
        try:
            await self._receivers.send_file(url, run_id, version, patch)
        except PatchRefused as error:
            log.warning(
                "weights v%d to %s: the changes since v%d were refused, so it is sent whole: %s",
                *(version, url, base.manifest.version, error),
            )
            return False
        log.info(
            "weights v%d to %s: %d bytes, the changes since v%d",
            version,
            url,
            num_bytes,
            base.manifest.version,
        )
        return True

    async def _send_whole(self, url: str, target: _Exported) -> None:
        manifest = target.manifest
        num_bytes, pieces = whole(manifest, target.directory)
        await self._receivers.send_whole(url, manifest.run_id, manifest.version, num_bytes, pieces)
        log.info("weights v%d to %s: %d bytes, whole", manifest.version, url, num_bytes)

    async def _newest_base(self, target: _Exported, held: tuple[VersionReference, ...]) -> _Exported | None:
        """The newest version that both sides have, with equal content."""
        run_id = target.manifest.run_id
        for reference in sorted(held, key=lambda reference: reference.version, reverse=True):
            directory = self._disk.directory_of(reference.version)
            if reference.run_id != run_id or not directory.is_dir():
                continue
            base = await self._exported_version(run_id, reference.version, directory)
            if base.manifest.reference == reference:
                return base
            log.warning("v%d of a receiver has another content than the trainer's", reference.version)
        return None

    async def _exported_version(self, run_id: str, version: int, directory: Path) -> _Exported:
        """Returns an exported version with its manifest. It is hashed once, even if several deliveries need it at the same time."""
        task = self._exported.get(version)
        if task is None or _has_failed(task):
            task = asyncio.create_task(
                _describe(directory, run_id, version), name=f"describe version {version}"
            )
            self._exported[version] = task
        return await asyncio.shield(task)

    async def _patch(self, target: _Exported, base: _Exported) -> Path:
        """Returns the path of the patch, which is written once. A file that somebody removed is written again."""
        pair = (base.manifest.version, target.manifest.version)
        task = self._patches.get(pair)
        if task is None or _has_failed(task) or (task.done() and not task.result().exists()):
            path = self._directory / f"{pair[0]:06d}-{pair[1]:06d}.patch"
            task = asyncio.create_task(
                asyncio.to_thread(_write, path, target, base), name=f"write patch {path.name}"
            )
            self._patches[pair] = task
        return await asyncio.shield(task)


async def _describe(directory: Path, run_id: str, version: int) -> _Exported:
    manifest = await asyncio.to_thread(manifest_of, directory, run_id, version)
    return _Exported(manifest, directory)


def _write(path: Path, target: _Exported, base: _Exported) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_patch(path, target, base)
    return path


def _has_failed(task: "asyncio.Task[_Exported] | asyncio.Task[Path]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
