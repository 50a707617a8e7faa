"""The volume with an agent program is complete, read-only, in the agent's container only, and made once for all who want it."""

import asyncio
import time
from collections.abc import Callable

import docker
import pytest
from docker.models.volumes import Volume
from msgspec.structs import replace

from pipeline.errors import HarnessError, HarnessMissing
from pipeline.harness import HARNESS_DIR, HOME_DIR, Harness, HarnessFile
from pipeline.request import Claim
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.harness.conftest import PROGRAM
from workers.docker.host import CREATED, DEADLINE, GENERATION
from workers.foreign.program import MAKE_HOME
from workers.harness import volumes
from workers.harness.volumes import HarnessVolumes, remove_unused_volumes
from workers.sandbox.containers import ContainerApi
from workers.sandbox.docker import DockerSandboxes
from workers.settings import docker_host

pytestmark = pytest.mark.docker

Run = Callable[[str, str], str]


@pytest.fixture
def in_volume(docker_client: docker.DockerClient, task_image: str) -> Run:
    """Runs a command where a volume can be written."""

    def run(volume: str, command: str) -> str:
        mounted = {volume: {"bind": "/v", "mode": "rw"}}
        output = docker_client.containers.run(
            task_image, ["bash", "-c", command], volumes=mounted, network_mode="none", remove=True
        )
        return output.decode()

    return run


def claim_of(image: str, harness: Harness) -> Claim:
    claim = make_claim(make_task(image))
    return replace(claim, request=replace(claim.request, harness=harness))


def labels_of(volume: Volume) -> dict[str, str]:
    return volume.attrs["Labels"]


async def test_the_agent_has_the_program_and_cannot_write_there_and_the_grader_has_nothing(
    docker_client: docker.DockerClient, sandboxes: DockerSandboxes, built: HarnessFile, repo_image: RepoImage
) -> None:
    image_id = docker_client.images.get(repo_image.tag).id
    claim = claim_of(repo_image.tag, built.harness)
    async with sandboxes.open(claim, role="agent") as sandbox:
        ran = await sandbox.run(f"{HARNESS_DIR}/bin/tiny --version", timeout_s=240)
        assert (ran.exit_code, ran.output) == (0, b"tiny 1.2.3\n")
        for command in ("touch {}/new", "rm {}/data", "echo >{}/bin/tiny", "mount -o remount,rw {}"):
            assert (await sandbox.run(command.format(HARNESS_DIR), timeout_s=240)).exit_code != 0
        assert await sandbox.diff() == b""
        assert sandbox.image == repo_image.tag
    async with sandboxes.open(claim, role="grade") as sandbox:
        assert (await sandbox.run(f"ls {HARNESS_DIR}", timeout_s=240)).exit_code != 0
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
        assert (await sandbox.run(f"ls {HARNESS_DIR}", timeout_s=240)).exit_code != 0
    assert docker_client.images.get(repo_image.tag).id == image_id


async def test_the_programs_home_has_what_lies_in_the_tasks_own(
    sandboxes: DockerSandboxes, built: HarnessFile, repo_image: RepoImage
) -> None:
    async with sandboxes.open(claim_of(repo_image.tag, built.harness), role="agent") as sandbox:
        await sandbox.run("mkdir -p ~/.m2 ~/go && echo jar >~/.m2/jar", timeout_s=240)
        assert (await sandbox.run(MAKE_HOME, timeout_s=240)).exit_code == 0
        found = await sandbox.run(f"cat {HOME_DIR}/.m2/jar; ls {HOME_DIR}", timeout_s=240)
        assert found.output == b"jar\ngo\n"


@pytest.mark.slow
async def test_it_is_filled_once_for_all_who_want_it_at_once(
    docker_client: docker.DockerClient, built: HarnessFile, in_volume: Run
) -> None:
    apis = [ContainerApi(docker_host()) for _ in range(3)]
    names = await asyncio.gather(*(HarnessVolumes(api).ready(built.harness) for api in apis))
    await asyncio.gather(*(api.close() for api in apis))
    assert len(set(names)) == 1
    assert in_volume(names[0], "cat /v/bin/tiny; stat -c %s /v/data") == f"{PROGRAM}300000\n"
    assert docker_client.containers.list(all=True, filters={"volume": names[0]}) == []


