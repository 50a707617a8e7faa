"""A Docker engine of our own beside the machine's: own data, own socket, own containerd, own control groups, and a network
namespace of its own, so that no bridge of the machine is ever touched; and nothing of it left afterwards.
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

from infra import shims
from infra.processes import Child

GRACE_S = 20.0
CALL_S = 5
API = "1.41"
LABEL = "swerve.fleet"
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class PrivateDocker:
    """An engine that lives under ``root``."""

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
        words = "{{.ID}} {{.Names}} ({{.Status}})"
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
        named = [
            pid
            for pid in shims.children(dockerd.pid)
            if shims.read(shims.PROC / str(pid) / "comm").strip() == "containerd"
        ]
        return named[0] if named else None

    def shims(self) -> list[int]:
        """Processes that hold a container of this engine."""
        return shims.shims(self._exec_root)

    def end_shims(self) -> None:
        """While it does not live."""
        shims.end_shims(self._exec_root)

    def wipe(self) -> None:
        """Everything of an engine whose processes have ended, and whose mounts are gone."""
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
        """One name for one place, so that the next engine there finds what a machine that went down has left."""
        return f"swerve-chaos-{zlib.crc32(os.fsencode(self.root)):08x}"
