"""A container's stream is the same over a Unix socket, TCP and TLS; whom TLS does not trust, or who does not trust, gets nowhere."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import SandboxError
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.sandbox.relay import make_certificates, relay, server_context
from workers.docker.client import attach
from workers.docker.host import DockerHost
from workers.sandbox.docker import DockerSandboxes
from workers.settings import docker_host

pytestmark = pytest.mark.docker

READ_BYTES = 65536


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tls")
    make_certificates(out, "--server", "localhost", "--server", "elsewhere", "--client", "worker")
    return out


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by another authority."""
    out = tmp_path_factory.mktemp("strangers")
    make_certificates(out, "--server", "localhost", "--client", "worker")
    return out


@pytest.fixture(params=["unix", "tcp", "tls"])
async def host(request: pytest.FixtureRequest, certificates: Path) -> AsyncIterator[DockerHost]:
    match request.param:
        case "unix":
            yield docker_host()
        case "tcp":
            async with relay() as one:
                yield one.host
        case _:
            async with relay(server_context(certificates / "localhost")) as one:
                yield replace(one.host, certificates=certificates / "worker")


class Doubling(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self.transport, asyncio.Transport)
        self.transport.write(data + data)


@pytest.mark.slow_but_for("tcp")
async def test_an_episodes_containers_live_behind_any_kind_of_address(
    host: DockerHost, sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    there = DockerSandboxes(fleet=sandboxes.fleet, host=host)
    await there.check()
    async with there.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
        assert (await sandbox.run("cat calc.py", timeout_s=240)).output.startswith(b"def add")
        much = await sandbox.run("head -c 3000000 /dev/zero", timeout_s=240, keep_bytes=2_000_000)
        assert much.output == bytes(3_000_000)
        assert (await sandbox.run("echo begun; sleep 1000", timeout_s=0.5)).exit_code is None
        await sandbox.run(f"echo {'x' * 300_000} | wc -c >new", timeout_s=240)
        assert b"+300001" in await sandbox.diff()
        async with sandbox.serve(8123, Doubling):
            ask = "exec 5<>/dev/tcp/127.0.0.1/8123; head -c 300000 /dev/zero >&5; head -c 600000 <&5"
            asked = await sandbox.run(ask, timeout_s=240, keep_bytes=500_000)
            assert asked.output == bytes(600_000)
    async with there.open(make_claim(make_task(repo_image.tag)), role="grade") as sandbox:
        await sandbox.run("echo 'echo log; exit 3' >/script", timeout_s=240)
        last = await sandbox.finish("/script", timeout_s=240, keep_bytes=1000)
        assert (last.exit_code, last.output) == (3, b"log\n")
    await there.close()


async def test_what_is_not_there_is_said_in_dockers_words(host: DockerHost) -> None:
    with pytest.raises(SandboxError, match=r"attaching to nobody at .*404.*No such container: nobody"):
        await attach(host, "nobody", read_bytes=READ_BYTES)


async def refusal(host: DockerHost) -> str:
    """What both ways to the Docker host say: that of calls, and that of streams."""
    sandboxes = DockerSandboxes(host=host)
    with pytest.raises(SandboxError) as call:
        await sandboxes.check()
    await sandboxes.close()
    with pytest.raises(SandboxError) as stream:
        await attach(host, "any", read_bytes=READ_BYTES)
    return f"{call.value}\n{stream.value}"


async def test_a_docker_host_of_another_authority_is_not_trusted(certificates: Path, strangers: Path) -> None:
    async with relay(server_context(strangers / "localhost")) as one:
        said = await refusal(replace(one.host, certificates=certificates / "worker"))
    assert said.count("certificate verify failed") == 2


async def test_a_docker_host_of_another_name_is_not_trusted(certificates: Path) -> None:
    async with relay(server_context(certificates / "elsewhere")) as one:
        said = await refusal(replace(one.host, certificates=certificates / "worker"))
    assert said.count("Hostname mismatch") == 2


async def test_a_worker_of_another_authority_is_turned_away(
    certificates: Path, strangers: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(strangers / "worker", tmp_path / "worker")
    shutil.copy(certificates / "worker/ca.pem", folder)
    async with relay(server_context(certificates / "localhost")) as one:
        await refusal(replace(one.host, certificates=folder))
        await refusal(one.host)


async def test_without_verification_any_docker_host_will_do_that_takes_our_certificate(
    certificates: Path, strangers: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(certificates / "worker", tmp_path / "worker")
    shutil.copy(strangers / "worker/ca.pem", folder)
    async with relay(server_context(certificates / "localhost")) as one:
        with pytest.raises(SandboxError, match=r"No such container"):
            await attach(
                replace(one.host, certificates=folder, verify=False), "nobody", read_bytes=READ_BYTES
            )


async def test_nobody_at_the_address_is_a_sandbox_error(tmp_path: Path) -> None:
    async with relay() as one:
        gone = one.host
    for host in (gone, DockerHost(f"unix://{tmp_path}/no.sock")):
        with pytest.raises(SandboxError, match="attaching to any at"):
            await attach(host, "any", read_bytes=READ_BYTES)
