"""One worker, several Docker hosts: episodes go where there is room, an outage costs no request a try, and a host that is back is used."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import docker
import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from pipeline import connection, deadletters, keys, queue
from pipeline.errors import SandboxError
from pipeline.kinds import ROLLOUT
from pipeline.request import Budget, Claim, EpisodeStatus, Limits, Retries
from pipeline.task import Task
from pipeline.tokenizer import read_bundle
from pipeline.trajectory import Trajectory
from tests.pipeline import samples
from tests.workers.agent.episode import AGENT, SUBMIT, bash
from tests.workers.claims import make_task
from tests.workers.conftest import RepoImage
from tests.workers.sandbox.relay import Relay, relay
from workers import breaker, process
from workers import claim as claiming
from workers.breaker import Breakers
from workers.claim import Claimer
from workers.docker.host import FLEET, DockerHost
from workers.grading.grade import Grader
from workers.policy.scripted import ScriptedPolicies
from workers.process import Taker
from workers.rollout import run_rollout
from workers.sandbox import docker as docker_sandbox
from workers.sandbox.docker import DockerSandbox, DockerSandboxes
from workers.sandbox.hosts import HostPool

pytestmark = pytest.mark.docker

PATIENCE_S = 240.0
ONE_TRY = Limits(retries=Retries(infrastructure=Budget(tries=1), grader=Budget(tries=1)))
REPLIES = [bash("echo new >new"), bash(SUBMIT)]


class Watched(DockerSandboxes):
    """Keeps a list of what was opened on this Docker host. An agent's container is not used before `may_play`."""

    def __init__(self, host: DockerHost, fleet: str, may_play: asyncio.Event) -> None:
        super().__init__(host=host, fleet=fleet)
        self._may_play = may_play
        self.opened: list[tuple[str, str]] = []  # request id, role

    @contextlib.asynccontextmanager
    async def open(
        self, claim: Claim, *, role: Literal["agent", "grade"]
    ) -> AsyncGenerator[DockerSandbox, None]:
        async with super().open(claim, role=role) as sandbox:
            self.opened.append((claim.request.id, role))
            if role == "agent":
                await self._may_play.wait()
            yield sandbox


@dataclass(slots=True)
class Worker:
    """A worker process without the process."""

    redis: ArqRedis
    task: Task
    hosts: list[Watched]
    pool: HostPool
    breakers: Breakers
    may_play: asyncio.Event  # set unless a test clears it
    ids: list[str] = field(default_factory=list[str])

    async def enqueue(self, count: int) -> None:
        for _ in range(count):
            request = samples.request(task=self.task, limits=ONE_TRY, agent_config=AGENT)
            await queue.enqueue(self.redis, request)
            self.ids.append(request.id)

    async def answer_all(self) -> None:
        """Not one failure is held against any."""
        for request_id in self.ids:
            name = keys.published(request_id)
            await until(lambda name=name: self.redis.exists(name))
            assert await deadletters.failures(self.redis, request_id) == ()
        assert await deadletters.listed(self.redis, samples.RUN) == {}

    def opened(self, number: int, role: str) -> list[str]:
        """Ids of requests that had a container in that role on host `number`."""
        return [request_id for request_id, its_role in self.hosts[number].opened if its_role == role]


