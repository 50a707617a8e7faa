"""The calls that we make to a Docker engine, and what its containers are made as.

Everything the engine, its client or the socket can raise leaves here as a SandboxError.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import requests
import urllib3
from docker import errors as docker_errors
from docker.types import Ulimit

from pipeline.errors import ImageMissing, SandboxError
from pipeline.task import Resources
from workers.docker.client import ANSWER_S, Client, docker_client
from workers.docker.host import DockerHost
from workers.sandbox.attach import attach
from workers.sandbox.holder import HOLDER
from workers.sandbox.shell import READ_BYTES

T = TypeVar("T")

FLEET = "swerve.fleet"
REQUEST = "swerve.request"
ATTEMPT = "swerve.attempt"
LEASE = "swerve.lease"  # the key that holds it in Redis
DEADLINE = "swerve.deadline"

ENGINE_CALL_S = 120
REMOVED_S = 10  # that a removal under way may take
ENGINE_THREADS = 8
CONFLICT = 409  # HTTP status
SHM_BYTES = 64 * 1024 * 1024  # Docker's own default

# What root needs to work with files of any owner, to become another user as some test suites do, and to kill
# what that user runs.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID", "SETGID", "KILL")


class ContainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a container is made as."""

    image: str
    workdir: str
    resources: Resources
    env: Mapping[str, str]
    deadline_s: int  # after which its first process ends it
    init_bytes: int  # length of the program that it receives and becomes; 0: none
    max_file_bytes: int  # no file grows longer; 0: no bound
    labels: Mapping[str, str]


