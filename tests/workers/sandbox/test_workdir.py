"""A task that names no workdir lives in the WORKDIR of its image, for agent and grader alike."""

from collections.abc import Iterator

import docker
import pytest

from pipeline.errors import TaskBroken
from pipeline.task import ExitCode
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import FILES, RepoImage, built
from workers.grading.grade import Grader
from workers.leaks.agent_images import find_leaks
from workers.sandbox.docker import DockerSandboxes

pytestmark = pytest.mark.docker

FIX = (
    b"--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
)


@pytest.fixture(scope="module")
def elsewhere(docker_client: docker.DockerClient, task_image: str) -> Iterator[RepoImage]:
    """The repository lies in /srv/calc, which is the image's WORKDIR."""
    moved = FILES["Dockerfile"].replace("/workspace", "/srv/calc")
    with built(docker_client, FILES | {"Dockerfile": moved}, task_image) as image:
        yield image


@pytest.mark.slow
async def test_the_images_own_workdir_is_taken_where_the_task_names_none(
    sandboxes: DockerSandboxes, elsewhere: RepoImage
) -> None:
    verdict = ExitCode(
        eval_script="grep -q 'return a + b' calc.py\n", protected_paths=("tests/test_calc.py",)
    )
    task = make_task(elsewhere.tag, workdir="", verdict=verdict, hidden_paths=("/srv/calc/logo.bin",))
    for _ in range(2):  # from an image made for it, then from the one that is known
        async with sandboxes.open(make_claim(task), role="agent") as sandbox:
            seen = await sandbox.run("pwd; ls logo.bin", timeout_s=240)
            assert seen.output.splitlines()[0] == b"/srv/calc" == sandbox.workdir.encode()
            assert b"No such file" in seen.output
            assert await find_leaks(sandbox, await sandboxes.placed(task)) == []
    assert (await Grader(sandboxes).grade(make_claim(task), FIX)).resolved


async def test_an_image_without_a_workdir_is_refused_by_the_fields_name(
    sandboxes: DockerSandboxes, docker_client: docker.DockerClient, elsewhere: RepoImage
) -> None:
    container = docker_client.containers.create(elsewhere.tag)
    image = container.commit(repository="swerve-test", tag="no-workdir", changes=["WORKDIR /"])
    container.remove()
    task = make_task("swerve-test:no-workdir", workdir="")
    try:
        for role in ("agent", "grade"):
            with pytest.raises(TaskBroken, match=r"^workdir: test:task names none.* set the task's workdir"):
                async with sandboxes.open(make_claim(task), role=role):
                    pass
    finally:
        docker_client.images.remove(image.id, force=True)


async def test_a_workdir_without_a_repository_is_refused_by_the_fields_name(
    sandboxes: DockerSandboxes, elsewhere: RepoImage
) -> None:
    task = make_task(elsewhere.tag, workdir="/usr")
    with pytest.raises(TaskBroken, match=r"^workdir: /usr of .* is not a git repository"):
        await Grader(sandboxes).grade(make_claim(task), FIX)
