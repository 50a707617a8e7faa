"""Memory of process trees, with pages that processes share counted once (PSS)."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

PROC = Path("/proc")
DOCKER_PROCESSES = frozenset({"dockerd", "containerd", "containerd-shim"})


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The moment at which the total was largest."""

    total_bytes: int
    parts_bytes: dict[str, int]
    """The size of each part at that moment; a single part may have been larger at another moment."""

    after_s: float  # time since the watch began


class MemoryWatch:
    """A context in which a thread samples the memory of all parts every few seconds."""

    def __init__(self, roots: Callable[[], Mapping[str, int]], every_s: float = 3.0) -> None:
        """`roots` returns, for every sample, the process at the root of each part's tree."""
        self._roots = roots
        self._every_s = every_s
        self._began_at = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)
        self.peak = Peak(total_bytes=0, parts_bytes={}, after_s=0.0)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            parts = parts_bytes(self._roots())
            total = sum(parts.values())
            if total > self.peak.total_bytes:
                after_s = time.monotonic() - self._began_at
                self.peak = Peak(total_bytes=total, parts_bytes=parts, after_s=round(after_s, 1))
            if self._stop.wait(self._every_s):
                return


def parts_bytes(roots: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each tree in `roots`, and of Docker's processes as part `docker`."""
    children: dict[int, list[int]] = defaultdict(list)
    docker: list[int] = []
    for directory in PROC.iterdir():
        if directory.name.isdigit() and (stat := read(directory / "stat")):
            command, _, rest = stat.partition("(")[2].rpartition(")")
            children[int(rest.split()[1])].append(int(directory.name))
            if command in DOCKER_PROCESSES:
                docker.append(int(directory.name))
    parts = {name: sum(map(pss_bytes, tree(root, children))) for name, root in roots.items()}
    parts["docker"] = sum(map(pss_bytes, docker))
    return parts


def tree(root: int, children: Mapping[int, list[int]]) -> list[int]:
    """`root` and all its descendants."""
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def pss_bytes(pid: int) -> int:
    """Proportional set size; 0 for a process that has ended."""
    for line in read(PROC / str(pid) / "smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