class Engine:
    """The engine calls that we make, each in a thread of our own; the one place where Docker's errors become
    ours.
    """

    def __init__(self, host: DockerHost) -> None:
        self._host = host
        self._threads = ThreadPoolExecutor(ENGINE_THREADS, thread_name_prefix="docker")
        self._connecting = threading.Lock()
        self._client: Client | None = None
        self._data_root: Path | None = None

    async def ping(self) -> None:
        """Raises SandboxError unless the engine answers and, where it is Docker's, has its containerd."""
        # Not behind calls that an engine which hangs has not answered, and not for as long as they may take.
        with _translated("asking the engine"):
            version = await asyncio.to_thread(self._asked, _version)
        components = {component["Name"] for component in version.get("Components", ())}
        if "Engine" in components and "containerd" not in components:
            raise SandboxError("the engine answers, its containerd does not: no container can be started")

    async def create(self, name: str, spec: ContainerSpec) -> None:
        """Creates it, to be started. Raises ImageMissing; never pulls."""
        await self._call(
            f"creating a container of {spec.image}",
            lambda client: client.create_container_from_config(_config(client, spec), name),
        )

    async def inspect_image(self, image: str) -> dict[str, Any]:
        """What the engine knows of `image`. Raises ImageMissing."""
        return await self._call(f"looking at {image}", lambda client: client.inspect_image(image))

    async def commit(
        self, name: str, image: str, config: Mapping[str, Any], labels: Mapping[str, str]
    ) -> None:
        """Tags the files of container `name` as `image`, to be run as `config`, another image's, says."""
        await self._call(f"making {image}", lambda client: _committed(client, name, image, config, labels))

    async def attach(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The container's standard streams; what it prints is framed."""
        return await attach(self._host, name, read_bytes=READ_BYTES)

    async def start(self, name: str) -> None:
        await self._call(f"starting {name}", lambda client: client.start(name))

    async def kill(self, name: str, signal: str) -> None:
        await self._call(f"signalling {name}", lambda client: client.kill(name, signal))

    async def watch(self, name: str) -> requests.Response:
        """The answer, still to come, to how `name` will have ended. To be closed."""
        return await self._call(f"watching {name}", lambda client: _awaited_exit(client, name))

    async def exit_status(self, name: str, watch: requests.Response) -> int:
        """Of a container that has ended."""
        answer = await self._call(f"asking how {name} ended", lambda _: watch.json())
        return answer["StatusCode"]

    async def put_archive(self, name: str, tar: bytes) -> None:
        await self._call(f"writing files to {name}", lambda client: client.put_archive(name, "/", tar))

    async def cpu_s(self, name: str) -> float:
        stats = await self._call(
            f"measuring {name}", lambda client: client.stats(name, stream=False, one_shot=True)
        )
        return stats["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9

    async def labelled(self, fleet: str | None) -> list[tuple[str, dict[str, str]]]:
        """Name and labels of each container of `fleet`, or of any fleet, running or not. One whose removal broke off,
        as with an engine that was killed, has no name any more, and goes by its id.
        """
        label = FLEET if fleet is None else f"{FLEET}={fleet}"
        found = await self._call(
            "listing containers", lambda client: client.containers(all=True, filters={"label": label})
        )
        return [
            (
                next(iter(container["Names"] or ()), "").removeprefix("/") or container["Id"],
                container["Labels"],
            )
            for container in found
        ]

    async def data_root(self) -> Path | None:
        """Where the engine keeps containers' files, if that can be seen from here."""
        if self._host.socket_path and self._data_root is None:
            info = await self._call("asking the engine", lambda client: client.info())
            self._data_root = Path(info["DockerRootDir"])
        root = self._data_root
        return root if root is not None and root.is_dir() else None

    async def written_bytes(self, names: Sequence[str]) -> dict[str, int]:
        """What each of these running containers has added to its image. The engine walks their files."""
        found = await self._call(
            "measuring containers",
            lambda client: client.containers(size=True, filters={"name": list(names)}),
        )
        return {name.removeprefix("/"): one.get("SizeRw", 0) for one in found for name in one["Names"] or ()}

    async def remove(self, name: str) -> None:
        """Kills and removes it, its volumes too; gone already is as good."""
        await self._call(f"removing {name}", lambda client: _removed(client, name))

    async def close(self) -> None:
        if self._client is not None:
            self._client.close()
        await asyncio.to_thread(self._threads.shutdown)

    async def _call(self, doing: str, ask: Callable[[Client], T]) -> T:
        """Waits for the answer even when cancelled, so that a removal cannot overtake a creation."""
        answer = asyncio.get_running_loop().run_in_executor(self._threads, self._asked, ask)
        with _translated(doing):
            try:
                return await asyncio.shield(answer)
            except asyncio.CancelledError:
                await asyncio.wait({answer})
                answer.exception()
                raise

    def _asked(self, ask: Callable[[Client], T]) -> T:
        with self._connecting:
            if self._client is None:
                self._client = docker_client(
                    self._host, timeout_s=ENGINE_CALL_S, num_connections=ENGINE_THREADS
                )
        return ask(self._client)


@contextlib.contextmanager
def _translated(doing: str) -> Generator[None]:
    try:
        yield
    except docker_errors.ImageNotFound as error:
        raise ImageMissing(f"{doing}: {error.explanation}") from error
    except (
        docker_errors.DockerException,
        requests.RequestException,
        urllib3.exceptions.HTTPError,
        OSError,
    ) as error:
        raise SandboxError(f"{doing}: {error}") from error


def _version(client: Client) -> dict[str, Any]:
    answer = client.get(f"{client.base_url}/version", timeout=ANSWER_S)
    answer.raise_for_status()
    return answer.json()


def _config(client: Client, spec: ContainerSpec) -> dict[str, Any]:
    ulimits = [Ulimit(name="core", soft=0, hard=0)]
    if spec.max_file_bytes:
        ulimits.append(Ulimit(name="fsize", soft=spec.max_file_bytes, hard=spec.max_file_bytes))
    resources = spec.resources
    host_config = client.create_host_config(
        auto_remove=True,
        network_mode="bridge" if resources.network else "none",
        mem_limit=resources.memory_bytes,
        memswap_limit=resources.memory_bytes,
        cpu_period=100_000,
        cpu_quota=int(resources.cpus * 100_000),  # nano_cpus would be refused above the host's count
        pids_limit=resources.pids,
        cap_drop=["ALL"],
        cap_add=list(CAPABILITIES),
        security_opt=["no-new-privileges"],
        ulimits=ulimits,
        shm_size=min(SHM_BYTES, resources.memory_bytes // 4),  # what lies there counts as memory used
        log_config={"Type": "none"},
    )
    return client.create_container_config(
        image=spec.image,
        entrypoint=["bash", "-p", "-c", HOLDER, "swerve"],
        command=[str(spec.deadline_s), spec.workdir, str(spec.init_bytes)],
        user="0:0",
        working_dir=spec.workdir,
        environment=dict(spec.env),
        labels=dict(spec.labels),
        healthcheck={"test": ["NONE"]},
        # The kernel's own loopback and nothing else. Under "none" alone the engine starts itself again for each
        # container, to have its network library look at a namespace that is to stay empty: half of a container's cost.
        network_disabled=not resources.network,
        stop_signal="SIGKILL",  # process 1 heeds no other, and an engine that was killed ends it before it answers
        stdin_open=True,
        host_config=host_config,
    )


def _committed(
    client: Client, name: str, image: str, config: Mapping[str, Any], labels: Mapping[str, str]
) -> None:
    """The engine fills what `config` leaves open from the container's own, which is not to be kept: nothing
    may be left open."""
    kept = {
        **config,
        "User": config.get("User") or "0:0",
        "WorkingDir": config.get("WorkingDir") or "/",
        "Entrypoint": config.get("Entrypoint") or [],
        "Cmd": config.get("Cmd") or (None if config.get("Entrypoint") else ["bash"]),
        "Healthcheck": config.get("Healthcheck") or {"Test": ["NONE"]},
    }
    container = client.inspect_container(name)
    kept["Labels"] = (
        dict.fromkeys(container["Config"]["Labels"], "") | (config.get("Labels") or {}) | dict(labels)
    )
    repository, _, tag = image.rpartition(":")
    client.commit(name, repository, tag, pause=False, conf=kept)


def _awaited_exit(client: Client, name: str) -> requests.Response:
    """The engine sends the headers as soon as it watches, the body at the end."""
    url = f"{client.base_url}/v{client.api_version}/containers/{name}/wait"
    answer = client.post(url, params={"condition": "next-exit"}, stream=True, timeout=ENGINE_CALL_S)
    answer.raise_for_status()
    return answer


def _removed(client: Client, name: str) -> None:
    try:
        client.remove_container(name, v=True, force=True)
    except docker_errors.NotFound:
        return
    except docker_errors.APIError as error:
        if error.status_code != CONFLICT:
            raise
        # It ended by itself, and the engine is at it already.
        with contextlib.suppress(docker_errors.NotFound):
            client.wait(name, timeout=REMOVED_S, condition="removed")
