"""The images with other versions of pytest have the versions that their names say."""

from collections.abc import Callable

import docker
import pytest

from tests.workers.conftest import RepoImage

pytestmark = pytest.mark.docker


@pytest.mark.slow_but_for("7")
@pytest.mark.parametrize("major", [7, 8, 9])
def test_an_image_has_the_pytest_that_was_asked_for(
    docker_client: docker.DockerClient, repo_image_with_pytest: Callable[[int], RepoImage], major: int
) -> None:
    command = ["python3", "-m", "pytest", "--version"]
    image = repo_image_with_pytest(major).tag
    said = docker_client.containers.run(image, command, remove=True, network_mode="none", stderr=True)
    assert said.decode().startswith(f"pytest {major}.")
