"""Weight versions on an engine host's local disk.

A version is the directory RUN_ID@v000012 and the file RUN_ID@v000012.manifest beside it, written last. Promises: a directory with a
manifest is whole, forced to disk and byte for byte what the trainer exported; what a killed receiver left unfinished is removed at the
next start; the versions used last stay, the others are removed.
"""

import errno
import fcntl
import hashlib
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from infra.serving.receiver.blocks import rebuilt
from pipeline.bounded_map import bounded_map
from pipeline.message import MalformedMessage, decode, encode
from pipeline.weight_patch import (
    BLOCK_BYTES,
    BlockHeader,
    DirectoryManifest,
    FileContent,
    PatchHeader,
    VersionReference,
)

log = logging.getLogger("swerve.receiver")

NUM_THREADS = min(16, os.cpu_count() or 1)


class BaseMissing(Exception):
    """The base of a patch is not here, or has another content."""


class WrongContent(Exception):
    """What was rebuilt is not what the manifest describes."""


class _BlockToWrite(NamedTuple):
    """One block to be written: from the patch, from the base, or from both."""

    file: FileContent
    block: int
    into: int  # descriptors
    base: int | None
    patch: tuple[BlockHeader, bytes] | None


class VersionStore:
    """What `directory` holds. Methods may be called by several threads."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        """`open_versions` keeps a second receiver out of the directory."""
        self._directory = directory
        self._keep = keep
        self._numbers = itertools.count()
        self._turn = threading.Lock()  # for what changes names
        self._remove_unfinished()

    def held(self) -> tuple[VersionReference, ...]:
        return tuple(manifest.reference for manifest in self._manifests())

    def path_of(self, run_id: str, version: int) -> Path | None:
        """The directory of a version that is about to be used, which keeps it from being removed; None if it is not here."""
        directory = self._path(run_id, version)
        with self._turn:
            try:
                _note_use(_manifest_path(directory))
            except FileNotFoundError:
                return None
        return directory

    def apply(self, header: PatchHeader, blocks: Iterable[tuple[BlockHeader, bytes]]) -> Path:
        """Make the target's directory. A version that is here already with that content is left as it is.

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
        with ExitStack() as files, ThreadPoolExecutor(NUM_THREADS, "blocks") as pool:
            wanted = _wanted(target, base, partial, blocks, files)
            for _ in bounded_map(pool, _write_block, wanted, ahead=2 * NUM_THREADS):
                pass

    def _finish(self, target: DirectoryManifest, partial: Path, directory: Path) -> None:
        """Give the directory its name. A version of that name with another content is replaced."""
        for path in (*partial.iterdir(), partial):
            _sync(path)
        manifest = partial.with_suffix(".manifest-partial")
        manifest.write_bytes(encode(target))
        _note_use(manifest)
        _sync(manifest)
        with self._turn:
            if self._manifest(directory) == target:  # another call was faster, and an engine may be reading
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


@contextmanager
def open_versions(directory: Path, *, keep: int) -> Iterator[VersionStore]:
    """Raises ValueError if another receiver uses the directory, OSError if it cannot be used."""
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
    """The kernel's own time stamps are milliseconds apart, and two uses may be closer."""
    now = time.time_ns()
    os.utime(manifest, ns=(now, now))


def _remove(directory: Path) -> None:
    """The manifest goes first: what has one is whole."""
    _manifest_path(directory).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        shutil.rmtree(directory)


def _wanted(
    target: DirectoryManifest,
    base: tuple[DirectoryManifest, Path] | None,
    partial: Path,
    blocks: Iterable[tuple[BlockHeader, bytes]],
    files: ExitStack,
) -> Iterator[_BlockToWrite]:
    """Every block of the target with what it is made of. Raises MalformedMessage for one that neither patch nor base has."""
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
