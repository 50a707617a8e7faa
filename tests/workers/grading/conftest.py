from collections.abc import Callable

import pytest

from pipeline.task import ExitCode, Task
from tests.workers.claims import make_task
from tests.workers.conftest import RepoImage
from tests.workers.grading.patches import HIDDEN_TESTS, PYTEST
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes


@pytest.fixture
def grader(sandboxes: DockerSandboxes) -> Grader:
    return Grader(sandboxes)


@pytest.fixture
def task(repo_image: RepoImage) -> Task:
    verdict = ExitCode(
        eval_script=PYTEST, test_patch=HIDDEN_TESTS.encode(), protected_paths=("tests/test_calc.py",)
    )
    return make_task(repo_image.tag, base_commit=repo_image.commit, verdict=verdict)


@pytest.fixture
def scripted(repo_image: RepoImage) -> Callable[[str], Task]:
    """A task that is graded by the status of the given script alone."""
    return lambda script: make_task(repo_image.tag, verdict=ExitCode(eval_script=script))
