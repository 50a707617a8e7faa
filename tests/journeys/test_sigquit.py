"""SIGQUIT shows what a worker and a trainer are doing, and ends neither."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from infra import processes
from pipeline import census, keys
from tests.trainer.forking import Forked
from tests.trainer.processes import recipe as recipe
from tests.trainer.processes import start


async def _until(holds: Callable[[], bool], process: Forked | processes.Child) -> None:
    while not holds():
        assert process.alive if isinstance(process, processes.Child) else process.returncode is None
        await asyncio.sleep(0.05)


def _tasks(text: str) -> dict[str, str]:
    """The lines of code at which each task waits, by the task's name."""
    dump = text[text.index(" asyncio tasks, ") : text.index("\nthread ")]
    parts = dump.split("\ntask '")[1:]
    return {part.partition("'")[0]: part for part in parts}


@pytest.mark.slow
@pytest.mark.docker
async def test_a_worker_prints_its_tasks_and_where_each_waits_and_goes_on(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    environment = os.environ | {
        "SWERVE_REDIS_URL": redis_url,
        "SWERVE_ROUTER_URL": "",
        "SWERVE_WORKER_NAME": "asked",
    }
    log = tmp_path / "worker.log"
    child = processes.start("asked", [sys.executable, "-m", "workers.run"], log=log, environment=environment)
    try:
        while not [worker for worker in (await census.workers(redis))[0] if worker.name == "asked"]:
            assert child.alive, log.read_text()
            await asyncio.sleep(0.05)
        tasks: dict[str, str] = {}
        # Before it waits for requests, it looks for some; and its heartbeat sleeps until the next one.
        while not (
            "in _wait_for_work" in "".join(tasks.values())
            and "await asyncio.sleep(every_s)" in tasks.get("beat", "")
        ):
            log.write_text("")
            os.kill(child.pid, signal.SIGQUIT)
            await _until(lambda: "thread 'MainThread'" in log.read_text(), child)
            tasks = _tasks(log.read_text())
    finally:
        child.stop(grace_s=240)
    assert child.process.returncode == 0, "the signal did not keep it from ending in good order"


@pytest.mark.slow
async def test_a_trainer_prints_its_tasks_and_where_each_waits_and_goes_on(
    recipe: Path, redis: Redis, redis_url: str
) -> None:
    run = recipe.parent / "run"
    trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "asked")
    try:
        while not await redis.exists(keys.open_requests("asked")):
            assert trainer.process.returncode is None, trainer.output
            await asyncio.sleep(0.05)
        trainer.process.send_signal(signal.SIGQUIT)
        await _until(lambda: "thread 'MainThread'" in trainer.output, trainer.process)
        assert "trainer/loop/" in "".join(_tasks(trainer.output).values())
        trainer.process.send_signal(signal.SIGTERM)
        assert await trainer.ended() == 0, "the signal did not keep it from ending in good order"
    finally:
        if trainer.process.returncode is None:
            await trainer.kill()
