"""Repositories of which images are made."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.workers.making.repositories import Repository


@pytest.fixture
def repository(tmp_path: Path, docker_client: docker.DockerClient) -> Iterator[Repository]:
    """A repository with a name of its own; images that are made of it are removed."""
    made = Repository.at(tmp_path / f"t{secrets.token_hex(6)}")
    yield made
    for image in docker_client.images.list():
        for tag in (tag for tag in image.tags if tag.startswith(f"swerve-git/{made.path.name}")):
            docker_client.images.remove(tag, force=True)
