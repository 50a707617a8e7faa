"""New weights reach a real engine behind a real router, while it is sampling."""

import asyncio
import shutil
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from pipeline import weights
from tests.conftest import Serving
from tests.tiny_llama import write_checkpoint
from tests.trainer.weights.run_of_weights import CONTROL_S, RUN, RunOfWeights, eventually_routed
from trainer.weights.engines import EngineFailure, Engines, PauseMode, Served
from trainer.weights.transport import Whole

LONG_TOKENS = 3000  # some seconds of sampling, of which a delivery takes a part


@pytest.fixture
async def engines(serving: Serving) -> AsyncIterator[Engines]:
    async with Engines(serving.router_url, control_s=CONTROL_S) as engines:
        yield engines
        for engine in await engines.routed():
            if engine.url != serving.engine_url:
                await engines.quarantine(engine)
        await engines.resume(serving.engine_url)
        await eventually_routed(engines, {serving.engine_url})


@pytest.fixture
async def run(redis: Redis, engines: Engines, tmp_path: Path) -> AsyncGenerator[RunOfWeights]:
    async with RunOfWeights(redis, engines, tmp_path / "weights") as run:
        yield run


async def generate(router_url: str, num_tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": True}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.post(f"{router_url}/generate", json=body) as response,
    ):
        return await response.json()


async def sampled_under(router_url: str) -> str:
    return (await generate(router_url, 4))["meta_info"]["weight_version"]


async def until_sampling(engine_url: str, request: asyncio.Task[dict[str, Any]]) -> None:
    """Return once the engine works on the request."""
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        while not request.done():
            async with http.get(f"{engine_url}/v1/loads") as response:
                if (await response.json())["loads"][0]["num_running_reqs"]:
                    return
            await asyncio.sleep(0.02)
    request.result()  # raises what ended it
    raise AssertionError("the generation was over before it was seen")


# Quick: an engine behind its router serves a publication while it samples.
@pytest.mark.slow_but_for("in_place")
@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_new_version_is_served_and_confirmed_in_the_middle_of_a_generation(
    serving: Serving, redis: Redis, engines: Engines, tmp_path: Path, mode: PauseMode
) -> None:
    async with RunOfWeights(redis, engines, tmp_path, mode=mode) as run:
        assert await run.serve(0)
        newer = await run.announce(1)
        request = asyncio.create_task(generate(serving.router_url, LONG_TOKENS))
        await until_sampling(serving.engine_url, request)
        run.deliveries.offer(newer)
        assert await run.deliveries.settled(1)
        assert not request.done(), "the generation must be longer than the delivery"
        reply = await request
    before, after = reply["meta_info"]["weight_versions"]
    assert (before["version"], after["version"]) == ("publishing@0", "publishing@1")
    assert 0 < before["end"] == after["start"] < after["end"] == LONG_TOKENS
    assert [(one.version, one.engines, one.quarantined) for one in run.reported] == [
        (0, (serving.engine_url,), ()),
        (1, (serving.engine_url,), ()),
    ]
    assert await weights.served_weights(redis, RUN) == run.reported[-1]
    pauses = run.deliveries.take_pauses()
    assert [pause.engine for pause in pauses] == [serving.engine_url] * 2
    assert pauses[0].began_at < pauses[0].ended_at <= pauses[1].began_at < pauses[1].ended_at
    assert run.deliveries.take_pauses() == (), "each is told once"


