"""Versions reach engine hosts as changes, and each host's directory is byte for byte the trainer's."""

import asyncio
import logging
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.weights import WeightVersion
from tests.conftest import Serving
from tests.tiny_llama import write_checkpoint
from tests.trainer.weights.receivers import Hosts, ReceiverHost, content_of
from tests.trainer.weights.run_of_weights import CONTROL_S
from trainer.weights.delta import DeltaTransport, Receivers
from trainer.weights.engines import EngineFailure, Engines, Served
from trainer.weights.transport import DiskTransport

RUN = "delta.run-1"
WORDS = 2_500_000  # two blocks, the last of them short


class Model:
    """Weights in 16-bit words that change as bfloat16 weights do: a few of them, by one step of the last place."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self.words = self._random.integers(0, 1 << 16, WORDS, dtype=np.uint16)
        self.num_shards = 1

    def change(self, share: float = 0.03) -> None:
        changed = self._random.random(WORDS) < share
        self.words[changed] += self._random.choice(np.array([1, 0xFFFF], dtype=np.uint16), int(changed.sum()))

    def replace(self) -> None:
        self.words = self._random.integers(0, 1 << 16, WORDS, dtype=np.uint16)

    def export(self, directory: Path) -> None:
        directory.mkdir()
        for number, shard in enumerate(np.array_split(self.words, self.num_shards), 1):
            (directory / f"model-{number}-of-{self.num_shards}.safetensors").write_bytes(shard.tobytes())
        (directory / "config.json").write_bytes(b'{"odd": 1}')
        (directory / "empty.txt").write_bytes(b"")
        # As merged weights have their adapters beside them, which no engine reads.
        (directory / "adapter").mkdir()
        (directory / "adapter/adapter_model.safetensors").write_bytes(b"")


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.stop()


@pytest.fixture
async def transport(hosts: Hosts, model: Model, tmp_path: Path) -> AsyncIterator[DeltaTransport]:
    async with Receivers(hosts.port) as receivers:
        weights = tmp_path / "weights"
        disk = DiskTransport(RUN, directory=weights, export=model.export, keep=3)
        yield DeltaTransport(disk, receivers, directory=weights / "patches")


def assert_equal(host: ReceiverHost, version: WeightVersion) -> None:
    assert content_of(host.directory_of(RUN, version.version)) == content_of(Path(version.directory))


async def killed_while_receiving(
    host: ReceiverHost, transport: DeltaTransport, version: WeightVersion
) -> None:
    """Kill the receiver as soon as it has begun, and start it again."""
    delivery = asyncio.create_task(transport.prefetch(host.engine_url, version))
    while True:
        if host.is_receiving() or delivery.done():
            break
        await asyncio.sleep(0)
    host.kill()
    await asyncio.wait([delivery])
    assert delivery.exception() is None or isinstance(delivery.exception(), EngineFailure)
    host.start()
    assert not host.is_receiving(), "what was unfinished is removed"


@pytest.mark.slow
async def test_over_20_versions_every_host_has_the_trainers_bytes_though_some_join_late_or_are_killed(
    transport: DeltaTransport, model: Model, hosts: Hosts, tmp_path: Path
) -> None:
    steady, killed, rare = hosts.new(), hosts.new(), hosts.new()
    late: ReceiverHost | None = None
    sent_bytes: dict[int, int] = {}
    for number in range(20):
        if number == 12:
            model.num_shards = 2
        model.replace() if number == 7 else model.change()
        version = await transport.prepare(number, step=number)
        present = [steady, killed]
        if number % 4 == 0:
            present.append(rare)  # its base is gone from the trainer's disk each time
        if number == 5:
            late = hosts.new()
        if number == 13:  # it comes back on an empty disk
            killed.kill()
            shutil.rmtree(killed.disk)
            killed.start()
        if late is not None:
            present.append(late)
        if number % 4 == 1:
            await killed_while_receiving(killed, transport, version)
        await asyncio.gather(*(transport.prefetch(host.engine_url, version) for host in present))
        for host in present:
            assert_equal(host, version)
        patch = tmp_path / "weights" / "patches" / f"{number - 1:06d}-{number:06d}.patch"
        sent_bytes[number] = patch.stat().st_size if patch.exists() else 0
        await transport.discard_old(version.version)
    small = {number for number, num_bytes in sent_bytes.items() if 0 < num_bytes < 2 * WORDS // 20}
    assert small == {*range(1, 20)} - {7, 12}, (
        "all but the replaced and the resharded version are sent as changes"
    )
    assert len(list((tmp_path / "weights" / "patches").iterdir())) <= 3
    assert len(list(steady.disk.glob("*@v*[0-9]"))) == 3, "older versions are removed"


async def test_a_receiver_that_breaks_off_in_the_middle_of_a_patch_keeps_what_it_had(
    transport: DeltaTransport, hosts: Hosts
) -> None:
    host = hosts.new()
    version = await transport.prepare(0, step=0)
    await transport.prefetch(host.engine_url, version)
    with socket.create_connection((host.address, host.port)) as trainer:
        trainer.sendall(f"PUT /versions/{RUN}/1 HTTP/1.0\r\nContent-Length: 1000\r\n\r\nSWP1".encode())
        host.kill()
    host.start()
    assert_equal(host, version)
    assert {path.name for path in host.disk.iterdir()} == {
        ".lock",
        f"{RUN}@v000000",
        f"{RUN}@v000000.manifest",
    }


async def test_a_base_whose_bytes_changed_on_disk_is_noticed_and_the_version_is_sent_whole(
    transport: DeltaTransport,
    model: Model,
    hosts: Hosts,
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = hosts.new()
    await transport.prefetch(host.engine_url, await transport.prepare(0, step=0))
    held = host.directory_of(RUN, 0) / "model-1-of-1.safetensors"
    content = bytearray(held.read_bytes())
    content[-1] ^= 1
    held.write_bytes(content)
    model.change(share=0.0001)
    version = await transport.prepare(1, step=1)
    with caplog.at_level(logging.WARNING, "swerve.weights"):
        await transport.prefetch(host.engine_url, version)
    assert "so it is sent whole" in caplog.text
    assert "is not what the trainer exported" in caplog.text
    assert_equal(host, version)


async def test_a_receiver_that_lost_its_base_gets_the_version_whole(
    transport: DeltaTransport,
    model: Model,
    hosts: Hosts,
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = hosts.new()
    await transport.prefetch(host.engine_url, await transport.prepare(0, step=0))
    for path in host.disk.glob(f"{RUN}@*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    model.change()
    version = await transport.prepare(1, step=1)
    with caplog.at_level(logging.INFO, "swerve.weights"):
        await transport.prefetch(host.engine_url, version)
    assert "whole, it has no version that this run still has" in caplog.text
    assert_equal(host, version)


async def test_a_patch_that_was_lost_on_the_trainers_disk_is_made_again(
    transport: DeltaTransport, model: Model, hosts: Hosts, tmp_path: Path
) -> None:
    first, second = hosts.new(), hosts.new()
    started = await transport.prepare(0, step=0)
    await asyncio.gather(*(transport.prefetch(host.engine_url, started) for host in (first, second)))
    model.change()
    version = await transport.prepare(1, step=1)
    await transport.prefetch(first.engine_url, version)
    shutil.rmtree(tmp_path / "weights" / "patches")
    await transport.prefetch(second.engine_url, version)
    assert_equal(second, version)


async def test_another_run_with_the_same_version_numbers_is_no_base(
    transport: DeltaTransport, model: Model, hosts: Hosts, tmp_path: Path
) -> None:
    host = hosts.new()
    other_disk = DiskTransport("other", directory=tmp_path / "other", export=model.export, keep=3)
    async with Receivers(host.port) as receivers:
        other = DeltaTransport(other_disk, receivers, directory=tmp_path / "other-patches")
        await other.prefetch(host.engine_url, await other.prepare(0, step=0))
    model.change()
    version = await transport.prepare(0, step=0)
    await transport.prefetch(host.engine_url, version)
    assert_equal(host, version)


async def test_two_engines_of_one_host_share_one_delivery(
    transport: DeltaTransport, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    host = hosts.new()
    version = await transport.prepare(0, step=0)
    neighbour = host.engine_url.replace(":1", ":2")
    with caplog.at_level(logging.INFO, "swerve.weights"):
        await asyncio.gather(*(transport.prefetch(url, version) for url in (host.engine_url, neighbour)))
    assert caplog.text.count("bytes, whole") == 1
    assert transport.is_current(Served("x", str(host.directory_of(RUN, 0))), version)
    assert not transport.is_current(Served("x", str(host.directory_of(RUN, 1))), version)


async def test_a_host_without_a_receiver_is_a_failure_that_says_what_to_start(
    transport: DeltaTransport,
) -> None:
    version = await transport.prepare(0, step=0)
    with pytest.raises(EngineFailure, match=r"start python -m infra\.serving\.receiver on that host"):
        await transport.prefetch("http://127.0.0.9:1", version)


async def test_an_engine_loads_what_its_hosts_receiver_made(
    serving: Serving, hosts: Hosts, tmp_path: Path
) -> None:
    host = hosts.new()
    seeds = iter((21, 22))
    disk = DiskTransport(
        RUN,
        directory=tmp_path / "tiny",
        export=lambda directory: write_checkpoint(directory, seed=next(seeds)),
        keep=2,
    )
    async with Receivers(host.port) as receivers, Engines(serving.router_url, control_s=CONTROL_S) as engines:
        transport = DeltaTransport(disk, receivers, directory=tmp_path / "tiny" / "patches")
        for number in range(2):
            version = await transport.prepare(number, step=number)
            await transport.deliver(engines, serving.engine_url, version, "retract")
            served = await engines.served(serving.engine_url)
            assert served == Served(f"{RUN}@{number}", str(host.directory_of(RUN, number)))
            assert transport.is_current(served, version)
            assert_equal(host, version)
    await serving.name_weights("0")
