"""Processes that hold a container: they outlive the Docker engine that started them.

An engine that is killed and started again takes its containers up and ends them, but not one that it was about to start or
to remove: of that it knows nothing any more, and nobody else does.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
ADDRESS = "-address"  # of the containerd that a shim answers to


def shims(exec_root: Path) -> list[int]:
    """Process ids of those that an engine with this ``--exec-root`` started, whether or not it lives."""
    return [pid for pid, words in _command_lines() if _is_shim_of(exec_root.resolve(), words)]


def end_shims(exec_root: Path) -> list[int]:
    """Kill them, and the first process of each one's container. To be called while no such engine lives: the next one's
    containerd tidies up after them. Returns their process ids.
    """
    found = shims(exec_root)
    for pid in found:
        for member in (*children(pid), pid):
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
    return found


def children(pid: int) -> list[int]:
    return [int(child) for task in PROC.glob(f"{pid}/task/*/children") for child in read(task).split()]


def read(path: Path) -> str:
    """A file of /proc; empty if its process has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _command_lines() -> Iterator[tuple[int, list[str]]]:
    for directory in PROC.iterdir():
        if directory.name.isdigit() and (line := read(directory / "cmdline")):
            yield int(directory.name), line.split("\0")


def _is_shim_of(exec_root: Path, words: list[str]) -> bool:
    if "containerd-shim" not in words[0] or ADDRESS not in words[:-1]:
        return False
    return Path(words[words.index(ADDRESS) + 1]).resolve().is_relative_to(exec_root)