async def test_abort_hands_back_what_was_sampled_so_far(
    serving: Serving, redis: Redis, engines: Engines, tmp_path: Path
) -> None:
    async with RunOfWeights(redis, engines, tmp_path, mode="abort") as run:
        assert await run.serve(0)
        newer = await run.announce(1)
        request = asyncio.create_task(generate(serving.router_url, LONG_TOKENS))
        await until_sampling(serving.engine_url, request)
        run.deliveries.offer(newer)
        assert await run.deliveries.settled(1)
        meta = (await request)["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert {span["version"] for span in meta["weight_versions"]} == {"publishing@0"}
        assert await sampled_under(serving.router_url) == "publishing@1"


@pytest.mark.slow
async def test_a_quarantined_engine_comes_back_once_it_confirms(
    serving: Serving, engines: Engines, redis: Redis, tmp_path: Path
) -> None:
    (engine,) = await engines.routed()
    await engines.quarantine(engine)
    await eventually_routed(engines, set())
    left_out = weights.ServedWeights(version=0, engines=(), quarantined=(serving.engine_url,))
    await weights.record_served(redis, RUN, left_out)
    async with RunOfWeights(redis, engines, tmp_path) as run:
        assert await run.serve(1)
        assert (run.reported[-1].engines, run.reported[-1].quarantined) == ((serving.engine_url,), ())
        await eventually_routed(engines, {serving.engine_url})


@pytest.mark.slow
async def test_an_engine_that_cannot_read_the_weights_goes_on_with_the_old_ones(
    serving: Serving, run: RunOfWeights
) -> None:
    assert await run.serve(0)
    lost = await run.announce(1)
    shutil.rmtree(lost.directory)
    run.deliveries.offer(lost)
    assert not await run.deliveries.settled(1)
    assert "no engine serves weight version 1" in run.deliveries.trouble
    assert await sampled_under(serving.router_url) == "publishing@0"
    assert await run.serve(2)
    assert run.deliveries.trouble == ""
    assert await sampled_under(serving.router_url) == "publishing@2"


async def test_an_engine_that_a_dead_trainer_left_paused_goes_on(
    serving: Serving, redis: Redis, engines: Engines, tmp_path: Path
) -> None:
    async with RunOfWeights(redis, engines, tmp_path) as first:
        assert await first.serve(0)
    await engines.pause(serving.engine_url, "retract")
    async with RunOfWeights(redis, engines, tmp_path) as second:
        newest = await second.publisher.newest()
        assert newest is not None
        second.deliveries.offer(newest)
        assert await second.deliveries.settled(0)
        assert await sampled_under(serving.router_url) == "publishing@0"


async def test_an_engine_with_other_weights_of_the_same_name_gets_the_right_ones(
    serving: Serving, engines: Engines, run: RunOfWeights, tmp_path: Path
) -> None:
    assert await run.serve(0)
    elsewhere = write_checkpoint(tmp_path / "elsewhere", seed=1)
    await serving.load(elsewhere, "publishing@0")
    while (await engines.served(serving.engine_url)).model_path == str(elsewhere):  # noqa: ASYNC110 - an engine sets no Event
        await asyncio.sleep(0.05)
    assert await sampled_under(serving.router_url) == "publishing@0"


async def test_an_engine_that_restarted_is_brought_up_to_date(
    serving: Serving, engines: Engines, run: RunOfWeights, tmp_path: Path
) -> None:
    assert await run.serve(3)
    first = write_checkpoint(tmp_path / "first", seed=1)
    await serving.load(first, "publishing@0")
    while await sampled_under(serving.router_url) != "publishing@3":  # noqa: ASYNC110 - an engine sets no Event
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_router_that_restarted_without_its_engines_is_told_of_them(
    serving: Serving, engines: Engines, run: RunOfWeights
) -> None:
    assert await run.serve(0)
    (engine,) = await engines.routed()
    await engines.quarantine(engine)
    await eventually_routed(engines, {serving.engine_url})


async def test_an_engine_that_was_started_for_other_numbers_gets_no_weights_in_eight_bits(
    serving: Serving, run: RunOfWeights
) -> None:
    version = await run.announce(0)
    async with Engines(serving.router_url, precision="fp8", control_s=CONTROL_S) as engines:
        before = await engines.served(serving.engine_url)
        with pytest.raises(EngineFailure, match="was not started with --quantization fp8"):
            await engines.update(serving.engine_url, version, directory=version.directory, mode="retract")
        assert await engines.served(serving.engine_url) == before


async def test_an_engine_that_is_silent_is_a_failure_after_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with Engines(url, control_s=0.2) as engines:
            with pytest.raises(EngineFailure, match=r"no answer within 0\.2 s"):
                await engines.served(url)


async def test_without_a_router_nobody_serves(redis: Redis, tmp_path: Path) -> None:
    async with (
        Engines("http://127.0.0.1:1") as unreachable,
        RunOfWeights(redis, unreachable, tmp_path) as run,
    ):
        assert not await run.serve(0)
        assert "version 0" in run.deliveries.trouble


async def test_without_engines_a_version_counts_as_served_when_it_is_announced(
    redis: Redis, tmp_path: Path
) -> None:
    async with RunOfWeights(redis, None, tmp_path) as run:
        assert await run.serve(0)
        assert [one.version for one in run.reported] == [0]


async def test_without_engines_a_pinned_version_counts_as_served_until_it_is_unpinned(
    redis: Redis, tmp_path: Path
) -> None:
    async with RunOfWeights(redis, None, tmp_path) as run:
        assert await run.serve(0)
        run.deliveries.pin()
        await run.publish(1)
        for _ in range(2):
            await run.another_look()
        assert [one.version for one in run.reported] == [0]
        run.deliveries.unpin()
        assert await run.deliveries.settled(1)
        assert [one.version for one in run.reported] == [0, 1]


@pytest.mark.slow
async def test_a_pinned_version_stays_until_it_is_unpinned(serving: Serving, run: RunOfWeights) -> None:
    assert await run.serve(0)
    run.deliveries.pin()
    await run.publish(1)
    await run.publish(2)
    assert run.deliveries.oldest_needed == 0
    for _ in range(2):  # the second look comes after all that the first one began
        await run.another_look()
    assert await sampled_under(serving.router_url) == "publishing@0"
    run.deliveries.unpin()
    assert await run.deliveries.settled(2)
    assert [one.version for one in run.reported] == [0, 2], "version 1 was overtaken"


class SharedFile(Whole):
    """Another transport: every engine reads one directory, which each version replaces."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.prefetched: list[tuple[str, int]] = []
        self.delivered: list[tuple[str, int]] = []

    async def prepare(self, version: int, step: int) -> weights.WeightVersion:
        write_checkpoint(self.directory, seed=version)
        return weights.WeightVersion(
            run_id=RUN,
            version=version,
            step=step,
            directory="",
            num_bytes=0,
            published_at=0.0,
        )

    async def is_available(self, version: weights.WeightVersion) -> bool:
        return True

    def is_current(self, served: Served, version: weights.WeightVersion) -> bool:
        return served.model_path == str(self.directory)

    async def prefetch(self, engine_url: str, version: weights.WeightVersion) -> None:
        self.prefetched.append((engine_url, version.version))

    async def deliver(
        self, engines: Engines, engine_url: str, version: weights.WeightVersion, mode: PauseMode
    ) -> None:
        await engines.update(engine_url, version, directory=str(self.directory), mode=mode)
        self.delivered.append((engine_url, version.version))

    async def discard_old(self, oldest_needed: int) -> None:
        pass


async def test_a_delivery_asks_its_transport_for_all_that_moves_weights(
    serving: Serving, engines: Engines, redis: Redis, tmp_path: Path
) -> None:
    transport = SharedFile(tmp_path / "shared")
    async with RunOfWeights(redis, engines, tmp_path, transport=transport) as run:
        for version in (0, 1):
            assert await run.serve(version)
        await run.another_look()
        assert (
            transport.prefetched == transport.delivered == [(serving.engine_url, 0), (serving.engine_url, 1)]
        )
        assert await sampled_under(serving.router_url) == "publishing@1"
