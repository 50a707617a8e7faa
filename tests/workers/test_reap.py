"""`python -m workers.reap` removes what nobody will come back for, says so, and leaves alone what somebody works on."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import docker
import pytest
from docker.models.containers import Container
from redis.asyncio import Redis

from pipeline import census, connection, keys, queue
from pipeline.request import Claim
from tests.pipeline import samples
from workers import reap
from workers.docker.host import ATTEMPT, CREATED, DEADLINE, REQUEST
from workers.harness import volumes
from workers.sandbox import containers

pytestmark = pytest.mark.docker


@pytest.fixture(autouse=True)
def label(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> str:
    """Of containers, in place of the one by which --all would find those of others on this Docker host."""
    name = f"swerve-test.{secrets.token_hex(6)}"
    monkeypatch.setattr(containers, "FLEET", name)
    monkeypatch.setattr(volumes, "PREFIX", f"{name}-")
    monkeypatch.setattr(volumes, "FILLER", f"{name}.filler")
    monkeypatch.setenv("SWERVE_REDIS_URL", redis_url)
    monkeypatch.delenv("SWERVE_DOCKER_HOSTS", raising=False)
    return name


class Left:
    """Makes containers as workers leave them."""

    def __init__(self, client: docker.DockerClient, image: str, label: str) -> None:
        self._client, self._image, self._label = client, image, label

    def container(self, fleet: str, request_id: str, *, deadline: float | None = None) -> Container:
        deadline = time.time() + 10**6 if deadline is None else deadline
        labels = {self._label: fleet, REQUEST: request_id, ATTEMPT: "1", DEADLINE: str(deadline)}
        return self._client.containers.create(
            self._image, ["sleep", "1000"], labels=labels, network_mode="none"
        )

    def volume(self) -> str:
        return self._client.volumes.create(f"{self._label}-1", labels={CREATED: str(time.time())}).name

    def names(self) -> set[str]:
        found = self._client.containers.list(all=True, ignore_removed=True, filters={"label": self._label})
        return {str(container.name) for container in found}


@pytest.fixture
async def left(docker_client: docker.DockerClient, task_image: str, label: str) -> AsyncIterator[Left]:
    left = Left(docker_client, task_image, label)
    yield left
    for name in left.names():
        docker_client.api.remove_container(name, force=True)


async def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    status = await asyncio.to_thread(reap.main, flags)
    return status, *capsys.readouterr()


async def leased(redis: Redis, redis_url: str) -> str:
    """The id of a request that somebody works on, in its first attempt, however long the test takes."""
    pool = await connection.connect(redis_url)
    await queue.enqueue(pool, samples.request())
    (claim,) = await queue.take(pool, "host/1", 1)
    await pool.aclose()
    assert isinstance(claim, Claim)
    await redis.persist(keys.lease(claim.request.id))
    return claim.request.id


async def test_what_lost_its_claim_or_its_time_goes_and_the_rest_stays(
    left: Left, redis: Redis, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, at_work = await census.fleet_id(redis), await leased(redis, redis_url)
    kept, foreign = left.container(fleet, at_work), left.container("another", "gone")
    orphan, late = left.container(fleet, "gone"), left.container(fleet, at_work, deadline=time.time() - 1)
    status, out, _ = await run(capsys)
    assert left.names() == {kept.name, foreign.name}
    assert status == 0
    assert out.endswith("2 containers and volumes removed: clean\n")
    assert f"removed  {orphan.name}  at unix:" in out
    assert f"removed  {late.name}  at unix:" in out
    status, out, _ = await run(capsys, "--json")
    told: dict[str, Any] = json.loads(out)
    assert (status, told["clean"], told["hosts"][0]["removed"]) == (0, True, [])


async def test_everything_of_everybody_goes_if_asked_for_without_a_redis(
    left: Left, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWERVE_REDIS_URL", "unix:///nowhere/redis.sock?db=0")
    names = {left.container("one", "a").name, left.container("two", "b").name}
    status, _, err = await run(capsys)
    assert (status, left.names()) == (1, names)
    assert "does not answer" in err
    assert "see --all" in err
    volume = left.volume()
    status, out, _ = await run(capsys, "--all", "--json")
    assert (status, set(json.loads(out)["hosts"][0]["removed"])) == (0, names | {volume})
    assert left.names() == set()


async def test_a_docker_host_that_does_not_answer_is_not_clean(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWERVE_DOCKER_HOSTS", "unix:///var/run/docker.sock tcp://127.0.0.1:1")
    status, out, _ = await run(capsys, "--json")
    first, second = json.loads(out)["hosts"]
    assert (status, first["failure"], first["left"]) == (1, "", [])
    assert second["failure"].startswith("listing containers: ")


async def test_settings_that_make_no_sense_are_misuse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWERVE_DOCKER_HOSTS", "ssh://a")
    status, _, err = await run(capsys)
    assert (status, err.startswith("SWERVE_DOCKER_HOSTS: ")) == (2, True)
