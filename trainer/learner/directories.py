"""Directories that appear whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def appearing(directory: Path) -> Iterator[Path]:
    """A hidden sibling to write into; on success it takes the directory's name, on failure the name is left
    as it was.

    A directory already there is replaced. What a killed process left half written is swept away by the next
    to try.
    """
    yield prepare(directory)
    settle(directory)


def prepare(directory: Path) -> Path:
    """An empty place to gather the content of a directory in."""
    partial = partial_of(directory)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def partial_of(directory: Path) -> Path:
    """Where the content of a directory is gathered before it may be seen."""
    return directory.with_name(f".{directory.name}.partial")


def settle(directory: Path) -> None:
    """Give the gathered content the directory's name."""
    replaced = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if directory.exists():
        directory.rename(replaced)
    partial_of(directory).rename(directory)
    shutil.rmtree(replaced, ignore_errors=True)
    parent = os.open(directory.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
