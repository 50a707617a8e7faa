from collections.abc import Callable

import pytest

from tests.workers.attacks.stage import Calibrations, Stage
from tests.workers.conftest import RepoImage
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
