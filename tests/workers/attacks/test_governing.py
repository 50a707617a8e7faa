"""No cheat on the files that govern the run is paid, and the same task pays for the fix beside it."""

import pytest

from pipeline.task import ExitCode, File
from tests.workers.attacks.around import Around
from tests.workers.attacks.governing import GOVERNING
from tests.workers.attacks.test_attacks import HIDDEN, PROTECTED, check_only_a_fix_pays, task_of
from tests.workers.conftest import RepoImage
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes

pytestmark = pytest.mark.docker


@pytest.fixture
def grader(sandboxes: DockerSandboxes) -> Grader:
    return Grader(sandboxes)


@pytest.mark.slow_but_for("a-script-behind-timeout", "a-script-in-another-folder,-by-sh--c")
@pytest.mark.parametrize("around", GOVERNING.values(), ids=[name.replace(" ", "-") for name in GOVERNING])
async def test_no_cheat_on_the_files_of_the_run_pays(
    grader: Grader, repo_image: RepoImage, around: Around
) -> None:
    given = {file.path: file for file in HIDDEN}
    given |= {path: File(path=path, content=text.encode()) for path, text in around.tests.items()}
    verdict = ExitCode(
        eval_script=f"set -e\n{around.script}", protected_paths=PROTECTED, files=tuple(given.values())
    )
    task = task_of(repo_image, verdict, setup_script=around.setup, env=around.env)
    await check_only_a_fix_pays(grader, task, around.patch)
