"""What the eval script runs and names is looked up once for a task and its image, before the patch."""

import pytest
from msgspec.structs import replace

from pipeline.task import ExitCode, Task
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from workers.grading.defence.survey import Surveyed, Surveys
from workers.grading.defence.witness import installed
from workers.grading.steps import step
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import CommandResult, Sandbox

pytestmark = pytest.mark.docker

SETUP = "mkdir ci\nprintf '. ci/more.sh\\n' >ci/run.sh\nprintf 'pytest\\n' >ci/more.sh\n"
SCRIPT = "bash ci/run.sh\n"


class Counting:
    """A container that counts the commands which it runs."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.start = sandbox.start
        self.num_commands = 0

    @property
    def image(self) -> str:
        return self._sandbox.image

    @property
    def workdir(self) -> str:
        return self._sandbox.workdir

    async def run(
        self, command: str, *, timeout_s: float, keep_bytes: int = 0, plain: bool = False
    ) -> CommandResult:
        self.num_commands += 1
        return await self._sandbox.run(command, timeout_s=timeout_s, keep_bytes=keep_bytes, plain=plain)


async def surveyed(
    surveys: Surveys, sandboxes: DockerSandboxes, task: Task, under_test: tuple[str, ...] = ()
) -> tuple[Surveyed, int]:
    """What a survey in a new container finds, and how many commands it takes."""
    async with sandboxes.open(make_claim(task), role="grade") as sandbox:
        counting = Counting(sandbox)
        found = await surveys.survey(counting, task, hidden=(), under_test=under_test)
        return found, counting.num_commands


def task_with(image: RepoImage, script: str = SCRIPT, setup: str = SETUP) -> Task:
    return make_task(image.tag, setup_script=setup, verdict=ExitCode(eval_script=script))


async def test_a_survey_is_made_once_for_a_task_and_its_image(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    surveys, task = Surveys(), task_with(repo_image)
    first, num_first = await surveyed(surveys, sandboxes, task)
    again, num_again = await surveyed(surveys, sandboxes, task)
    assert {"ci/run.sh", "ci/more.sh"} <= set(first.paths)
    assert num_first > 0
    assert (again, num_again) == (first, 0)


@pytest.mark.slow
async def test_whatever_a_survey_depends_on_makes_it_another_one(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    surveys, task = Surveys(), task_with(repo_image)
    await surveyed(surveys, sandboxes, task)
    others = (
        task_with(repo_image, script="bash ci/more.sh\n"),
        task_with(repo_image, setup=SETUP.replace("ci/more.sh\\n", "ci/else.sh\\n")),
        replace(task, env={"CI": "ci"}),
        replace(task, workdir="/testbed"),
    )
    for other in others:
        found, num_commands = await surveyed(surveys, sandboxes, other)
        fresh, _ = await surveyed(Surveys(), sandboxes, other)
        assert num_commands > 0
        assert found == fresh
    found, _ = await surveyed(surveys, sandboxes, task, under_test=("ci/run.sh",))
    assert "ci/run.sh" not in found.paths


@pytest.mark.slow
async def test_the_surveys_used_last_are_kept(sandboxes: DockerSandboxes, repo_image: RepoImage) -> None:
    surveys = Surveys(most=2)
    one, two, three = (task_with(repo_image, script=f"{SCRIPT}# {number}\n") for number in range(3))
    for task in (one, two, one, three):
        await surveyed(surveys, sandboxes, task)
    assert [(await surveyed(surveys, sandboxes, task))[1] > 0 for task in (one, three, two)] == [
        False,
        False,
        True,
    ]


async def test_directories_that_scripts_name_from_the_root_may_hold_pythons(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    script = ". /weird/conda/bin/activate\nexport PATH=$HOME/py/bin:$PATH\nsrc/own/tool\n" + SCRIPT
    found, _ = await surveyed(Surveys(), sandboxes, task_with(repo_image, script))
    assert {"/weird", "/weird/conda", "/weird/conda/bin", "~/py", "~/py/bin"} <= set(found.places)
    assert not any("own" in place for place in found.places)


@pytest.mark.parametrize(
    ("there", "versions"),
    [
        ("mkdir -p /weird/py/lib/python3.7/site-packages", {"3.7"}),
        ("mkdir -p ~/.local/lib/python3.6", {"3.6"}),
        ("touch /usr/local/bin/python3.5", {"3.5"}),
        ("", set()),
    ],
)
async def test_the_witness_is_in_the_users_directory_of_each_python_that_is_there(
    sandboxes: DockerSandboxes, repo_image: RepoImage, there: str, versions: set[str]
) -> None:
    install = step("install_files", PLACES=["/weird/py"], **installed())
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="grade") as sandbox:
        await sandbox.run(f"mkdir /swerve-grade; {there}", timeout_s=240)
        ended = await sandbox.run(install, timeout_s=240, plain=True)
        assert ended.exit_code == 0, ended.output
        found = await sandbox.run(
            "ls -d ~/.local/lib/python3.*/site-packages/swerve_*.py; python3 -V; ls /weird/py/lib/*/*/swerve_*.py",
            timeout_s=240,
        )
    lines = found.output.decode().splitlines()
    own = next(line for line in lines if line.startswith("Python ")).split()[1].rpartition(".")[0]
    assert {line.split("/python")[1].partition("/")[0] for line in lines if "/.local/" in line} == {
        own,
        *versions,
    }
    assert any(line.startswith("/weird/py/lib/python3.7/") for line in lines) == ("/weird" in there)
