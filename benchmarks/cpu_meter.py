"""CPU time spent for commands in containers, wherever it was spent: client, engine, shims, containers.

What the engine starts for a command is reaped by the container's shim, and most of it ran in the container's cgroup:
of these two the larger is counted, so that nothing is counted twice. The engine may serve others on the machine too: what
it uses while we ask nothing of it is measured just before, and taken off.
"""

import os
import resource
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_api import SOCKET

TICKS = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds up to a moment."""

    at: float  # that moment, on the clock of `time.perf_counter`
    client: float
    engine: float
    shims: float
    reaped_by_shims: float
    containers: float

    def engine_rate(self, earlier: "Usage") -> float:
        """CPU seconds per second that the engine used in between."""
        return (self.engine - earlier.engine) / (self.at - earlier.at)

    def since(self, earlier: "Usage", *, for_others: float) -> float:
        """CPU seconds in between, less the engine's rate for others."""
        started = max(self.reaped_by_shims - earlier.reaped_by_shims, self.containers - earlier.containers)
        engine = max(0.0, self.engine - earlier.engine - for_others * (self.at - earlier.at))
        return self.client - earlier.client + engine + self.shims - earlier.shims + started


class CpuMeter:
    """For containers given by their full id and first process."""

    def __init__(self, containers: Sequence[tuple[str, int]]) -> None:
        self._engine = [_listener(SOCKET), *_eldest(_named("containerd"))]
        ids = {container for container, _ in containers}
        self._shims = [pid for pid in _named("containerd-shim") if ids & set(_words(pid))]
        self._accounts = [cgroup(pid, "cpuacct") for _, pid in containers]

    def read(self) -> Usage:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        mine = resource.getrusage(resource.RUSAGE_SELF)
        engine = [_times(pid) for pid in self._engine]
        shims = [_times(pid) for pid in self._shims]
        return Usage(
            at=time.perf_counter(),
            client=mine.ru_utime + mine.ru_stime + children.ru_utime + children.ru_stime,
            engine=sum(own + reaped for own, reaped in engine),
            shims=sum(own for own, _ in shims),
            reaped_by_shims=sum(reaped for _, reaped in shims),
            containers=sum(_used(account) for account in self._accounts),
        )


def cgroup(pid: int, controller: str) -> Path:
    """The directory of the process's cgroup that has `controller`, in either version of cgroups."""
    for line in Path(PROC, str(pid), "cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        if controller in names.split(","):
            return Path("/sys/fs/cgroup", controller, path.lstrip("/"))
        if number == "0" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Path("/sys/fs/cgroup", path.lstrip("/"))
    raise RuntimeError(f"process {pid} is in no cgroup with {controller}")


def _used(account: Path) -> float:
    one = account / "cpuacct.usage"
    if one.exists():
        return int(one.read_text()) / 1e9
    return int((account / "cpu.stat").read_text().split()[1]) / 1e6


def _times(pid: int) -> tuple[float, float]:
    """Of the process itself, and of its children that have ended."""
    fields = Path(PROC, str(pid), "stat").read_text().rpartition(")")[2].split()
    user, system, reaped_user, reaped_system = (int(field) for field in fields[11:15])
    return (user + system) / TICKS, (reaped_user + reaped_system) / TICKS


def _listener(path: str) -> int:
    """Who listens on the Unix socket."""
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)
        credentials = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def _named(name: str) -> Iterator[int]:
    """Processes whose name, which the kernel cuts at 15 characters, starts like this."""
    for directory in PROC.iterdir():
        if directory.name.isdigit():
            try:
                found = (directory / "comm").read_text().strip()
            except OSError:
                continue  # it has just ended
            if found == name or (name.endswith("shim") and found.startswith(name)):
                yield int(directory.name)


def _eldest(pids: Iterable[int]) -> Iterator[int]:
    """Without children of others among them, which are about to become something else, or to end."""
    known = set(pids)
    for pid in known:
        with suppress(OSError):
            fields = Path(PROC, str(pid), "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) not in known:
                yield pid


def _words(pid: int) -> list[str]:
    try:
        return Path(PROC, str(pid), "cmdline").read_text().split("\0")
    except OSError:
        return []
