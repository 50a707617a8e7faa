"""New weights reach a real engine behind a real router, while it is sampling."""

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.test_utils
import aiohttp.web
import pytest
from redis.asyncio import Redis

from pipeline import weights
from tests.conftest import Serving
from tests.tiny_llama import write_checkpoint
from trainer.weights.disk import DiskTransport, Export
from trainer.weights.engines import EngineFailure, Engines, PauseMode, Served
from trainer.weights.publish import NoEngineServes, Publisher

RUN = "publishing"


def on_disk(directory: Path, export: Export = write_checkpoint) -> DiskTransport:
    return DiskTransport(RUN, directory=directory, export=export, keep=2)


@pytest.fixture
async def engines(serving: Serving) -> AsyncIterator[Engines]:
    async with Engines(serving.router_url, control_s=20, update_s=60) as engines:
        yield engines
        for engine in await engines.routed():
            if engine.url != serving.engine_url:
                await engines.quarantine(engine)
        await engines.resume(serving.engine_url)
        await eventually_routed(engines, {serving.engine_url})


@pytest.fixture
def publisher(redis: Redis, engines: Engines, tmp_path: Path) -> Publisher:
    return Publisher(
        redis,
        RUN,
        transport=on_disk(tmp_path / "weights"),
        engines=engines,
    )


async def generate(router_url: str, num_tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": True}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.post(f"{router_url}/generate", json=body) as response,
    ):
        return await response.json()


async def until_sampling(engine_url: str) -> None:
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        while True:
            async with http.get(f"{engine_url}/v1/loads") as response:
                if (await response.json())["loads"][0]["num_running_reqs"]:
                    return
            await asyncio.sleep(0.02)


