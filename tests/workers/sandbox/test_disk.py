"""What episodes write: bounded for each container, and held back where the host's disk runs short."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import docker
import pytest

from pipeline.errors import SandboxError
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.sandbox.relay import relay
from workers.sandbox import disk
from workers.sandbox.disk import DiskWatch, FreeSpace, check_temporary
from workers.sandbox.docker import DockerSandbox, DockerSandboxes
from workers.sandbox.hosts import HostPool
from workers.settings import DiskSettings, disk_settings

pytestmark = [pytest.mark.docker, pytest.mark.alone]

MB = 1_000_000
KILLED = (137, 138)  # 138: the signal by which the holder was told to kill
NOTHING = DiskSettings(min_free_bytes=0, max_written_bytes=0)
MORE_THAN_ANYBODY_HAS = DiskSettings(min_free_bytes=2**62, max_written_bytes=0)


@pytest.fixture
async def small(sandboxes: DockerSandboxes) -> AsyncIterator[DockerSandboxes]:
    """A container may write 8 MB."""
    small = DockerSandboxes(
        fleet=sandboxes.fleet, disk=DiskSettings(min_free_bytes=0, max_written_bytes=8 * MB)
    )
    yield small
    await small.close()


@pytest.fixture
async def sandbox(small: DockerSandboxes, repo_image: RepoImage) -> AsyncIterator[DockerSandbox]:
    async with small.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
        yield sandbox


def test_what_a_host_may_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SWERVE_MIN_FREE_BYTES", "SWERVE_MAX_WRITTEN_BYTES"):
        monkeypatch.delenv(name, raising=False)
    assert disk_settings() == DiskSettings(min_free_bytes=2_000_000_000, max_written_bytes=10_000_000_000)
    monkeypatch.setenv("SWERVE_MIN_FREE_BYTES", "0")
    monkeypatch.setenv("SWERVE_MAX_WRITTEN_BYTES", "1.5GiB")
    assert disk_settings() == DiskSettings(min_free_bytes=0, max_written_bytes=3 * 2**29)
    monkeypatch.setenv("SWERVE_MIN_FREE_BYTES", "much")
    with pytest.raises(ValueError, match=r"SWERVE_MIN_FREE_BYTES='much': .*give a size such as 300GB"):
        disk_settings()


def test_too_little_of_bytes_or_of_files_is_told() -> None:
    room = FreeSpace(Path("/d"), num_bytes=100 * MB, free_bytes=5 * MB, num_files=1000, free_files=10)
    assert room.short_of(5 * MB, 10) == ""
    assert room.short_of(6 * MB, 10) == "/d has 5 MB free, less than 6 MB"
    assert room.short_of(5 * MB, 11) == "/d has room for 10 more files, less than 11"
    without_number = FreeSpace(Path("/d"), num_bytes=1, free_bytes=1, num_files=0, free_files=0)
    assert without_number.short_of(1, 10) == ""


async def test_the_workers_own_temporary_directory_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    await check_temporary(0)
    full = FreeSpace(Path("/tmp"), num_bytes=100 * MB, free_bytes=4 * MB, num_files=0, free_files=0)
    monkeypatch.setattr(FreeSpace, "at", lambda place: full)
    await check_temporary(4 * MB)
    with pytest.raises(SandboxError, match=r"/tmp has 4 MB free, less than 5 MB \(SWERVE_MIN_FREE_BYTES\)"):
        await check_temporary(50 * MB)


async def test_claims_are_held_back_while_there_is_too_little_room(sandboxes: DockerSandboxes) -> None:
    sandboxes.disk = MORE_THAN_ANYBODY_HAS
    pool = HostPool([sandboxes], slots=4)
    (host,) = await pool.start()  # it answers
    assert "free, less than " in pool.paused
    assert "(SWERVE_MIN_FREE_BYTES)" in pool.paused
    assert pool.room(4) == 0
    sandboxes.disk = NOTHING
    await host.breaker.check()
    assert pool.room(4) == 1


async def test_of_a_remote_docker_host_nothing_is_known_and_nothing_held_back() -> None:
    async with relay() as one:
        there = DockerSandboxes(host=one.host, disk=MORE_THAN_ANYBODY_HAS)
        assert await there.api.data_root() is None
        await DiskWatch(there).check()
        await there.close()


async def test_one_file_is_bounded_at_once(sandbox: DockerSandbox) -> None:
    result = await sandbox.run(
        "ulimit -f unlimited; head -c 9000000 /dev/zero >big; stat -c %s big", timeout_s=240
    )
    assert result.output.splitlines()[-1] == b"8000000"
    assert b"File size limit exceeded" in result.output


@pytest.mark.slow
async def test_more_files_than_allowed_cost_what_runs_then_the_container(
    small: DockerSandboxes,
    sandbox: DockerSandbox,
    docker_client: docker.DockerClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk, "MEASURE_S", 0.0)
    watch = DiskWatch(small)
    await sandbox.run("head -c 7000000 /dev/zero >1", timeout_s=240)
    await watch.look()
    assert (await sandbox.run("head -c 2000000 /dev/zero >2", timeout_s=240)).exit_code == 0
    running = asyncio.create_task(sandbox.run("sleep 1000", timeout_s=240))
    await asyncio.to_thread(_until_runs, docker_client, sandbox.id, "sleep 1000")
    await watch.look()
    assert (await running).exit_code in KILLED
    assert (await sandbox.run("rm 1; sleep 0.2", timeout_s=240)).exit_code == 0
    await watch.look()
    await sandbox.run("for i in 3 4 5; do head -c 5000000 /dev/zero >$i; done", timeout_s=240)
    await watch.look()
    with pytest.raises(SandboxError):
        await sandbox.run("true", timeout_s=240)


def _until_runs(client: docker.DockerClient, container: str, command: str) -> None:
    """Return once a process of this command line is in the container."""
    while not any(command in " ".join(row) for row in client.api.top(container, "-eo pid,args")["Processes"]):
        time.sleep(0.1)


async def test_whose_container_was_ended_is_told_why(
    small: DockerSandboxes, repo_image: RepoImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MEASURE_S", 0.0)

    async def episode() -> None:
        async with small.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
            await sandbox.run("for i in 1 2 3; do head -c 7000000 /dev/zero >$i; done", timeout_s=240)
            await DiskWatch(small).look()
            await sandbox.run("true", timeout_s=240)

    with pytest.raises(SandboxError, match=r"removed: it wrote 21 MB, more than twice 8 MB \(SWERVE_MAX_W"):
        await episode()


async def test_containers_are_measured_as_fast_as_free_space_goes(
    small: DockerSandboxes, sandbox: DockerSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LOOK_S", 0.05)
    watching = asyncio.create_task(DiskWatch(small).watch())
    # Slowly from the limit on, because the container is removed at twice the limit.
    fill = "while :; do i=$((i + 1)); head -c 1000000 /dev/zero >$i; sleep $((i > 8)).2; done"
    result = await sandbox.run(fill, timeout_s=240)
    assert result.exit_code in KILLED
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_every_episode_is_ended_before_the_host_is_full(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    watch = DiskWatch(sandboxes)

    async def episode() -> None:
        async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
            await watch.look()
            assert (await sandbox.run("echo alive", timeout_s=240)).output == b"alive\n"
            sandboxes.disk = MORE_THAN_ANYBODY_HAS
            await watch.look()
            await sandbox.run("true", timeout_s=240)

    with pytest.raises(SandboxError, match=r"has .* free, less than .*: every container here was removed"):
        await episode()


async def test_where_free_space_cannot_be_seen_the_clock_says_when_to_measure(
    sandboxes: DockerSandboxes, repo_image: RepoImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "UNSEEN_MEASURE_S", 0.0)
    limits = DiskSettings(min_free_bytes=0, max_written_bytes=MB)

    async def episode(there: DockerSandboxes) -> None:
        async with there.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
            await sandbox.run("for i in 1 2 3; do head -c 800000 /dev/zero >$i; done", timeout_s=240)
            await DiskWatch(there).look()
            await sandbox.run("true", timeout_s=240)

    async with relay() as one:
        there = DockerSandboxes(fleet=sandboxes.fleet, host=one.host, disk=limits)
        with pytest.raises(SandboxError, match=r"it wrote 2\.4 MB"):
            await episode(there)
        await there.close()