@pytest.mark.slow_but_for("rm /v/bin/tiny", "truncate -s 1000 /v/data")
@pytest.mark.parametrize(
    "damage",
    [
        "rm /v/bin/tiny",
        "truncate -s 1000 /v/data",
        "rm /v/MANIFEST",
        "echo >/v/more",
        "chmod 644 /v/bin/tiny",
    ],
)
async def test_a_fill_that_was_interrupted_is_found_and_mended_by_the_next_process(
    api: ContainerApi, built: HarnessFile, in_volume: Run, damage: str
) -> None:
    name = await HarnessVolumes(api).ready(built.harness)
    in_volume(name, damage)
    assert await HarnessVolumes(api).ready(built.harness) == name
    assert in_volume(name, "ls /v; stat -c '%a %s' /v/bin/tiny /v/data") == (
        f"MANIFEST\nbin\ndata\n755 {len(PROGRAM)}\n644 300000\n"
    )


async def test_a_damaged_volume_that_others_use_is_left_to_them(
    docker_client: docker.DockerClient, api: ContainerApi, built: HarnessFile, in_volume: Run, task_image: str
) -> None:
    name = await HarnessVolumes(api).ready(built.harness)
    in_volume(name, "rm /v/data")
    mounted = {name: {"bind": "/v", "mode": "ro"}}
    user = docker_client.containers.create(task_image, "true", volumes=mounted, network_mode="none")
    with pytest.raises(HarnessError, match="is damaged and 1 containers use it") as raised:
        await HarnessVolumes(api).ready(built.harness)
    assert raised.value.transient
    user.remove()
    await HarnessVolumes(api).ready(built.harness)


async def test_a_volume_that_somebody_removed_is_there_again_for_the_next_episode(
    docker_client: docker.DockerClient, sandboxes: DockerSandboxes, built: HarnessFile, repo_image: RepoImage
) -> None:
    claim = claim_of(repo_image.tag, built.harness)
    async with sandboxes.open(claim, role="agent"):
        pass
    (volume,) = docker_client.volumes.list(filters={"name": volumes.PREFIX})
    generation = labels_of(volume)[GENERATION]
    volume.remove()
    docker_client.volumes.create(volume.name)  # as Docker makes one that a container wants
    async with sandboxes.open(claim, role="agent") as sandbox:
        assert (await sandbox.run(f"{HARNESS_DIR}/bin/tiny", timeout_s=240)).output == b"tiny 1.2.3\n"
    (volume,) = docker_client.volumes.list(filters={"name": volumes.PREFIX})
    assert labels_of(volume)[GENERATION] != generation


async def test_what_a_killed_process_left_of_a_fill_holds_up_nobody(
    docker_client: docker.DockerClient, api: ContainerApi, built: HarnessFile
) -> None:
    name = await HarnessVolumes(api).ready(built.harness)
    labels = {volumes.FILLER: name, DEADLINE: str(int(time.time()) + 1000)}
    docker_client.containers.create(
        built.harness.image,
        "none",
        name=f"{name}-filler",
        labels=labels,
        volumes={name: {"bind": HARNESS_DIR}},
        network_mode="none",
    )
    assert await HarnessVolumes(api).ready(built.harness) == name


async def test_a_host_without_the_image_or_with_another_content_says_what_to_do(
    api: ContainerApi, built: HarnessFile, repo_image: RepoImage
) -> None:
    absent = replace(built.harness, image="swerve/harness-absent:1")
    with pytest.raises(HarnessMissing, match="no image swerve/harness-absent:1: `swerve harness build tiny"):
        await HarnessVolumes(api).ready(absent)
    with pytest.raises(HarnessMissing, match="is not an image of `swerve harness build`"):
        await HarnessVolumes(api).ready(replace(built.harness, image=repo_image.tag))
    with pytest.raises(HarnessMissing, match="but the request wants sha256:0: give all hosts one image"):
        await HarnessVolumes(api).ready(replace(built.harness, content="sha256:0"))


async def test_old_volumes_and_overdue_fills_go_and_what_is_in_use_or_new_stays(
    docker_client: docker.DockerClient, api: ContainerApi, built: HarnessFile, task_image: str
) -> None:
    name = await HarnessVolumes(api).ready(built.harness)
    old = docker_client.volumes.create(f"{volumes.PREFIX}old", labels={CREATED: "1"})
    used = docker_client.volumes.create(f"{volumes.PREFIX}used", labels={CREATED: "1"})
    mounted = {used.name: {"bind": "/v", "mode": "ro"}}
    user = docker_client.containers.create(task_image, "true", volumes=mounted, network_mode="none")
    labels = {volumes.FILLER: "late", DEADLINE: "1"}
    docker_client.containers.create(task_image, "true", labels=labels, network_mode="none")
    assert set(await remove_unused_volumes(api)) == {old.name, "late-filler"}
    left = {volume.name for volume in docker_client.volumes.list(filters={"name": volumes.PREFIX})}
    assert left == {name, used.name}
    user.remove()
    assert set(await remove_unused_volumes(api, keep_s=0)) == {name, used.name}