async def eventually_routed(engines: Engines, urls: set[str]) -> None:
    """Return once the router's list is `urls`; the test's own time limit ends a wait in vain."""
    while True:
        if {engine.url for engine in await engines.routed()} == urls:
            return
        await asyncio.sleep(0.05)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def num_bytes(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_new_version_is_served_and_confirmed_in_the_middle_of_a_generation(
    serving: Serving, redis: Redis, engines: Engines, tmp_path: Path, mode: PauseMode
) -> None:
    publisher = Publisher(
        redis,
        RUN,
        transport=on_disk(tmp_path),
        engines=engines,
        mode=mode,
    )
    await publisher.publish(0, step=0)
    request = asyncio.create_task(generate(serving.router_url, 1500))
    await until_sampling(serving.engine_url)
    row = await publisher.publish(1, step=4)
    assert not request.done(), "the generation must be longer than the publication"
    reply = await request
    before, after = reply["meta_info"]["weight_versions"]
    assert (before["version"], after["version"]) == ("publishing@0", "publishing@1")
    assert 0 < before["end"] == after["start"] < after["end"] == 1500
    assert (row.engines, row.quarantined) == ((serving.engine_url,), ())
    served = await weights.served_weights(redis, RUN)
    assert served is not None
    assert (served.version, served.engines) == (1, (serving.engine_url,))


async def test_abort_hands_back_what_was_sampled_so_far(
    serving: Serving, redis: Redis, engines: Engines, tmp_path: Path
) -> None:
    publisher = Publisher(
        redis,
        RUN,
        transport=on_disk(tmp_path),
        engines=engines,
        mode="abort",
    )
    await publisher.publish(0, step=0)
    request = asyncio.create_task(generate(serving.router_url, 3000))
    await until_sampling(serving.engine_url)
    await publisher.publish(1, step=1)
    meta = (await request)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert {span["version"] for span in meta["weight_versions"]} == {"publishing@0"}
    assert (await generate(serving.router_url, 4))["meta_info"]["weight_version"] == "publishing@1"


async def test_what_is_announced_is_what_lies_in_the_directory(publisher: Publisher, redis: Redis) -> None:
    row = await publisher.publish(0, step=7)
    announced = await weights.newest_version(redis, RUN)
    assert announced is not None
    assert (announced.version, announced.step, announced.num_bytes) == (0, 7, row.num_bytes)
    assert num_bytes(Path(announced.directory, "model.safetensors")) == row.num_bytes
    assert await publisher.next_version() == 1


@contextlib.asynccontextmanager
async def wedged_engine() -> AsyncGenerator[str]:
    """The address of something that is in good health and takes no weights; it is gone afterwards."""
    about = {"model_path": "wedged", "weight_version": "0"}

    async def answer(request: aiohttp.web.BaseRequest) -> aiohttp.web.Response:
        if request.path in ("/health", "/server_info", "/model_info"):
            return aiohttp.web.json_response(about)
        return aiohttp.web.Response(status=500)

    async with aiohttp.test_utils.RawTestServer(answer, host="127.0.0.1") as server:
        yield str(server.make_url("")).rstrip("/")


async def test_an_engine_that_fails_is_quarantined_and_the_other_keeps_serving(
    serving: Serving, engines: Engines, publisher: Publisher
) -> None:
    async with wedged_engine() as wedged_url:
        await engines.readmit(wedged_url)
        await eventually_routed(engines, {serving.engine_url, wedged_url})
        row = await publisher.publish(0, step=0)
        assert (row.engines, row.quarantined) == ((serving.engine_url,), (wedged_url,))
        await eventually_routed(engines, {serving.engine_url})
        assert (await generate(serving.router_url, 4))["meta_info"]["weight_version"] == "publishing@0"
    again = await publisher.publish(1, step=1)
    assert again.quarantined == (wedged_url,), "it is offered every later version, also while it is dead"


async def test_a_quarantined_engine_comes_back_once_it_confirms(
    serving: Serving, engines: Engines, publisher: Publisher, redis: Redis
) -> None:
    (engine,) = await engines.routed()
    await engines.quarantine(engine)
    await eventually_routed(engines, set())
    left_out = weights.ServedWeights(version=0, engines=(), quarantined=(serving.engine_url,))
    await weights.record_served(redis, RUN, left_out)
    row = await publisher.publish(1, step=1)
    assert (row.engines, row.quarantined) == ((serving.engine_url,), ())
    await eventually_routed(engines, {serving.engine_url})


async def test_an_engine_that_cannot_read_the_weights_goes_on_with_the_old_ones(
    serving: Serving, redis: Redis, publisher: Publisher, tmp_path: Path
) -> None:
    await publisher.publish(0, step=0)
    unheard = Publisher(
        redis,
        RUN,
        transport=on_disk(tmp_path / "weights"),
        engines=None,
    )
    await unheard.publish(1, step=1)
    shutil.rmtree(tmp_path / "weights" / "v000001")
    with pytest.raises(NoEngineServes, match="version 1"):
        await publisher.catch_up()
    assert (await generate(serving.router_url, 4))["meta_info"]["weight_version"] == "publishing@0"
    await publisher.publish(2, step=1)
    assert (await generate(serving.router_url, 4))["meta_info"]["weight_version"] == "publishing@2"


async def test_an_engine_left_paused_or_behind_catches_up(
    serving: Serving, engines: Engines, publisher: Publisher, tmp_path: Path
) -> None:
    await publisher.publish(0, step=0)
    elsewhere = write_checkpoint(tmp_path / "elsewhere", seed=1)
    await engines.pause(serving.engine_url, "retract")
    await engines.update(
        serving.engine_url, directory=str(elsewhere), weight_version="publishing@0", mode="retract"
    )
    served = await publisher.catch_up()
    assert served is not None
    assert served.engines == (serving.engine_url,)
    assert (await engines.served(serving.engine_url)).model_path == str(tmp_path / "weights" / "v000000")
    assert (await generate(serving.router_url, 4))["meta_info"]["weight_version"] == "publishing@0"


async def test_an_engine_that_restarted_is_brought_up_to_date(
    serving: Serving, engines: Engines, publisher: Publisher, tmp_path: Path
) -> None:
    await publisher.publish(3, step=0)
    assert await publisher.redeliver_if_stale() is None, "no engine is stale"
    first = write_checkpoint(tmp_path / "first", seed=1)
    await engines.update(
        serving.engine_url, directory=str(first), weight_version="publishing@0", mode="retract"
    )
    served = await publisher.redeliver_if_stale()
    assert served is not None
    assert served.engines == (serving.engine_url,)
    assert (await generate(serving.router_url, 4))["meta_info"]["weight_version"] == "publishing@3"
    assert await publisher.redeliver_if_stale() is None


async def test_a_router_that_restarted_without_its_engines_is_told_of_them(
    serving: Serving, engines: Engines, publisher: Publisher
) -> None:
    await publisher.publish(0, step=0)
    (engine,) = await engines.routed()
    await engines.quarantine(engine)
    await eventually_routed(engines, set())
    assert await publisher.redeliver_if_stale() is not None
    await eventually_routed(engines, {serving.engine_url})


async def test_an_engine_that_died_is_out_of_routing_until_it_is_back_and_up_to_date(
    serving: Serving, engines: Engines, publisher: Publisher
) -> None:
    await publisher.publish(0, step=0)
    async with wedged_engine() as dying_url:
        await engines.readmit(dying_url)
        await eventually_routed(engines, {serving.engine_url, dying_url})
    served = await publisher.redeliver_if_stale()
    assert served is not None
    assert (served.engines, served.quarantined) == ((serving.engine_url,), (dying_url,))
    await eventually_routed(engines, {serving.engine_url})
    assert await publisher.redeliver_if_stale() is None, "nothing can be done for it yet"


async def test_an_engine_that_is_silent_is_a_failure_after_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with Engines(url, control_s=0.2) as engines:
            with pytest.raises(EngineFailure, match=r"no answer within 0\.2 s"):
                await engines.served(url)


async def test_without_a_router_nobody_serves(redis: Redis, tmp_path: Path) -> None:
    async with Engines("http://127.0.0.1:1") as unreachable:
        publisher = Publisher(
            redis,
            RUN,
            transport=on_disk(tmp_path),
            engines=unreachable,
        )
        with pytest.raises(NoEngineServes, match="version 0"):
            await publisher.publish(0, step=0)


async def test_a_directory_is_never_seen_half_written(redis: Redis, tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def export(directory: Path) -> None:
        write_checkpoint(directory)
        seen.append({name for name in names(tmp_path) if not name.startswith(".")})

    publisher = Publisher(redis, RUN, transport=on_disk(tmp_path, export), engines=None)
    await publisher.publish(0, step=0)
    await publisher.publish(1, step=1)
    assert seen == [set(), {"v000000"}], "while the export runs, only earlier versions have a name"


async def test_an_export_that_fails_announces_nothing(redis: Redis, tmp_path: Path) -> None:
    def export(directory: Path) -> None:
        write_checkpoint(directory)
        raise OSError("disk full")

    publisher = Publisher(redis, RUN, transport=on_disk(tmp_path, export), engines=None)
    with pytest.raises(OSError, match="disk full"):
        await publisher.publish(0, step=0)
    assert await weights.newest_version(redis, RUN) is None
    assert names(tmp_path) == {".v000000.writing"}


async def test_without_engines_versions_go_to_disk_and_only_the_newest_stay(
    redis: Redis, tmp_path: Path
) -> None:
    publisher = Publisher(
        redis,
        RUN,
        transport=on_disk(tmp_path),
        engines=None,
    )
    for version in range(4):
        await publisher.publish(version, step=version)
    assert names(tmp_path) == {"v000002", "v000003"}


async def test_a_version_is_never_used_twice(redis: Redis, tmp_path: Path) -> None:
    first = Publisher(redis, RUN, transport=on_disk(tmp_path), engines=None)
    await first.publish(0, step=0)
    shutil.rmtree(tmp_path)
    restarted = Publisher(redis, RUN, transport=on_disk(tmp_path), engines=None)
    with pytest.raises(ValueError, match="take 1"):
        await restarted.publish(0, step=0)
    assert await restarted.next_version() == 1


async def test_a_version_whose_directory_is_gone_cannot_be_delivered_again(
    redis: Redis, tmp_path: Path
) -> None:
    publisher = Publisher(redis, RUN, transport=on_disk(tmp_path), engines=None)
    await publisher.publish(0, step=0)
    newest = await weights.newest_version(redis, RUN)
    assert newest is not None
    assert await publisher.can_deliver(newest)
    shutil.rmtree(newest.directory)
    assert not await publisher.can_deliver(newest)


class SharedFile:
    """Another transport: every engine reads one directory, which each version replaces."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.delivered: list[tuple[str, int]] = []

    async def prepare(self, version: int, step: int) -> weights.WeightVersion:
        write_checkpoint(self.directory, seed=version)
        return weights.WeightVersion(
            run_id=RUN,
            version=version,
            step=step,
            directory="",
            num_bytes=0,
            sha256="",
            published_at=0.0,
        )

    async def is_available(self, version: weights.WeightVersion) -> bool:
        return True

    def is_current(self, served: Served, version: weights.WeightVersion) -> bool:
        return served.model_path == str(self.directory)

    async def deliver(
        self, engines: Engines, engine_url: str, version: weights.WeightVersion, mode: PauseMode
    ) -> None:
        name = weights.version_name(RUN, version.version)
        await engines.update(engine_url, directory=str(self.directory), weight_version=name, mode=mode)
        self.delivered.append((engine_url, version.version))

    async def discard_old(self) -> None:
        pass


async def test_a_publication_asks_its_transport_for_all_that_moves_weights(
    serving: Serving, engines: Engines, redis: Redis, tmp_path: Path
) -> None:
    transport = SharedFile(tmp_path / "shared")
    publisher = Publisher(redis, RUN, transport=transport, engines=engines)
    for version in (0, 1):
        row = await publisher.publish(version, step=version)
        assert row.engines == (serving.engine_url,)
    assert await publisher.redeliver_if_stale() is None
    assert transport.delivered == [(serving.engine_url, 0), (serving.engine_url, 1)]
    assert (await generate(serving.router_url, 4))["meta_info"]["weight_version"] == "publishing@1"
