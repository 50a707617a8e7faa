"""Shims: the processes that hold containers. They outlive the dockerd that started them.

A dockerd that is killed and started again finds its containers and ends them, except one that it was just starting or
removing: it has no record of that one any more, and nothing else has.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
ADDRESS = "-address"  # of the shim's containerd


def shims(exec_root: Path) -> list[int]:
    """Process ids of the shims that a dockerd with this `--exec-root` started, whether or not it runs."""
    return [pid for pid, words in _command_lines() if _is_shim_of(exec_root.resolve(), words)]


def end_shims(exec_root: Path) -> list[int]:
    """Kill the shims and the first process of each one's container. Call it while no such dockerd runs; the containerd of
    the next one cleans up after them. Returns the shims' process ids.
    """
    found = shims(exec_root)
    for pid in found:
        for member in (*children(pid), pid):
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
    return found


def children(pid: int) -> list[int]:
    """None of a process that ends meanwhile."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for task in PROC.glob(f"{pid}/task/*/children") for child in read(task).split()]
    return []


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
