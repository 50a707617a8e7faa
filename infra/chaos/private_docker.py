"""A dockerd of our own beside the machine's: with its own data, socket, containerd, control groups and network namespace, so
that it touches no bridge of the machine, and leaves nothing behind.
"""

import os
import shutil
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

import docker
import requests
import urllib3
from docker.errors import DockerException

from infra import shims
from infra.processes import Child

GRACE_S = 20.0
CALL_S = 5
API = "1.41"
LABEL = "swerve.fleet"
CGROUPS = Path("/sys/fs/cgroup")


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
        """Copy an image from the machine's Docker. False if it is not there."""
        with subprocess.Popen(
            ["docker", "save", tag], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as saving:
            loading = ["docker", "--host", self.url, "load", "--quiet"]
            loaded = subprocess.run(loading, stdin=saving.stdout, capture_output=True, check=False)
        return not (saving.returncode or loaded.returncode)

    def containers(self) -> list[str]:
        """A line for each container with our label, running or not."""
        words = "{{.ID}} {{.Names}} ({{.Status}})"
        return self._listed("ps", "--all", "--filter", f"label={LABEL}", "--format", words)

    def networks(self) -> list[str]:
        """Those that dockerd does not start with."""
        return self._listed("network", "ls", "--filter", "type=custom", "--format", "{{.Name}}")

    def volumes(self) -> list[str]:
        return self._listed("volume", "ls", "--format", "{{.Name}}")

    def _listed(self, *words: str) -> list[str]:
        """Raises CalledProcessError if dockerd does not answer."""
        listing = ["docker", "--host", self.url, *words]
        return subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()

    def containerd(self, dockerd: Child) -> int | None:
        """The process id of the containerd that `dockerd` started, if it runs."""
        named = [
            pid
            for pid in shims.children(dockerd.pid)
            if shims.read(shims.PROC / str(pid) / "comm").strip() == "containerd"
        ]
        return named[0] if named else None

    def shims(self) -> list[int]:
        """Processes that hold a container of this dockerd."""
        return shims.shims(self._exec_root)

    def end_shims(self) -> None:
        """Call it only while this dockerd does not run."""
        shims.end_shims(self._exec_root)

    def wipe(self) -> None:
        """Remove its files and control groups. Its processes must have ended, and its mounts be gone."""
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
        """The same name for the same directory, so that the next dockerd there finds what a crashed machine has left."""
        return f"swerve-chaos-{zlib.crc32(os.fsencode(self.root)):08x}"
