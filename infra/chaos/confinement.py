"""The isolation of a campaign from the machine: its own process and mount namespaces, and its own dockerd.

When the first process of these namespaces ends, even if it is killed, the kernel ends all other processes in them and removes their
mounts. So nothing outlives a campaign that is itself killed, and mounts of its dockerd never keep anyone from removing its directory.

The dockerd runs in addition to the machine's, with its own data, socket, containerd, control groups and network namespace, so that it
touches no bridge of the machine, and leaves nothing behind.
"""

import ctypes
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import docker
import requests
import urllib3
from docker.errors import DockerException

from infra import services
from infra.processes import PR_SET_PDEATHSIG, Child, libc

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
SYSTEM_CONTAINERD = Path("/run/containerd")
"""Shims of every dockerd put their sockets here, and dockerd looks here for a containerd to use instead of its own."""


def run_confined(body: Callable[[], int], *, signals: Sequence[signal.Signals]) -> int:
    """Run `body` as process 1 of new namespaces and return its exit status.

    It starts with the handlers of `signals` that are installed now; we pass these signals on to it, also those that arrive
    while it starts. This process can start no other processes any more. Raises OSError without the privileges.
    """
    _check(libc.unshare(CLONE_NEWPID))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    process = multiprocessing.get_context("fork").Process(target=_enter, args=(body, before))
    process.start()

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)

    for number in signals:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    process.join()
    status = process.exitcode
    assert status is not None, "it has ended"
    return status if status >= 0 else 128 - status


def _enter(body: Callable[[], int], mask: Iterable[int]) -> None:
    os.setsid()  # its own session: Ctrl-C reaches it once, through its parent
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _check(libc.unshare(CLONE_NEWNS))
    _mount("none", Path("/"), "", MS_REC | MS_PRIVATE)
    _mount("proc", Path("/proc"), "proc", 0)
    SYSTEM_CONTAINERD.mkdir(parents=True, exist_ok=True)
    _mount("tmpfs", SYSTEM_CONTAINERD, "tmpfs", 0)
    sys.exit(body())


def _mount(source: str, target: Path, kind: str, flags: int) -> None:
    _check(libc.mount(source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), None))


def _check(result: int) -> None:
    if result:
        error = ctypes.get_errno()
        reason = os.strerror(error)
        raise OSError(error, f"cannot create namespaces: {reason}; run infra.chaos as root, as dockerd is")


GRACE_S = 20.0
CALL_S = 5
API = "1.41"
CGROUPS = Path("/sys/fs/cgroup")
PROGRAM_VOLUMES = "swerve-harness-"  # prefix of the names of the volumes


@dataclass(frozen=True, slots=True)
class PrivateDocker:
    """A dockerd whose files are all under `root`."""

    root: Path

    @property
    def url(self) -> str:
        return f"unix://{self.root / 'docker.sock'}"

    @property
    def command(self) -> list[str]:
        command = ["unshare", "--net", "dockerd", f"--host={self.url}", f"--data-root={self.root / 'data'}"]
        command += [f"--exec-root={self._exec_root}", f"--pidfile={self.root / 'pid'}"]
        command += [f"--cgroup-parent=/{self._cgroup}", "--exec-opt=native.cgroupdriver=cgroupfs"]
        return [*command, "--iptables=false", "--ip-forward=false", "--ip-masq=false"]

    def works(self) -> bool:
        """Whether it answers and has its containerd."""
        try:
            with docker.APIClient(self.url, version=API, timeout=CALL_S) as client:
                names = {component["Name"] for component in client.version()["Components"]}
        except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError):
            return False
        return "containerd" in names

    def copy_image(self, tag: str) -> bool:
        """Copies an image from the machine's Docker. Returns False if the image is not there."""
        with subprocess.Popen(
            ["docker", "save", tag], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as saving:
            loading = ["docker", "--host", self.url, "load", "--quiet"]
            loaded = subprocess.run(loading, stdin=saving.stdout, capture_output=True, check=False)
        return not (saving.returncode or loaded.returncode)

    def containers(self) -> list[str]:
        """A line for each container, running or not."""
        return self._listed("ps", "--all", "--format", "{{.ID}} {{.Names}} ({{.Status}})")

    def networks(self) -> list[str]:
        """The networks that dockerd does not create at its start."""
        return self._listed("network", "ls", "--filter", "type=custom", "--format", "{{.Name}}")

    def volumes(self) -> list[str]:
        """The volumes in use, and those without an agent program. An unused volume with one is kept for the next episodes."""
        found = self._listed("volume", "ls", "--format", "{{.Name}}")
        unused = self._listed("volume", "ls", "--filter", "dangling=true", "--format", "{{.Name}}")
        kept = {name for name in unused if name.startswith(PROGRAM_VOLUMES)}
        return [name for name in found if name not in kept]

    def _listed(self, *words: str) -> list[str]:
        """Raises CalledProcessError if dockerd does not answer."""
        listing = ["docker", "--host", self.url, *words]
        return subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()

    def containerd(self, dockerd: Child) -> int | None:
        """The process id of the containerd that `dockerd` started, if it runs."""
        named = [
            pid
            for pid in services.children_of(dockerd.pid)
            if services.read_proc(services.PROC / str(pid) / "comm").strip() == "containerd"
        ]
        return named[0] if named else None

    def shims(self) -> list[int]:
        """Processes that hold a container of this dockerd."""
        return services.shims(self._exec_root)

    def kill_in_container(self, *, mark: bytes | None, rng: random.Random) -> bool:
        """Kills the first process of a container, or a process in a container whose command line contains `mark`.

        Returns False if there is none.
        """
        firsts = [pid for shim in self.shims() for pid in services.children_of(shim)]
        found = firsts
        if mark is not None:
            found = [pid for pid in _descendants(firsts) if mark in _command_line(pid)]
        try:
            os.kill(rng.choice(found), signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            return False
        return True

    def end_shims(self) -> None:
        """Ends the shims. Call it only while this dockerd does not run."""
        services.end_shims(self._exec_root)

    def wipe(self) -> None:
        """Removes its files and control groups. Its processes must have ended, and its mounts must be gone."""
        if self.root.exists():
            shutil.rmtree(self.root)
        for hierarchy in (CGROUPS, *CGROUPS.iterdir()):
            for directory, _, _ in os.walk(hierarchy / self._cgroup, topdown=False):
                os.rmdir(directory)

    @property
    def _exec_root(self) -> Path:
        return self.root / "exec"

    @property
    def _cgroup(self) -> str:
        """The name of the control group.

        It depends only on the directory, so the next dockerd there finds what a crashed machine has left.
        """
        return f"swerve-chaos-{zlib.crc32(os.fsencode(self.root)):08x}"


def _descendants(pids: Iterable[int]) -> Iterator[int]:
    for pid in pids:
        children = services.children_of(pid)
        yield from children
        yield from _descendants(children)


def _command_line(pid: int) -> bytes:
    """The command line of the process; empty if it has ended."""
    try:
        return (services.PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""
