from collections.abc import Callable, Iterator

import docker
import pytest

from tests.workers.attacks.stage import FILES_OF_USER, Calibrations, Stage
from tests.workers.conftest import RepoImage, built
from tests.workers.runners import DEBIANS, image_with_pytest
from workers.sandbox.docker import DockerSandboxes


@pytest.fixture(scope="session")
def calibrations() -> Calibrations:
    return Calibrations()


@pytest.fixture
def stage(
    sandboxes: DockerSandboxes,
    repo_image_with_pytest: Callable[[int], RepoImage],
    calibrations: Calibrations,
) -> Stage:
    return Stage(sandboxes, repo_image_with_pytest, calibrations)


@pytest.fixture
def stage_of_user(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, task_image: str
) -> Iterator[Stage]:
    """A stage in images whose user is not root."""
    base = image_with_pytest(docker_client, task_image, DEBIANS)
    with built(docker_client, FILES_OF_USER, base) as image:
        yield Stage(sandboxes, lambda major: image)
