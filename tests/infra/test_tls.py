"""TLS to Redis and to Docker, with certificates of our own script and real servers that require them."""

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import docker
import pytest
import requests
from docker.utils import kwargs_from_env

from infra import processes
from pipeline import connection
from tests.conftest import free_ports

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "infra/cluster"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tls")
    make_certificates(out, "--server", "localhost,127.0.0.1", "--server", "elsewhere", "--client", "worker-7")
    return out


def make_certificates(out: Path, *flags: str) -> str:
    command = ["bash", str(CLUSTER / "make_certificates.sh"), "--out", str(out), *flags]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return made.stdout


def serving_tls(port: int, certificates: Path, name: str, directory: Path) -> list[str]:
    """redis-server with the settings of a fleet's Redis; only the paths differ."""
    ours = {"ca-cert": "ca", "cert": "cert", "key": "key"}
    command = [
        "redis-server",
        str(CLUSTER / "redis_tls.conf"),
        "--dir",
        str(directory),
        "--tls-port",
        str(port),
    ]
    for flag, file in ours.items():
        command += [f"--tls-{flag}-file", str(certificates / name / f"{file}.pem")]
    return [*command, "--bind", "127.0.0.1", "--requirepass", "p@ss/word"]


@pytest.fixture(scope="module")
def tls_redis(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Two servers: one whose certificate names this host, and one with another host's."""
    with ExitStack() as cleanup:
        ports = dict(zip(("localhost", "elsewhere"), free_ports(2), strict=True))
        for name, port in ports.items():
            directory = tmp_path_factory.mktemp(f"redis-{name}")
            child = processes.start(
                f"redis of {name}",
                redis_in(serving_tls(port, certificates, name, directory)),
                log=directory / "log",
            )
            cleanup.callback(child.stop, grace_s=5)
            processes.wait_until(
                lambda port=port: listens(port), child=child, timeout_s=120, log=directory / "log"
            )
        yield ports


def redis_in(command: list[str]) -> list[str]:
    """From the root of the repository, where its settings include a file by a relative path."""
    return ["sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), *command]


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def address(port: int, certificates: Path, **changes: str | None) -> str:
    client = certificates / "worker-7"
    parameters: dict[str, str | None] = {
        "ssl_ca_certs": str(client / "ca.pem"),
        "ssl_certfile": str(client / "cert.pem"),
        "ssl_keyfile": str(client / "key.pem"),
    }
    given = "&".join(f"{name}={value}" for name, value in (parameters | changes).items() if value is not None)
    return f"rediss://:p%40ss%2Fword@localhost:{port}/0?{given}"


async def ping(url: str, patience_s: float = 30) -> bool:
    pool = await connection.connect(url, patience_s=patience_s)
    try:
        return bool(await pool.ping())
    finally:
        await pool.aclose()


async def test_redis_answers_a_client_with_a_certificate(
    tls_redis: dict[str, int], certificates: Path
) -> None:
    assert await ping(address(tls_redis["localhost"], certificates))


async def test_redis_refuses_a_client_without_a_certificate(
    tls_redis: dict[str, int], certificates: Path
) -> None:
    with pytest.raises(connection.RedisUnavailable):
        await ping(
            address(tls_redis["localhost"], certificates, ssl_certfile=None, ssl_keyfile=None), patience_s=0
        )


async def test_redis_refuses_a_client_without_tls(tls_redis: dict[str, int]) -> None:
    with pytest.raises(connection.RedisUnavailable):
        await ping(f"redis://localhost:{tls_redis['localhost']}/0", patience_s=0)


async def test_redis_refuses_a_certificate_of_another_authority(
    tls_redis: dict[str, int], certificates: Path, tmp_path: Path
) -> None:
    make_certificates(tmp_path, "--client", "worker-7")
    stranger = {
        "ssl_certfile": str(tmp_path / "worker-7/cert.pem"),
        "ssl_keyfile": str(tmp_path / "worker-7/key.pem"),
    }
    with pytest.raises(connection.RedisUnavailable):
        await ping(address(tls_redis["localhost"], certificates, **stranger), patience_s=0)


async def test_a_client_refuses_a_server_it_does_not_trust(
    tls_redis: dict[str, int], certificates: Path
) -> None:
    with pytest.raises(connection.RedisUnavailable, match="certificate verify failed"):
        await ping(address(tls_redis["localhost"], certificates, ssl_ca_certs=None), patience_s=0)


async def test_a_client_refuses_a_server_of_another_name(
    tls_redis: dict[str, int], certificates: Path
) -> None:
    with pytest.raises(connection.RedisUnavailable, match="Hostname mismatch"):
        await ping(address(tls_redis["elsewhere"], certificates), patience_s=0)
    assert await ping(address(tls_redis["elsewhere"], certificates, ssl_check_hostname="false"))


def test_certificates_that_are_good_are_kept(tmp_path: Path) -> None:
    make_certificates(tmp_path, "--server", "a,10.0.0.1", "--client", "c")
    before = (tmp_path / "a/cert.pem").read_bytes()
    assert make_certificates(tmp_path, "--server", "a,10.0.0.1", "--client", "c") == ""
    assert (tmp_path / "a/cert.pem").read_bytes() == before
    assert "for a,10.0.0.2" in make_certificates(tmp_path, "--server", "a,10.0.0.2")
    assert (tmp_path / "a/cert.pem").read_bytes() != before
    assert {path.name for path in tmp_path.rglob("*key.pem") if path.stat().st_mode & 0o077} == set()


def test_a_certificate_about_to_end_is_made_anew(tmp_path: Path) -> None:
    make_certificates(tmp_path, "--client", "c", "--days", "20")
    assert "for c" in make_certificates(tmp_path, "--client", "c")


@contextlib.asynccontextmanager
async def docker_behind_tls(folder: Path) -> AsyncIterator[int]:
    """A port that leads to this machine's dockerd, for clients with a certificate of our authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.verify_mode = ssl.CERT_REQUIRED

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        docker_reader, docker_writer = await asyncio.open_unix_connection("/var/run/docker.sock")
        with contextlib.suppress(OSError):
            await asyncio.gather(copy(reader, docker_writer), copy(docker_reader, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()
    sink.close()


def docker_version(port: int, folder: Path) -> str:
    """Requested as on a worker host with DOCKER_HOST, DOCKER_TLS_VERIFY and DOCKER_CERT_PATH."""
    environment = {
        "DOCKER_HOST": f"tcp://localhost:{port}",
        "DOCKER_TLS_VERIFY": "1",
        "DOCKER_CERT_PATH": str(folder),
    }
    with contextlib.closing(
        docker.APIClient(**kwargs_from_env(environment=environment), version="1.41")
    ) as client:
        client.trust_env = False  # otherwise REQUESTS_CA_BUNDLE overrides Docker's own
        return client.version()["Version"]


@pytest.mark.docker
async def test_docker_behind_tls_takes_the_same_certificates(certificates: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path, "--client", "worker-7")
    shutil.copy(certificates / "ca.pem", tmp_path / "worker-7/ca.pem")
    async with docker_behind_tls(certificates / "localhost") as port:
        assert await asyncio.to_thread(docker_version, port, certificates / "worker-7")
        with pytest.raises((requests.RequestException, docker.errors.DockerException)):
            await asyncio.to_thread(docker_version, port, tmp_path / "worker-7")
