"""Directories that appear complete or not at all, files forced to disk, and errors of full disks. It does not import torch."""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_NEARLY_NOTHING_BYTES = 1024**2
"""The disk counts as full if less is free and a library reports a failure without its cause."""

SEEN_WITHIN_S = 90.0
"""The longest time until another machine sees a new directory. Clients of NFS remember for up to 60 s that there is none."""


class DiskFull(OSError):
    """`filename` could not be written because its disk, or a quota on it, is full."""

    def __str__(self) -> str:
        path = Path(self.filename)
        return f"the disk at {_mount_of(path)} is full, so {path} could not be written"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises DiskFull if the block, which writes to `path` or below it, fails and the disk is full; other errors propagate unchanged.
    torch reports some failures of a file as RuntimeError without a cause, so the free space of the disk is checked, too.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if disk_full_in(error) is error or not (_says_full(error) or _is_full(path)):
            raise
        raise DiskFull(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


def disk_full_in(error: BaseException) -> DiskFull | None:
    """The DiskFull that caused an error, or an error of a group; None if none did."""
    return next((one for one in _chain(error) if isinstance(one, DiskFull)), None)


def write_whole(file: BinaryIO, content: bytes, *, at: int) -> None:
    """Writes to the end of an unbuffered file, which is at offset `at`. After an error the file is cut off there again."""
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), at)
            file.seek(at)
        raise


@contextlib.contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """A hidden sibling to write into. It gets the directory's name if the block succeeds; otherwise nothing changes.

    A directory of that name is replaced. The next writer removes an incomplete sibling that a killed process left behind.
    """
    yield begin(directory)
    commit(directory)


@contextlib.contextmanager
def discarded_if_failed(directory: Path) -> Iterator[None]:
    """Removes the incomplete `directory` if writing it fails in the block, because it may fill the disk. Raises DiskFull if a full disk is
    the reason.
    """
    try:
        with writing(directory):
            yield
    except BaseException:
        shutil.rmtree(partial_of(directory), ignore_errors=True)
        raise


def begin(directory: Path) -> Path:
    """Make the empty hidden directory in which the content of `directory` is written."""
    partial = partial_of(directory)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def wait_for(directory: Path) -> None:
    """Wait until this machine sees a directory that another one has made: NFS remembers for a while that there was none.

    Raises FileNotFoundError if it does not see it within SEEN_WITHIN_S.
    """
    until = time.monotonic() + SEEN_WITHIN_S
    while not directory.is_dir():
        if time.monotonic() > until:
            reason = (
                f"rank 0 made it {SEEN_WITHIN_S:g} s ago and this machine does not see it; the learner's machines need a shared "
                "file system for the directory of the run"
            )
            raise FileNotFoundError(errno.ENOENT, reason, str(directory))
        with contextlib.suppress(OSError):
            os.listdir(directory.parent)  # a listing makes an NFS client ask its server
        time.sleep(0.1)


def partial_of(directory: Path) -> Path:
    """The path at which the content of `directory` is written before it gets its name."""
    return directory.with_name(f".{directory.name}.partial")


def commit(directory: Path) -> None:
    """Rename the written content to `directory`, replacing an existing directory.

    The old or the new content exists at every moment: a process killed between the two renames leaves a directory for `finish_replacement`.
    """
    replaced = _replaced_of(directory)
    finish_replacement(directory)
    if directory.exists():
        directory.rename(replaced)
    partial_of(directory).rename(directory)
    sync(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def finish_replacement(directory: Path) -> None:
    """Restores the content that a killed process was replacing, if it was killed between the two renames."""
    replaced = _replaced_of(directory)
    if replaced.is_dir() and not directory.exists():
        replaced.rename(directory)
    shutil.rmtree(replaced, ignore_errors=True)


def sync_files(directory: Path) -> None:
    """Force the files of a directory, and their names, to disk."""
    for path in directory.iterdir():
        sync(path)
    sync(directory)


def sync(path: Path) -> None:
    """Force a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replaced_of(directory: Path) -> Path:
    """The path at which `commit` keeps the old content while the new content gets the name."""
    return directory.with_name(f".{directory.name}.replaced")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, the errors of its group, and their causes."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop(0)
        if any(one is before for before in seen):
            continue
        seen.append(one)
        yield one
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        waiting += [cause for cause in (one.__cause__, one.__context__) if cause is not None]


def _says_full(error: BaseException) -> bool:
    return any(
        isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT) for one in _chain(error)
    )


def _is_full(path: Path) -> bool:
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    disk = os.statvfs(there)
    return disk.f_bavail * disk.f_frsize < _NEARLY_NOTHING_BYTES


def _mount_of(path: Path) -> Path:
    """The mount point of the file system that holds `path`, or would hold it."""
    real = path.resolve()
    return next(place for place in (real, *real.parents) if place.is_mount())
