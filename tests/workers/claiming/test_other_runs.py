"""Requests whose run does not have the engines wait for it, and lose no try."""

import pytest
from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import weights
from pipeline.request import Claim, Endpoint, EpisodeStatus
from pipeline.trajectory import Trajectory
from pipeline.weights import PolicyHolder
from tests.conftest import Serving
from tests.pipeline import samples
from tests.workers.claiming.worker import enqueued, life, published, solve, until, worker
from workers import claim as claims
from workers.policy.requested import engines_of_other_runs, served_run

MINE, OTHER = PolicyHolder(samples.RUN), PolicyHolder("other")


def claimed() -> Claim:
    return Claim(request=samples.request(), attempt=1, worker="host/1", claimed_at=0.0)


async def nothing_known() -> None:
    return None


async def test_a_request_waits_while_another_run_has_the_engines(
    pool: ArqRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "PUT_OFF_WAIT_S", 0.05)
    assert await weights.acquire(pool, OTHER) is None
    request_id = await enqueued(pool)
    may_play = False

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        assert may_play
        return await solve(claim, status)

    async def put_off_twice() -> bool:
        return (await life(pool, request_id)).count("returned") > 1

    async with worker(pool, stage, obstacle=engines_of_other_runs(pool, nothing_known)) as claimer:
        await until(put_off_twice)
        await weights.release(pool, OTHER)
        may_play = True
        await until(lambda: published(pool, request_id))
    assert (claimer.finished, claimer.failed) == (1, 0)
    assert set(await life(pool, request_id)) == {"enqueued", "claimed", "returned", "published"}


async def test_the_run_that_publishes_weights_is_played_whatever_engines_serve(pool: ArqRedis) -> None:
    async def others() -> str:
        return "other"

    obstacle = engines_of_other_runs(pool, others)
    claim = claimed()
    assert await weights.acquire(pool, MINE) is None
    assert await obstacle(claim) == ""
    await weights.release(pool, MINE)
    assert await weights.acquire(pool, OTHER) is None
    assert await obstacle(claim) == "run other has the engines"


@pytest.mark.parametrize(
    ("served", "why"),
    [
        (samples.RUN, ""),
        (None, ""),
        ("other", "the engines serve weights of run other"),
        ("", "the engines serve no run's weights"),
    ],
)
async def test_while_no_run_publishes_what_engines_serve_decides(
    pool: ArqRedis, served: str | None, why: str
) -> None:
    async def told() -> str | None:
        return served

    assert await engines_of_other_runs(pool, told)(claimed()) == why


async def test_a_request_for_a_server_of_its_own_needs_no_engine(pool: ArqRedis) -> None:
    assert await weights.acquire(pool, OTHER) is None
    claim = claimed()
    elsewhere = replace(claim.request, endpoint=Endpoint(api_base="http://127.0.0.1:1/v1", model="m"))
    assert await engines_of_other_runs(pool, nothing_known)(replace(claim, request=elsewhere)) == ""


@pytest.mark.slow
async def test_an_engine_says_through_its_router_whose_weights_it_serves(serving: Serving) -> None:
    await serving.name_weights("other@3")
    assert await served_run(serving.router_url) == "other"
    await serving.name_weights("0")
    assert await served_run(serving.router_url) == ""


async def test_while_no_engine_says_whose_weights_it_serves_nothing_is_played(pool: ArqRedis) -> None:
    obstacle = engines_of_other_runs(pool, lambda: served_run("http://127.0.0.1:1"))
    assert "no engine says whose it serves" in await obstacle(claimed())


@pytest.mark.slow
async def test_a_router_that_does_not_tell_is_no_obstacle(serving: Serving, pool: ArqRedis) -> None:
    url = f"{serving.router_url}/no/such/path"
    assert await served_run(url) is None
    assert await engines_of_other_runs(pool, lambda: served_run(url))(claimed()) == ""
