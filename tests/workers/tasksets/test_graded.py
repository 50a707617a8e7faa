"""Imported tasks in containers without a network and without conda: what does not solve one gets 0, its solution 1."""

import io
import secrets
import tarfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from pipeline.task import Task
from tests.workers.claims import make_claim
from tests.workers.conftest import init as init
from tests.workers.conftest import sandboxes as sandboxes
from tests.workers.tasksets.published import FIXTURES, fixture_rows, imported, write_lines
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes
from workers.tasksets.patches import ended

pytestmark = pytest.mark.docker

USELESS = "diff --git a/NOTE.txt b/NOTE.txt\nnew file mode 100644\n--- /dev/null\n+++ b/NOTE.txt\n@@ -0,0 +1 @@\n+done\n"
DOCKERFILE = """
FROM {base}
ENV GIT_AUTHOR_DATE=2025-01-01T00:00:00Z GIT_COMMITTER_DATE=2025-01-01T00:00:00Z
COPY repository /workspace
WORKDIR /workspace
RUN git init -q . && git config user.name t && git config user.email t@example.invalid && git add -A \\
 && git commit -qm base && cp -r /workspace /testbed
"""
SOURCES = {
    "fleet": FIXTURES / "fleet",
    "swe-bench": FIXTURES / "swe_bench/verified.jsonl",
    "swe-bench repository": FIXTURES / "swe_bench/task_repository",
    "swe-bench rendered": FIXTURES / "swe_bench/lite.jsonl",
    "swe-gym": FIXTURES / "swe_gym/subset.jsonl",
}


@pytest.fixture(scope="module")
def base_image(docker_client: docker.DockerClient, task_image: str) -> Iterator[str]:
    """The repository that the published tasks are about, at the commit that they name."""
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        tar.add(FIXTURES / "repository", "repository")
        dockerfile = DOCKERFILE.replace("{base}", task_image).encode()
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(dockerfile)
        tar.addfile(entry, io.BytesIO(dockerfile))
    context.seek(0)
    image, _ = docker_client.images.build(
        fileobj=context,
        custom_context=True,
        rm=True,
        nocache=True,
        labels={"swerve.test": secrets.token_hex(6)},  # or another run on this engine has the same image
    )
    commit = docker_client.containers.run(
        image.id, ["git", "rev-parse", "HEAD"], remove=True, network_mode="none"
    )
    assert commit.decode().strip() == fixture_rows("swe_bench/verified.jsonl")[0]["base_commit"]
    yield image.id
    docker_client.images.remove(image.id, force=True)


@pytest.mark.slow_but_for("swe-bench", "swe-bench repository")
@pytest.mark.parametrize("source", SOURCES)
async def test_a_useless_patch_gets_0_and_the_solution_1(
    tmp_path: Path,
    source: str,
    base_image: str,
    docker_client: docker.DockerClient,
    sandboxes: DockerSandboxes,
) -> None:
    python_only = ["--repo", "psf/*"] if source == "swe-bench rendered" else []
    tasks = imported(tmp_path, source.split(" ")[0], SOURCES[source], *python_only)
    assert tasks
    for task, gold in tasks.values():
        docker_client.images.get(base_image).tag(task.image)
        assert await value(sandboxes, task, USELESS) == 0
        assert await value(sandboxes, task, gold.patch) == 1


@pytest.mark.slow
async def test_an_old_graders_answers_are_not_ours(
    tmp_path: Path, base_image: str, docker_client: docker.DockerClient, sandboxes: DockerSandboxes
) -> None:
    """Without its last newline a patch is corrupt to git, and a script's status was that of its last line."""
    row = fixture_rows("swe_gym/subset.jsonl")[0]
    row["patch"], row["test_patch"] = row["patch"].rstrip("\n"), row["test_patch"].rstrip("\n")
    row["eval_script"] = (
        "#!/bin/bash\ncd /testbed\npytest tests/test_lengths.py\ngit checkout -q HEAD tests\n"
    )
    tasks = imported(tmp_path, "swe-gym", write_lines(tmp_path / "rows.jsonl", row))
    ((task, gold),) = tasks.values()
    docker_client.images.get(base_image).tag(task.image)
    assert await value(sandboxes, task, ended(USELESS)) == 0
    assert await value(sandboxes, task, gold.patch) == 1


async def value(sandboxes: DockerSandboxes, task: Task, patch: str) -> float:
    reward = await Grader(sandboxes).grade(make_claim(task), patch.encode())
    return reward.value
