"""A version is made ready, announced, and numbered once. No engine is needed for that."""

import shutil
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pipeline import weights
from pipeline.weights import WeightVersion
from tests.tiny_llama import write_checkpoint
from trainer.weights.publish import Publisher
from trainer.weights.transport import DiskTransport, Export

RUN = "publishing"


def on_disk(directory: Path, export: Export = write_checkpoint) -> DiskTransport:
    return DiskTransport(RUN, directory=directory, export=export, keep=2)


async def published(publisher: Publisher, version: int, step: int) -> WeightVersion:
    made = await publisher.prepare(version, step)
    await publisher.announce(made)
    return made


def num_bytes(path: Path) -> int:
    return path.stat().st_size


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


async def test_a_directory_is_never_seen_half_written(redis: Redis, tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def export(directory: Path) -> None:
        write_checkpoint(directory)
        seen.append({name for name in names(tmp_path) if not name.startswith(".")})

    publisher = Publisher(redis, RUN, transport=on_disk(tmp_path, export))
    await published(publisher, 0, step=0)
    await published(publisher, 1, step=1)
    assert seen == [set(), {"v000000"}], "while the export runs, only earlier versions have a name"


async def test_an_export_that_fails_announces_nothing(redis: Redis, tmp_path: Path) -> None:
    def export(directory: Path) -> None:
        write_checkpoint(directory)
        raise OSError("disk full")

    publisher = Publisher(redis, RUN, transport=on_disk(tmp_path, export))
    with pytest.raises(OSError, match="disk full"):
        await published(publisher, 0, step=0)
    assert await weights.newest_version(redis, RUN) is None
    assert names(tmp_path) == {".v000000.writing"}


async def test_only_the_newest_versions_stay_and_those_that_an_engine_may_need(
    redis: Redis, tmp_path: Path
) -> None:
    publisher = Publisher(redis, RUN, transport=on_disk(tmp_path))
    for version in range(5):
        await published(publisher, version, step=version)
    await publisher.discard_old(oldest_needed=2)
    assert names(tmp_path) == {"v000002", "v000003", "v000004"}
    await publisher.discard_old(oldest_needed=4)
    assert names(tmp_path) == {"v000003", "v000004"}


async def test_what_is_announced_is_what_lies_in_the_directory(redis: Redis, tmp_path: Path) -> None:
    publisher = Publisher(redis, RUN, transport=on_disk(tmp_path))
    made = await published(publisher, 0, step=7)
    announced = await weights.newest_version(redis, RUN)
    assert announced == made
    assert (announced.version, announced.step) == (0, 7)
    assert num_bytes(Path(announced.directory, "model.safetensors")) == announced.num_bytes
    assert await publisher.next_version() == 1


async def test_an_announcement_may_be_repeated(redis: Redis, tmp_path: Path) -> None:
    """As it is when Redis goes away after it has written it, and before it has said so."""
    publisher = Publisher(redis, RUN, transport=on_disk(tmp_path))
    made = await published(publisher, 0, step=0)
    await publisher.announce(made)
    assert await weights.newest_version(redis, RUN) == made


async def test_a_version_is_never_used_twice(redis: Redis, tmp_path: Path) -> None:
    first = Publisher(redis, RUN, transport=on_disk(tmp_path))
    await published(first, 0, step=0)
    shutil.rmtree(tmp_path)
    restarted = Publisher(redis, RUN, transport=on_disk(tmp_path))
    with pytest.raises(ValueError, match="take 1"):
        await published(restarted, 0, step=0)
    assert await restarted.next_version() == 1


async def test_a_version_whose_directory_is_gone_cannot_be_delivered_again(
    redis: Redis, tmp_path: Path
) -> None:
    publisher = Publisher(redis, RUN, transport=on_disk(tmp_path))
    await published(publisher, 0, step=0)
    newest = await weights.newest_version(redis, RUN)
    assert newest is not None
    assert await publisher.can_deliver(newest)
    shutil.rmtree(newest.directory)
    assert not await publisher.can_deliver(newest)
