import secrets
import time
from collections.abc import AsyncIterator

import docker
import pytest

from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from workers.docker.host import ATTEMPT, DEADLINE, FLEET, REQUEST
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.hosts import remove_orphans

pytestmark = pytest.mark.docker


@pytest.fixture
async def others(sandboxes: DockerSandboxes) -> AsyncIterator[DockerSandboxes]:
    """Another worker of the same fleet."""
    others = DockerSandboxes(fleet=sandboxes.fleet)
    yield others
    await others.close()


async def test_only_what_lost_its_lease_is_removed(
    sandboxes: DockerSandboxes, others: DockerSandboxes, repo_image: RepoImage
) -> None:
    asked: list[tuple[str, int]] = []

    async def has_lease(request_id: str, attempt: int) -> bool:
        asked.append((request_id, attempt))
        return request_id == "leased"

    task = make_task(repo_image.tag)
    leased, orphan = make_claim(task, request_id="leased"), make_claim(task, request_id="orphan", attempt=3)
    async with (
        others.open(leased, role="agent") as kept,
        others.open(orphan, role="grade") as lost,
        sandboxes.open(orphan, role="agent") as own,
    ):
        assert await remove_orphans(sandboxes, has_lease=has_lease, settle_s=0) == [lost.id]
        assert sorted(asked) == [("leased", 1), ("orphan", 3)]
        assert (await kept.run("echo kept", timeout_s=240)).output == b"kept\n"
        assert (await own.run("echo own", timeout_s=240)).output == b"own\n"
        assert await remove_orphans(sandboxes, has_lease=has_lease, settle_s=0) == []


async def test_one_that_breathes_again_is_spared(
    sandboxes: DockerSandboxes, others: DockerSandboxes, repo_image: RepoImage
) -> None:
    looks: list[str] = []

    async def has_lease(request_id: str, attempt: int) -> bool:
        looks.append(request_id)
        return len(looks) > 1

    claim = make_claim(make_task(repo_image.tag), request_id="breathless")
    async with others.open(claim, role="agent") as kept:
        assert await remove_orphans(sandboxes, has_lease=has_lease, settle_s=0.1) == []
        assert (await kept.run("echo kept", timeout_s=240)).output == b"kept\n"
    assert looks == ["breathless", "breathless"]


async def test_labels_that_do_not_tell_whose_it_is_are_nobodys(
    sandboxes: DockerSandboxes, repo_image: RepoImage, docker_client: docker.DockerClient
) -> None:
    async def has_lease(request_id: str, attempt: int) -> bool:
        return True

    odd = [
        {},
        {DEADLINE: "soon", REQUEST: "r", ATTEMPT: "1"},
        {DEADLINE: "9999999999", REQUEST: "r", ATTEMPT: "x"},
    ]
    made = [
        docker_client.containers.create(
            repo_image.tag, ["true"], labels={FLEET: sandboxes.fleet} | labels, network_mode="none"
        )
        for labels in odd
    ]
    assert sorted(await remove_orphans(sandboxes, has_lease=has_lease, settle_s=0)) == sorted(
        str(one.name) for one in made
    )


async def test_past_its_deadline_a_container_goes_although_its_try_lives(
    sandboxes: DockerSandboxes, repo_image: RepoImage, docker_client: docker.DockerClient
) -> None:
    async def has_lease(request_id: str, attempt: int) -> bool:
        return True

    labels = {FLEET: sandboxes.fleet, REQUEST: "r", ATTEMPT: "1"}
    late, stopped = (
        docker_client.containers.create(
            repo_image.tag,
            ["true"],
            labels=labels | {DEADLINE: str(int(time.time()) - 1)},
            network_mode="none",
        )
        for _ in range(2)
    )
    stopped.start()
    assert sorted(await remove_orphans(sandboxes, has_lease=has_lease, settle_s=0)) == sorted(
        [late.name, stopped.name]
    )


async def test_another_fleets_containers_are_left_alone(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    async def has_lease(request_id: str, attempt: int) -> bool:
        return False

    foreign = DockerSandboxes(fleet=secrets.token_hex(6))
    async with foreign.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
        assert await remove_orphans(sandboxes, has_lease=has_lease, settle_s=0) == []
        assert (await sandbox.run("echo alive", timeout_s=240)).output == b"alive\n"
    await foreign.close()