async def until(holds: Callable[[], Awaitable[object] | object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = holds()
            if await answer if isinstance(answer, Awaitable) else answer:
                return
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WATCH_S", "FIRST_WAIT_S", "LONGEST_WAIT_S", "TRIAL_S"):
        monkeypatch.setattr(breaker, name, 0.1)
    monkeypatch.setattr(claiming, "OUTAGE_WAIT_S", 0.05)
    monkeypatch.setattr(process, "IDLE_S", 0.2)
    monkeypatch.setattr(docker_sandbox, "REMOVAL_PAUSES_S", (0.0,))


@pytest.fixture
async def relays() -> AsyncIterator[list[Relay]]:
    async with relay() as first, relay() as second:
        yield [first, second]


@pytest.fixture
async def worker(
    relays: list[Relay],
    redis: Redis,
    redis_url: str,
    repo_image: RepoImage,
    tiny_model: Path,
    docker_client: docker.DockerClient,
) -> AsyncIterator[Worker]:
    """A worker of three slots, with at most two on each Docker host."""
    redis, fleet = await connection.connect(redis_url), secrets.token_hex(6)
    may_play = asyncio.Event()
    may_play.set()
    hosts = [Watched(replace(one.host, slots=2), fleet, may_play) for one in relays]
    pool = HostPool(hosts, slots=3)
    policies = ScriptedPolicies(read_bundle(tiny_model), REPLIES)

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        there = pool.of(claim.request.id).sandboxes
        return await run_rollout(claim, status, policies=policies, sandboxes=there, grader=Grader(there))

    breakers = Breakers({}, gates={"docker": pool})
    one = Taker(Claimer(kind=ROLLOUT, redis=redis, worker="host/1", stage=stage, breakers=breakers), slots=3)
    loops = [asyncio.create_task(loop) for loop in (one.async_run(), breakers.watch())]
    yield Worker(redis, make_task(repo_image.tag), hosts, pool, breakers, may_play)
    one.stop()
    await loops[0]
    await one.drain(0)
    loops[1].cancel()
    await asyncio.gather(loops[1], return_exceptions=True)
    await pool.close()
    await redis.aclose()
    # What was cut off ends by itself.
    await until(
        lambda: (
            not docker_client.containers.list(
                all=True, ignore_removed=True, filters={"label": f"{FLEET}={fleet}"}
            )
        )
    )


@pytest.mark.slow
async def test_episodes_are_spread_and_each_stays_on_its_docker_host(worker: Worker) -> None:
    worker.may_play.clear()
    await worker.enqueue(4)
    await until(lambda: worker.opened(0, "agent") and worker.opened(1, "agent"))
    worker.may_play.set()
    await worker.answer_all()
    assert sorted(worker.opened(0, "agent") + worker.opened(1, "agent")) == sorted(worker.ids)
    for number in (0, 1):
        assert worker.opened(number, "agent")
        assert sorted(worker.opened(number, "agent")) == sorted(worker.opened(number, "grade"))


@pytest.mark.slow
async def test_a_docker_host_that_goes_away_is_set_aside_and_used_again_when_it_is_back(
    worker: Worker, relays: list[Relay]
) -> None:
    worker.may_play.clear()
    await worker.enqueue(3)
    await until(lambda: worker.opened(0, "agent") and worker.opened(1, "agent"))
    await relays[0].go()
    worker.may_play.set()
    await until(lambda: worker.breakers.set_aside)
    assert f"docker at {relays[0].host.url} is out: " in worker.breakers.set_aside
    assert (worker.breakers.paused, worker.breakers.room(3)) == ("", 2 - len(worker.pool.hosts[1].running))
    await worker.answer_all()
    assert set(worker.opened(1, "grade")) == set(worker.ids)

    await relays[0].come()
    before = len(worker.opened(0, "agent"))
    await until(lambda: "answers again" in worker.breakers.set_aside)
    await worker.enqueue(1)
    await worker.answer_all()
    assert len(worker.opened(0, "agent")) == before + 1
    await until(lambda: not worker.breakers.set_aside)


@pytest.mark.slow
async def test_claims_are_held_back_only_while_no_docker_host_is_left(
    worker: Worker, relays: list[Relay]
) -> None:
    for one in relays:
        await one.go()
    await until(lambda: worker.breakers.paused)
    assert worker.breakers.paused.count(" is out: ") == 2
    assert worker.breakers.set_aside == ""
    with pytest.raises(SandboxError, match=f"docker at {relays[1].host.url} is out"):
        await worker.pool.start()
    await worker.enqueue(2)
    await relays[1].come()
    await worker.answer_all()
    assert sorted(worker.opened(1, "grade")) == sorted(worker.ids)
    await relays[0].come()  # whoever made it stops it


async def test_a_docker_host_on_which_something_failed_is_the_second_choice(relays: list[Relay]) -> None:
    pool = HostPool([DockerSandboxes(host=one.host) for one in relays], slots=4)
    first, second = pool.hosts
    pool.claimed("bad")
    assert pool.of("bad") is first
    assert not await pool.blamed("bad", "odd")
    pool.ended("bad")
    for name in ("a", "b", "c", "d"):
        pool.claimed(name)
    assert (len(first.running), len(second.running)) == (0, 4)
    pool.claimed("e")
    assert pool.of("e") is first
    pool.succeeded("e")
    pool.ended("e")
    pool.ended("a")
    pool.claimed("f")
    assert pool.of("f") is first
    await pool.close()


async def test_a_heartbeat_tells_what_runs_on_each_docker_host_and_which_is_out(relays: list[Relay]) -> None:
    pool = HostPool([DockerSandboxes(host=one.host) for one in relays], slots=4)
    pool.claimed("one")
    await relays[1].go()
    await pool.hosts[1].breaker.check()
    first, second = pool.statuses()
    assert (first.name, first.slots, first.running, first.out) == (relays[0].host.url, 4, 1, "")
    assert (second.name, second.running) == (relays[1].host.url, 0)
    assert " is out: " in second.out
    await pool.close()
    await relays[1].come()


async def test_a_single_docker_host_is_named_without_its_address(relays: list[Relay]) -> None:
    pool = HostPool([DockerSandboxes(host=relays[0].host)], slots=4)
    assert len(await pool.start()) == 1
    await relays[0].go()
    with pytest.raises(SandboxError, match=r"^docker is out: "):
        await pool.start()
    await pool.hosts[0].breaker.check()
    assert (pool.paused.startswith("docker is out: "), pool.set_aside, pool.room(4)) == (True, "", 0)
    await pool.close()
    await relays[0].come()
