"""A registry of the session's own, and a place for each test's images, which are gone afterwards."""

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest

from tests.workers.images.registry import Registry, layer
from workers.images import eviction
from workers.images.__main__ import main
from workers.images.api import ImageApi
from workers.images.eviction import Shelf
from workers.images.pulling import Puller, PullPlan
from workers.settings import docker_host

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Ran:
    status: object
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Place:
    """`hub` is what names on docker.io begin with here: nothing outside has it, so only a proxy can help."""

    registry: Registry
    api: ImageApi
    shelf: Shelf
    hub: str
    capture: pytest.CaptureFixture[str]

    def publish(self, name: str, *layers: bytes, architecture: str = "amd64") -> str:
        """An image in the registry under `hub`/name; the whole name as the registry itself has it."""
        content = layers or (layer("file", name.encode() + secrets.token_bytes(8)),)
        self.registry.publish(f"{self.hub}/{name}", list(content), architecture=architecture)
        return f"{self.registry.host}/{self.hub}/{name}" + ("" if ":" in name else ":latest")

    def puller(self, **changes: object) -> Puller:
        plan: dict[str, object] = {"platform": self.api.platform, "retries": 0}
        return Puller(self.api, self.shelf, PullPlan(**(plan | changes)))

    def run(self, *arguments: str) -> Ran:
        """The command line, in this process."""
        self.capture.readouterr()
        try:
            status = main(list(arguments))
        except SystemExit as misuse:
            status = misuse.code
        said = self.capture.readouterr()
        return Ran(status, said.out, said.err)

    def start(self, *arguments: str, stderr: int | None = None) -> subprocess.Popen[bytes]:
        """The command line, in a process of its own, which sees the agents' images of others: give no budget."""
        command = [sys.executable, "-m", "workers.images", *arguments]
        return subprocess.Popen(command, cwd=ROOT, stderr=stderr)


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    registry = Registry(tmp_path_factory.mktemp("registry"))
    registry.start()
    yield registry
    registry.kill()


@pytest.fixture
def place(
    registry: Registry,
    docker_client: docker.DockerClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Place]:
    """What agents' images of others there are on this Docker host is none of this test's business."""
    api, hub = ImageApi(docker_host()), f"swerve-test-{secrets.token_hex(5)}"
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(eviction, "AGENT_IMAGE", f"{hub}.agent-image")
    yield Place(registry, api, Shelf(tmp_path / "state", api.id), hub, capsys)
    for image in api.images():
        for name in (*image.tags, *image.digests):
            if f"{hub}/" in name:
                with contextlib.suppress(docker.errors.ImageNotFound):
                    docker_client.api.remove_image(name, force=True)
    api.close()
