"""The calls to a Docker host about containers, and the configuration with which containers are created.

Every failed call raises SandboxError, or ImageMissing.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import requests
from docker import errors as docker_errors
from docker.types import Mount, Ulimit

from pipeline.errors import SandboxError
from pipeline.harness import HARNESS_DIR
from pipeline.task import Resources
from workers.docker.client import ANSWER_S, Client, Streams, attach, docker_client, sandbox_error, translated
from workers.docker.host import FLEET, DockerHost
from workers.sandbox.first_process import HOLDER
from workers.sandbox.shell import KILL, READ_BYTES

T = TypeVar("T")

CALL_S = 120
REMOVED_S = 10  # limit of the wait for a removal that has already begun
NUM_THREADS = 8
CONFLICT = 409  # HTTP status
EXPORT_BYTES = 1024 * 1024  # size of a part of an archive
ENDING_S = 10.0  # limit for the Docker host to report the end of a container, which it already knows
# Actions in the events of Docker and of Podman.
ENDED, FROM_OUTSIDE = ("die", "died"), ("kill", "stop", "restart")
GONE = ("destroy", "remove")
KILL_SIGNALS = (KILL, str(signal.Signals[KILL].value))
SHM_BYTES = 64 * 1024 * 1024  # Docker's own default

# Root needs these to work with files of any owner, to become another user as some test suites do, and to kill that user's processes.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID", "SETGID", "KILL")


class ContainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration with which a container is created."""

    image: str
    workdir: str
    resources: Resources
    env: Mapping[str, str | None]  # None: a variable of the image that the container does not get
    deadline_s: int  # the container's first process ends it after this time
    init_bytes: int  # length of the program that the first process receives and then executes; 0: none
    max_file_bytes: int  # no file can grow longer; 0: no limit
    runtime: str  # container runtime by its name on the Docker host; "": the host's default
    labels: Mapping[str, str]
    harness_volume: str = ""  # volume with the agent program, mounted read-only; "": none


