"""Weights reach a real engine by broadcast; here by gloo, to an engine on the CPU."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.conftest import Serving
from tests.tiny_llama import write_checkpoint
from tests.trainer.weights.run_of_weights import CONTROL_S
from trainer.weights import distributed
from trainer.weights.distributed import DistributedTransport
from trainer.weights.engines import EngineFailure, Engines
from trainer.weights.transport import DiskTransport

RUN = "broadcasting"


class Exports:
    """Each export has other weights."""

    def __init__(self) -> None:
        self.seed = 10

    def write(self, directory: Path) -> None:
        self.seed += 1
        write_checkpoint(directory, seed=self.seed)


@pytest.fixture
async def engines(serving: Serving) -> AsyncIterator[Engines]:
    async with Engines(serving.router_url, control_s=CONTROL_S) as engines:
        yield engines
        await engines.resume(serving.engine_url)
        await serving.name_weights("0")


@pytest.fixture
async def transport(tmp_path: Path) -> AsyncIterator[DistributedTransport]:
    disk = DiskTransport(RUN, directory=tmp_path / "weights", export=Exports().write, keep=3)
    transport = DistributedTransport(disk)
    yield transport
    await transport.aclose()


async def post(url: str, body: dict[str, Any]) -> Any:
    async with aiohttp.ClientSession(raise_for_status=True) as http, http.post(url, json=body) as response:
        return await response.json()


async def logprobs(engine_url: str) -> list[float]:
    """Of a fixed prompt: every weight has a part in them."""
    body = {
        "input_ids": [*range(3, 67)],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await post(f"{engine_url}/generate", body)
    return [logprob for logprob, *_ in answer["meta_info"]["input_token_logprobs"][1:]]


async def delivered(transport: DistributedTransport, engines: Engines, engine_url: str, number: int) -> None:
    """Export a version and have the engine load it, as a delivery does."""
    version = await transport.prepare(number, step=number)
    await transport.prefetch(engine_url, version)
    try:
        await engines.pause(engine_url, "retract")
        await transport.deliver(engines, engine_url, version, "retract")
    finally:
        await engines.resume(engine_url)


@pytest.mark.slow
async def test_an_engine_holds_the_same_after_a_broadcast_as_after_a_load_from_disk(
    serving: Serving,
    engines: Engines,
    transport: DistributedTransport,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "BUCKET_BYTES", 100_000)
    seen: list[list[float]] = []
    for version in range(2):
        await delivered(transport, engines, serving.engine_url, version)
        broadcast = await logprobs(serving.engine_url)
        assert broadcast not in seen
        seen.append(broadcast)
        served = await engines.served(serving.engine_url)
        assert served.weight_version == f"{RUN}@{version}"
        directory = tmp_path / "weights" / f"v{version:06d}"
        assert len(list(distributed.buckets(directory))) > 3
        await serving.load(directory, "from disk")
        assert await logprobs(serving.engine_url) == broadcast
    assert len(transport.senders) == 1, "the second version goes the way of the first"


@pytest.mark.slow
async def test_a_sender_that_dies_is_replaced_and_what_is_incomplete_has_no_version_of_the_run(
    serving: Serving, engines: Engines, transport: DistributedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "BUCKET_BYTES", 100_000)
    version = await transport.prepare(0, step=0)
    url = serving.engine_url
    await transport.prefetch(url, version)
    (sender,) = transport.senders.values()
    send, num_sent = sender.send, 0

    async def die_after_two(bucket: list[distributed.SentTensor]) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 3:
            await sender.end()
        await send(bucket)

    monkeypatch.setattr(sender, "send", die_after_two)
    await engines.pause(url, "retract")
    with pytest.raises(EngineFailure, match="process that broadcasts weights"):
        await transport.deliver(engines, url, version, "retract")
    assert (await engines.served(url)).weight_version == f"{RUN}@0-incomplete"
    await transport.deliver(engines, url, version, "retract")
    await engines.resume(url)
    assert (await engines.served(url)).weight_version == f"{RUN}@0"
    reply = await post(
        f"{serving.router_url}/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
    )
    assert reply["meta_info"]["weight_version"] == f"{RUN}@0"


@pytest.mark.slow
async def test_an_engine_that_forgot_the_group_is_joined_again(
    serving: Serving, engines: Engines, transport: DistributedTransport
) -> None:
    await delivered(transport, engines, serving.engine_url, 0)
    (sender,) = transport.senders.values()
    await post(f"{serving.engine_url}/destroy_weights_update_group", {"group_name": sender.group})
    with pytest.raises(EngineFailure, match=sender.group):
        await delivered(transport, engines, serving.engine_url, 1)
    await delivered(transport, engines, serving.engine_url, 1)
    assert (await engines.served(serving.engine_url)).weight_version == f"{RUN}@1"


@pytest.mark.slow
async def test_a_sender_ends_with_its_transport(tmp_path: Path) -> None:
    sender = await distributed.Sender.start()
    await sender.end()
    with pytest.raises(EngineFailure):
        await asyncio.wait_for(sender.join(2, "gloo"), 240)
