"""A boundary that is out holds claims back and costs no request anything; one that is back lets them go on by itself."""

import asyncio
from collections.abc import Callable

import pytest

from pipeline.errors import SandboxError
from workers import breaker
from workers.breaker import Breaker, Breakers


class Boundary:
    """Something that may be out."""

    def __init__(self) -> None:
        self.is_out = False
        self.num_probes = 0

    async def probe(self) -> None:
        self.num_probes += 1
        if self.is_out:
            raise SandboxError("no such socket")


@pytest.fixture
def boundary() -> Boundary:
    return Boundary()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WATCH_S", "FIRST_WAIT_S", "LONGEST_WAIT_S", "TRIAL_S"):
        monkeypatch.setattr(breaker, name, 0.01)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(4000):
        if holds():
            return
        await asyncio.sleep(0.005)
    pytest.fail("waited in vain")


async def test_a_probe_that_fails_holds_claims_back_and_says_why(boundary: Boundary) -> None:
    docker = Breaker("docker", boundary.probe)
    assert (docker.room(8), docker.paused) == (8, "")
    boundary.is_out = True
    assert not await docker.check()
    assert (docker.room(8), docker.paused) == (0, "docker is out: no such socket")


async def test_one_episode_is_let_through_before_all_are(boundary: Boundary) -> None:
    docker = Breaker("docker", boundary.probe)
    docker.open("gone")
    await docker.check()
    assert (docker.room(8), docker.state) == (1, "half-open")
    docker.claimed("r")
    assert docker.room(8) == 0
    docker.succeeded("r")
    assert (docker.room(8), docker.paused) == (8, "")


async def test_a_trial_that_fails_closes_the_door_again(boundary: Boundary) -> None:
    docker = Breaker("docker", boundary.probe)
    docker.open("gone")
    await docker.check()
    docker.claimed("r")
    await docker.blamed("r1", "create failed")
    assert (docker.room(8), docker.paused) == (0, "docker is out: create failed")


async def test_a_failure_during_an_outage_is_not_the_requests(boundary: Boundary) -> None:
    docker = Breaker("docker", boundary.probe)
    boundary.is_out = True
    assert await docker.blamed("r1", "connection refused")
    assert docker.state == "open"


async def test_a_request_that_alone_fails_is_to_blame_itself(boundary: Boundary) -> None:
    docker = Breaker("docker", boundary.probe)
    assert [await docker.blamed("r1", "odd") for _ in range(5)] == [False] * 5
    assert docker.state == "closed"


async def test_different_requests_failing_in_a_row_open_it_though_the_probe_is_content(
    boundary: Boundary,
) -> None:
    docker = Breaker("docker", boundary.probe)
    assert [await docker.blamed(name, "odd") for name in ("r1", "r2", "r3")] == [False, False, True]
    assert docker.room(8) == 0


async def test_a_success_between_failures_clears_the_suspicion(boundary: Boundary) -> None:
    docker = Breaker("docker", boundary.probe)
    for name in ("r1", "r2", "r3", "r4"):
        assert not await docker.blamed(name, "odd")
        docker.succeeded("r")


async def test_an_outage_is_noticed_and_its_end_too_with_nobody_asking_and_nothing_queued(
    boundary: Boundary,
) -> None:
    breakers = Breakers({"docker": boundary.probe, "engine": Boundary().probe})
    watching = asyncio.create_task(breakers.watch())
    boundary.is_out = True
    await until(lambda: breakers.room(4) == 0)
    assert breakers.paused == "docker is out: no such socket"
    boundary.is_out = False
    await until(lambda: breakers.room(4) == 4)
    assert breakers.paused == ""
    watching.cancel()


async def test_a_trial_that_lasts_ends_the_pause(boundary: Boundary) -> None:
    docker = Breaker("docker", boundary.probe)
    docker.open("gone")
    await docker.check()
    docker.claimed("r")
    watching = asyncio.create_task(docker.watch())
    await until(lambda: docker.room(4) == 4)
    assert docker.state == "closed"
    watching.cancel()


async def test_a_boundary_that_goes_out_again_before_an_episode_came_is_out(
    boundary: Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "TRIAL_S", 1e9)
    docker = Breaker("docker", boundary.probe)
    docker.open("gone")
    await docker.check()
    watching = asyncio.create_task(docker.watch())
    boundary.is_out = True
    await until(lambda: docker.paused == "docker is out: no such socket")
    watching.cancel()


async def test_a_failure_is_asked_about_at_its_own_boundary(boundary: Boundary) -> None:
    breakers = Breakers({"docker": boundary.probe, "engine": Boundary().probe})
    boundary.is_out = True
    assert await breakers.blamed("grader", "r1", "cannot start")
    assert not await breakers.blamed("engine", "r1", "500")
    assert not await breakers.blamed("worker", "r1", "KeyError")


async def test_a_probe_that_hangs_is_an_outage(boundary: Boundary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "PROBE_TIMEOUT_S", 0.01)
    docker = Breaker("docker", asyncio.Event().wait)
    assert not await docker.check()
    assert docker.paused == "docker is out: TimeoutError"