class ContainerApi:
    """The calls, each in one of NUM_THREADS threads of its own."""

    def __init__(self, host: DockerHost) -> None:
        self._host = host
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="docker")
        self._connecting = threading.Lock()
        self._client: Client | None = None
        self._data_root: Path | None = None

    async def ping(self) -> None:
        """Raises SandboxError unless the Docker host answers and, if it is Docker's own daemon, reaches its containerd."""
        # Another thread asks, with a shorter timeout, because all of ours may be waiting for a host that hangs.
        with translated("connecting to the Docker host", sandbox_error):
            version = await asyncio.to_thread(self._ask, _version)
        components = {component["Name"] for component in version.get("Components", ())}
        if "Engine" in components and "containerd" not in components:
            raise SandboxError(
                "the Docker host answers but its containerd does not, so no container can start"
            )

    async def runtimes(self) -> list[str]:
        """Names of the container runtimes that are registered with the Docker host."""
        info = await self.call("asking the Docker host for its runtimes", lambda client: client.info())
        return sorted(info["Runtimes"])

    async def create(self, name: str, spec: ContainerSpec) -> None:
        """Create a container without starting it. Raises ImageMissing; never pulls."""
        await self.call(
            f"creating a container of {spec.image}",
            lambda client: client.create_container_from_config(_config(client, spec), name),
        )

    async def inspect_image(self, image: str) -> dict[str, Any]:
        """The Docker host's description of `image`. Raises ImageMissing."""
        return await self.call(f"inspecting {image}", lambda client: client.inspect_image(image))

    async def commit(
        self, name: str, image: str, config: Mapping[str, Any], labels: Mapping[str, str]
    ) -> None:
        """Makes `image` from the files of container `name`, with the run configuration `config` of another image."""
        await self.call(f"making {image}", lambda client: _commit(client, name, image, config, labels))

    async def attach(self, name: str) -> Streams:
        """The container's standard streams; its output comes in Docker's frames."""
        return await attach(self._host, name, read_bytes=READ_BYTES)

    async def start(self, name: str) -> None:
        await self.call(f"starting {name}", lambda client: client.start(name))

    async def kill(self, name: str, signal: str) -> None:
        await self.call(f"signalling {name}", lambda client: client.kill(name, signal))

    async def watch(self, name: str) -> requests.Response:
        """Start waiting for the end of container `name`; `exit_status` reads the response. The caller closes it."""
        return await self.call(f"watching {name}", lambda client: _wait_for_exit(client, name))

    async def exit_status(self, name: str, watch: requests.Response) -> int:
        """The exit status of container `name`, once it has ended."""
        answer = await self.call(f"waiting for the end of {name}", lambda _: watch.json())
        return answer["StatusCode"]

    async def used_up_memory(self, name: str) -> bool:
        """Whether container `name` has ended because it used up its memory, according to the Docker host.

        Nothing in the container can forge or hide these events. A container that was also killed, stopped or removed through the Docker
        host does not count as having ended by itself.
        """
        events = await self.call(f"asking how {name} ended", lambda client: _events(client, name))
        seen = {event["Action"] for event in events if not _is_ours(event)}
        return "oom" in seen and not seen.isdisjoint(ENDED) and seen.isdisjoint(FROM_OUTSIDE)

    async def put_archive(self, name: str, tar: bytes) -> None:
        await self.call(f"writing files to {name}", lambda client: client.put_archive(name, "/", tar))

    async def export(self, name: str, write: Callable[[bytes], bool]) -> None:
        """Passes all files of the container to `write` as a tar archive, piece by piece in one of the API's threads, until it returns
        False.
        """
        await self.call(f"exporting {name}", lambda client: _export(client, name, write))

    async def cpu_s(self, name: str) -> float:
        stats = await self.call(
            f"measuring {name}", lambda client: client.stats(name, stream=False, one_shot=True)
        )
        return stats["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9

    async def labelled(self, fleet: str | None) -> list[tuple[str, dict[str, str]]]:
        """Name and labels of each container of `fleet`, or of any fleet if None, running or not.

        A container whose removal was interrupted, for example because the Docker daemon was killed, has no name: its id is used instead.
        """
        label = FLEET if fleet is None else f"{FLEET}={fleet}"
        found = await self.call(
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
        """The directory in which the Docker host keeps the files of containers; None if this machine cannot see it."""
        if self._host.socket_path and self._data_root is None:
            info = await self.call("asking the Docker host for its data root", lambda client: client.info())
            self._data_root = Path(info["DockerRootDir"])
        root = self._data_root
        return root if root is not None and root.is_dir() else None

    async def written_bytes(self, names: Sequence[str]) -> dict[str, int]:
        """Bytes that each of these running containers has written on top of its image. The Docker host walks their files."""
        found = await self.call(
            "measuring containers",
            lambda client: client.containers(size=True, filters={"name": list(names)}),
        )
        return {name.removeprefix("/"): one.get("SizeRw", 0) for one in found for name in one["Names"] or ()}

    async def remove(self, name: str) -> None:
        """Kills and removes container `name` with its volumes. It is not an error if the container is gone already."""
        await self.call(f"removing {name}", lambda client: _remove(client, name))

    async def close(self) -> None:
        if self._client is not None:
            self._client.close()
        await asyncio.to_thread(self._threads.shutdown)

    async def call(self, doing: str, ask: Callable[[Client], T]) -> T:
        """Returns the result of `ask`, which is called in one of the API's threads. `doing` begins the text of the error.

        The answer is awaited even when cancelled, so that a removal cannot overtake a creation.
        """
        answer = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, ask)
        with translated(doing, sandbox_error):
            try:
                return await asyncio.shield(answer)
            except asyncio.CancelledError:
                await asyncio.wait({answer})
                answer.exception()
                raise

    def _ask(self, ask: Callable[[Client], T]) -> T:
        with self._connecting:
            if self._client is None:
                self._client = docker_client(self._host, timeout_s=CALL_S, num_connections=NUM_THREADS)
        return ask(self._client)


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
        runtime=spec.runtime or None,
        network_mode="bridge" if resources.network else "none",
        mem_limit=resources.memory_bytes,
        memswap_limit=resources.memory_bytes,
        cpu_period=100_000,
        # nano_cpus is not used: the Docker host refuses more of them than it has cores.
        cpu_quota=int(resources.cpus * 100_000),
        pids_limit=resources.pids,
        cap_drop=["ALL"],
        cap_add=list(CAPABILITIES),
        security_opt=["no-new-privileges"],
        ulimits=ulimits,
        shm_size=min(SHM_BYTES, resources.memory_bytes // 4),  # files there count as used memory
        log_config={"Type": "none"},
        mounts=[harness_mount(spec.harness_volume)] if spec.harness_volume else None,
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
        # The container gets the kernel's loopback interface only. With the network mode "none" alone, dockerd executes itself again for
        # each container to inspect a namespace that stays empty, which is half of a container's cost.
        network_disabled=not resources.network,
        stop_signal="SIGKILL",  # process 1 ignores others; a dockerd that was killed stops it when it starts again
        stdin_open=True,
        host_config=host_config,
    )


def harness_mount(volume: str) -> Mount:
    """The mount of `volume` in containers of agents: read-only, and never filled from the task's image."""
    return Mount(HARNESS_DIR, volume, type="volume", read_only=True, no_copy=True)


def _commit(
    client: Client, name: str, image: str, config: Mapping[str, Any], labels: Mapping[str, str]
) -> None:
    """Commits with a value for every field of `config`, since the Docker host fills missing ones from the container's own configuration."""
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


def _wait_for_exit(client: Client, name: str) -> requests.Response:
    """Waits for the exit. The Docker host sends the headers as soon as it watches the container, and the body when that has ended."""
    url = f"{client.base_url}/v{client.api_version}/containers/{name}/wait"
    answer = client.post(url, params={"condition": "next-exit"}, stream=True, timeout=CALL_S)
    answer.raise_for_status()
    return answer


def _export(client: Client, name: str, write: Callable[[bytes], bool]) -> None:
    url = f"{client.base_url}/v{client.api_version}/containers/{name}/export"
    with client.get(url, stream=True, timeout=CALL_S) as answer:
        answer.raise_for_status()
        for piece in answer.iter_content(EXPORT_BYTES):
            if not write(piece):
                return


def _events(client: Client, name: str) -> list[dict[str, Any]]:
    """The events of the container until it was gone, from the Docker host's buffer of events."""
    url = f"{client.base_url}/v{client.api_version}/events"
    params = {"since": "1", "filters": msgspec.json.encode({"container": [name]}).decode()}
    events: list[dict[str, Any]] = []
    with (
        contextlib.suppress(requests.ConnectionError, requests.Timeout),  # no further events arrive
        client.get(url, params=params, stream=True, timeout=ENDING_S) as answer,
    ):
        answer.raise_for_status()
        for line in answer.iter_lines(chunk_size=None):
            events.append(msgspec.json.decode(line))
            if events[-1]["Action"] in GONE:
                break
    return events


def _is_ours(event: dict[str, Any]) -> bool:
    """Whether the event is the signal with which we make the container's first process kill all others."""
    return event["Action"] == "kill" and event["Actor"]["Attributes"].get("signal") in KILL_SIGNALS


def _remove(client: Client, name: str) -> None:
    try:
        client.remove_container(name, v=True, force=True)
    except docker_errors.NotFound:
        return
    except docker_errors.APIError as error:
        if error.status_code != CONFLICT:
            raise
        # It ended by itself, and the Docker host is removing it already.
        with contextlib.suppress(docker_errors.NotFound):
            client.wait(name, timeout=REMOVED_S, condition="removed")
