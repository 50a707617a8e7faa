"""A Docker engine of our own beside the machine's: own data, own socket, own containerd, no network; and nothing
of it left afterwards, whatever was killed.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import docker
import requests
import urllib3

from infra.processes import Child

GRACE_S = 20.0
CALL_S = 5
API = "1.41"
LABEL = "swerve.fleet"
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class PrivateDocker:
    """An engine that lives under ``root``."""

    root: Path

    @property
    def url(self) -> str:
        return f"unix://{self.root / 'docker.sock'}"

    @property
    def command(self) -> list[str]:
        command = ["dockerd", f"--host={self.url}", f"--data-root={self.root / 'data'}"]
        command += [f"--exec-root={self.root / 'exec'}", f"--pidfile={self.root / 'pid'}"]
        return [*command, "--iptables=false", "--ip-forward=false", "--ip-masq=false"]

    def is_whole(self) -> bool:
        """Whether it answers and has its containerd."""
        try:
            with docker.APIClient(self.url, version=API, timeout=CALL_S) as client:
                names = {component["Name"] for component in client.version()["Components"]}
        except (
            docker.errors.DockerException,
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            OSError,
        ):
            return False
        return "containerd" in names

    def copy_image(self, tag: str) -> bool:
        """From the machine's engine. False if it is not to be had there."""
        with subprocess.Popen(
            ["docker", "save", tag], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as saving:
            loading = ["docker", "--host", self.url, "load", "--quiet"]
            loaded = subprocess.run(loading, stdin=saving.stdout, capture_output=True, check=False)
        return not (saving.returncode or loaded.returncode)

    def containers(self) -> list[str]:
        """Those with our label, running or not; a word on each."""
        words = "{{.Names}} ({{.Status}})"
        return self._listed("ps", "--all", "--filter", f"label={LABEL}", "--format", words)

    def networks(self) -> list[str]:
        """Those that an engine does not start with."""
        return self._listed("network", "ls", "--filter", "type=custom", "--format", "{{.Name}}")

    def volumes(self) -> list[str]:
        return self._listed("volume", "ls", "--format", "{{.Name}}")

    def _listed(self, *words: str) -> list[str]:
        """Raises CalledProcessError if the engine does not answer."""
        listing = ["docker", "--host", self.url, *words]
        return subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()

    def containerd(self, dockerd: Child) -> int | None:
        """The process id of the containerd that ``dockerd`` started, if it runs."""
        found = [
            pid for pid in _children(dockerd.pid) if _read(PROC / str(pid) / "comm").strip() == "containerd"
        ]
        return found[0] if found else None

    def guardians(self) -> list[int]:
        """Processes that hold a container of this engine; they outlive it."""
        ours = str(self.root / "exec")
        return [
            pid
            for pid, words in _command_lines()
            if "containerd-shim" in words[0] and ours in " ".join(words)
        ]

    def wipe(self) -> None:
        """Everything of an engine that has ended: what it left running, mounted, and on disk."""
        for pid in self.guardians():
            for member in (pid, *_children(pid)):
                _kill(member)
        for mount in sorted(self._mounts(), key=len, reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
        for _ in range(20):
            shutil.rmtree(self.root, ignore_errors=True)
            if not self.root.exists():
                return
            time.sleep(0.1)

    def _mounts(self) -> list[str]:
        places = [line.split()[1] for line in _read(PROC / "mounts").splitlines()]
        return [place for place in places if Path(place).is_relative_to(self.root)]


def _command_lines() -> Iterator[tuple[int, Sequence[str]]]:
    for directory in PROC.iterdir():
        if directory.name.isdigit() and (line := _read(directory / "cmdline")):
            yield int(directory.name), line.split("\0")


def _children(pid: int) -> list[int]:
    return [int(child) for task in PROC.glob(f"{pid}/task/*/children") for child in _read(task).split()]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
