"""A fleet of real worker processes loses one by SIGKILL in the middle of an episode."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import docker
import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from infra import processes
from pipeline import census, connection, keys, queue, stream
from pipeline.request import Limits, RolloutRequest, Sampling
from pipeline.task import ExitCode, Task
from pipeline.tokenizer import put_tokenizer, read_bundle
from pipeline.weights import version_name
from tests.conftest import Serving
from tests.workers.agent.episode import AGENT


def endless_request(image: str, tokenizer: str, number: int) -> RolloutRequest:
    """An episode that an untrained policy keeps going for a good while: none of its replies is a command."""
    return RolloutRequest(
        id=f"journey-{number}",
        run_id="journey",
        purpose="train",
        task=Task(
            id="test:1",
            repo="acme/calc",
            base_commit="",
            image=image,
            workdir="/tmp",
            problem="add() subtracts",
            verdict=ExitCode(eval_script="true"),
        ),
        group_id="g00000000",
        member=number,
        group_size=2,
        version_at_enqueue=0,
        sampling=Sampling(max_new_tokens=48),
        limits=Limits(turns=60, context_tokens=4000, format_errors=1000),
        agent_config=AGENT,
        tokenizer=tokenizer,
        enqueued_at=time.time(),
    )


@pytest.fixture
def worker_process(redis_url: str, serving: Serving, tmp_path: Path) -> Callable[[str], processes.Child]:
    """Starts `python -m workers.run` under the given name."""

    def start(name: str) -> processes.Child:
        env = os.environ | {
            "SWERVE_REDIS_URL": redis_url,
            "SWERVE_ROUTER_URL": serving.router_url,
            "SWERVE_WORKER_NAME": name,
            "SWERVE_SLOTS": "2",
            "SWERVE_REAP_EVERY_S": "2",
        }
        return processes.start(
            name, [sys.executable, "-m", "workers.run"], log=tmp_path / f"{name}.log", environment=env
        )

    return start


@pytest.fixture
async def pool(redis: Redis, redis_url: str) -> AsyncIterator[ArqRedis]:
    """The trainer's side of the queue, on the emptied database."""
    pool = await connection.connect(redis_url)
    yield pool
    await pool.aclose()


async def until(holds: Callable[[], Awaitable[object]], *, what: str, patience_s: float = 240.0) -> None:
    """Waits for `holds`; fails with `what` when patience ends."""
    deadline = time.monotonic() + patience_s
    while not await holds():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {patience_s:.0f} s in vain for {what}")
        await asyncio.sleep(0.1)


@asynccontextmanager
async def stopped_afterwards(*children: processes.Child) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for child in children:
            await asyncio.to_thread(child.stop, grace_s=10)


# Quick: a killed worker costs no request and leaves no container.
async def test_the_requests_of_a_killed_worker_are_taken_over_answered_once_and_leave_no_container(
    redis: Redis,
    pool: ArqRedis,
    serving: Serving,
    task_image: str,
    docker_client: docker.DockerClient,
    worker_process: Callable[[str], processes.Child],
) -> None:
    await serving.name_weights(version_name("journey", 0))
    tokenizer = await put_tokenizer(redis, read_bundle(serving.model_dir))
    requests = [endless_request(task_image, tokenizer, number) for number in range(2)]
    for request in requests:
        await queue.enqueue(pool, request)
    doomed = worker_process("doomed")

    async def both_in_mid_episode() -> bool:
        leases = [await queue.current_lease(redis, request.id) for request in requests]
        return all(lease is not None and lease.worker == "doomed" and lease.turn >= 2 for lease in leases)

    async def both_answered() -> bool:
        return await redis.xlen(keys.stream("journey")) == 2

    async def no_container_left() -> bool:
        label = f"swerve.fleet={await census.fleet_id(redis)}"
        return not docker_client.containers.list(all=True, ignore_removed=True, filters={"label": label})

    async with stopped_afterwards(doomed):
        await until(both_in_mid_episode, what="the first worker to be in the middle of both episodes")
        os.kill(doomed.pid, signal.SIGKILL)
        killed_at = time.time()
        async with stopped_afterwards(worker_process("heir")):
            await until(both_answered, what="both requests to be answered by the heir")
            await until(no_container_left, what="every container of the fleet to be gone")
    deliveries = await stream.newest_heads(redis, "journey", 10)
    assert {delivery.head.request_id for delivery in deliveries} == {"journey-0", "journey-1"}
    assert {delivery.head.worker for delivery in deliveries} == {"heir"}
    assert all(delivery.head.attempt == 2 for delivery in deliveries)
    assert all(delivery.head.claimed_at > killed_at for delivery in deliveries)
