"""A tiny agent program, a shell script, of the test's own name."""

import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import docker
import pytest
from docker.errors import APIError

from pipeline.harness import HarnessFile, read_harness
from workers.docker.host import FILLER
from workers.harness import volumes
from workers.harness.building import build
from workers.sandbox.containers import ContainerApi
from workers.settings import docker_host

FILE = """
name = "{name}"
version = "1.2.3"
licence = "MIT"
dialect = "chat"
command = ["{{harness}}/bin/tiny", "--port={{port}}", "{{problem}}"]
version_command = ["{{harness}}/bin/tiny", "--version"]

[build]
directory = "program"
"""
PROGRAM = "#!/bin/sh\necho tiny 1.2.3\n"


@pytest.fixture
def harness_file(tmp_path: Path) -> HarnessFile:
    (tmp_path / "program" / "bin").mkdir(parents=True)
    (tmp_path / "program" / "data").write_bytes(bytes(300_000))
    program = tmp_path / "program" / "bin" / "tiny"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    path = tmp_path / "tiny.toml"
    path.write_text(FILE.format(name=f"tiny-{secrets.token_hex(4)}"))
    return read_harness(path)


@pytest.fixture
async def api() -> AsyncIterator[ContainerApi]:
    api = ContainerApi(docker_host())
    yield api
    await api.close()


@pytest.fixture
async def built(
    docker_client: docker.DockerClient,
    api: ContainerApi,
    harness_file: HarnessFile,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[HarnessFile]:
    """Its image is there. Volumes and containers of fills bear marks of the test's own, so that others' are left alone."""
    name = harness_file.harness.name
    monkeypatch.setattr(volumes, "PREFIX", f"swerve-{name}-")
    monkeypatch.setattr(volumes, "FILLER", f"{FILLER}.{name}")
    assert await build(api, harness_file)
    yield harness_file
    for container in docker_client.containers.list(all=True, filters={"label": f"{FILLER}.{name}"}):
        container.remove(force=True)
    for volume in docker_client.volumes.list(filters={"name": f"swerve-{name}-"}):
        volume.remove()
    with suppress(APIError):
        docker_client.images.remove(harness_file.harness.image, force=True)
