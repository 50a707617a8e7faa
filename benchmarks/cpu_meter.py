"""CPU time spent on commands in containers, wherever it is spent: client, dockerd and containerd, shims, containers.

The shim of a container collects the processes that Docker starts for a command, and most of their time is also in the
container's cgroup. Only the larger of the two is counted, so that nothing is counted twice. dockerd may serve others on the
machine too: what it uses while we request nothing is measured just before, and subtracted.
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

from benchmarks.docker_api import SOCKET

TICKS = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU seconds up to a moment."""

    at: float  # that moment, on the clock of `time.perf_counter`
    client_s: float
    dockerd_s: float
    shims_s: float
    reaped_by_shims_s: float
    containers_s: float

    def dockerd_rate(self, earlier: "CpuReading") -> float:
        """CPU seconds per second that dockerd and containerd used in between."""
        return (self.dockerd_s - earlier.dockerd_s) / (self.at - earlier.at)

    def since(self, earlier: "CpuReading", *, for_others: float) -> float:
        """CPU seconds in between, without dockerd's rate `for_others`."""
        in_shims = self.reaped_by_shims_s - earlier.reaped_by_shims_s
        in_containers = self.containers_s - earlier.containers_s
        dockerd_s = self.dockerd_s - earlier.dockerd_s - for_others * (self.at - earlier.at)
        own_s = self.client_s - earlier.client_s + self.shims_s - earlier.shims_s
        return own_s + max(0.0, dockerd_s) + max(in_shims, in_containers)


class CpuMeter:
    """Measures for containers, each given by its full id and its first process."""

    def __init__(self, containers: Sequence[tuple[str, int]]) -> None:
        self._dockerd = [_listener(SOCKET), *_without_children(_named("containerd"))]
        ids = {container for container, _ in containers}
        self._shims = [pid for pid in _named("containerd-shim") if ids & set(_words(pid))]
        self._accounts = [cgroup(pid, "cpuacct") for _, pid in containers]

    def read(self) -> CpuReading:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        mine = resource.getrusage(resource.RUSAGE_SELF)
        dockerd = [_times(pid) for pid in self._dockerd]
        shims = [_times(pid) for pid in self._shims]
        return CpuReading(
            at=time.perf_counter(),
            client_s=mine.ru_utime + mine.ru_stime + children.ru_utime + children.ru_stime,
            dockerd_s=sum(own + reaped for own, reaped in dockerd),
            shims_s=sum(own for own, _ in shims),
            reaped_by_shims_s=sum(reaped for _, reaped in shims),
            containers_s=sum(_used(account) for account in self._accounts),
        )


def cgroup(pid: int, controller: str) -> Path:
    """The directory of the process's cgroup with `controller`, in version 1 or 2 of cgroups."""
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
    """CPU times of the process itself and of its children that have ended."""
    fields = Path(PROC, str(pid), "stat").read_text().rpartition(")")[2].split()
    user, system, reaped_user, reaped_system = (int(field) for field in fields[11:15])
    return (user + system) / TICKS, (reaped_user + reaped_system) / TICKS


def _listener(path: str) -> int:
    """The process that listens on the Unix socket."""
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


def _without_children(pids: Iterable[int]) -> Iterator[int]:
    """The processes whose parent is not among them too: the others are about to execute another program, or to end."""
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
