"""The container runtime is the one that the settings name, for agents' and graders' containers alike."""

from pathlib import Path

import docker
import pytest

from pipeline.taskfile import write_tasks
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from workers.leaks.__main__ import main as leaks
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import Misconfigured
from workers.verify.__main__ import main as verify

pytestmark = pytest.mark.docker


async def test_containers_run_under_the_runtime_of_the_settings(
    sandboxes: DockerSandboxes,
    repo_image: RepoImage,
    docker_client: docker.DockerClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A second name of runc's, so that the default of the Docker host would show.
    monkeypatch.setenv("SWERVE_CONTAINER_RUNTIME", "io.containerd.runc.v2")
    there = DockerSandboxes(fleet=sandboxes.fleet)
    await there.check()
    for role in ("agent", "grade"):
        async with there.open(make_claim(make_task(repo_image.tag)), role=role) as sandbox:
            container = docker_client.api.inspect_container(sandbox.id)
            assert container["HostConfig"]["Runtime"] == "io.containerd.runc.v2"
            assert (await sandbox.run("echo alive", timeout_s=240)).output == b"alive\n"
    await there.close()


async def test_without_a_setting_the_docker_host_chooses(
    sandboxes: DockerSandboxes, repo_image: RepoImage, docker_client: docker.DockerClient
) -> None:
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
        container = docker_client.api.inspect_container(sandbox.id)
    assert container["HostConfig"]["Runtime"] == docker_client.info()["DefaultRuntime"]


async def test_an_unknown_runtime_is_refused_with_those_that_are_known() -> None:
    there = DockerSandboxes(runtime="nonesuch")
    with pytest.raises(
        Misconfigured, match=r"^SWERVE_CONTAINER_RUNTIME='nonesuch': .* only .*runc; choose one"
    ):
        await there.check()
    await there.close()


@pytest.mark.parametrize("command", [leaks, verify], ids=["leaks", "verify"])
def test_commands_refuse_an_unknown_runtime_in_one_line(
    command: object,
    repo_image: RepoImage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, [make_task(repo_image.tag)])
    monkeypatch.setenv("SWERVE_CONTAINER_RUNTIME", "nonesuch")
    assert callable(command)
    assert command([str(path)]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("error: SWERVE_CONTAINER_RUNTIME='nonesuch': ")
