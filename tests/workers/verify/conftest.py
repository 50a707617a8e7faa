from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.workers.conftest import RepoImage, built
from tests.workers.verify.spans import FILES, TaskFile


@pytest.fixture(scope="module")
def image(docker_client: docker.DockerClient, task_image: str) -> Iterator[RepoImage]:
    """A repository in which a day has 12 hours, in /workspace and in /testbed."""
    with built(docker_client, FILES, task_image) as built_image:
        yield built_image


@pytest.fixture
def file(tmp_path: Path, image: RepoImage) -> TaskFile:
    return TaskFile(tmp_path / "tasks.jsonl", image)
