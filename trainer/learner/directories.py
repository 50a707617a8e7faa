"""Directories that appear whole or not at all, and files forced to disk. No torch."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """A hidden sibling to write into. It takes the directory's name if the block succeeds; else the name stays as it was.

    A directory of that name is replaced. What a killed process left half written is removed by the next writer.
    """
    yield begin(directory)
    commit(directory)


def begin(directory: Path) -> Path:
    """Make the empty hidden directory in which the content of `directory` is written."""
    partial = partial_of(directory)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def partial_of(directory: Path) -> Path:
    """Where the content of `directory` is written before it gets its name."""
    return directory.with_name(f".{directory.name}.partial")


def commit(directory: Path) -> None:
    """Rename the written content to `directory`, in place of what had that name.

    At no moment is there neither: a process killed between the two renames leaves a directory for `finish_replacement`.
    """
    replaced = _replaced_of(directory)
    finish_replacement(directory)
    if directory.exists():
        directory.rename(replaced)
    partial_of(directory).rename(directory)
    sync(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def finish_replacement(directory: Path) -> None:
    """Give `directory` its content back if a killed process left it between two names: the one that was to be replaced."""
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
    """Where `commit` puts the old content while the new one gets the name."""
    return directory.with_name(f".{directory.name}.replaced")
