"""Docker containers for the two roles of an episode: the agent's, and the grader's fresh one.

Four engine calls a container (create, attach, start, remove); a command costs none, it travels over the
attached stream (shell.py). Everything the engine, its client or the socket can raise leaves here as a
SandboxError. Whatever happens to the caller, its container is removed; should the caller's process die, the
container ends with its stream, at its deadline, or by the reaper, whichever is first.
"""

import asyncio
import base64
import contextlib
import functools
import io
import logging
import posixpath
import secrets
import shlex
import tarfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import requests
import urllib3
from docker import errors as docker_errors
from docker.types import Ulimit

from pipeline.errors import ImageMissing, SandboxError
from pipeline.request import Claim
from pipeline.task import File, Task
from workers.docker_client import ANSWER_S, Client, docker_client
from workers.docker_host import DockerHost
from workers.sandbox.agent_images import CLEAN_S, AgentImages
from workers.sandbox.attach import attach
from workers.sandbox.command import CommandResult, LastResult
from workers.sandbox.git import HEAD, diff_since
from workers.sandbox.holder import CPU_NANOSECONDS, HOLDER
from workers.sandbox.init import built_init
from workers.sandbox.setup import SETUP_S, environment, set_up
from workers.sandbox.shell import KILL, READ_BYTES, Shell
from workers.settings import DiskSettings, disk_settings, docker_host

Role = Literal["agent", "grade", "clean"]  # "clean": becomes an image that agents start from
T = TypeVar("T")

FLEET = "swerve.fleet"
REQUEST = "swerve.request"
ATTEMPT = "swerve.attempt"
DEADLINE = "swerve.deadline"

OUTPUT_KEEP_BYTES = 256 * 1024  # of each end of a command's output
NOTES_KEEP_BYTES = 16 * 1024 * 1024  # of each end of what came over the side channel
PATCH_KEEP_BYTES = 64 * 1024 * 1024  # a diff longer than this is cut, and so applies nowhere
ENGINE_CALL_S = 120
ENGINE_THREADS = 8
CONFLICT = 409  # HTTP status
ARCHIVE_FROM_BYTES = (
    64 * 1024
)  # through the shell a file costs 0.5 us a byte, an archive 35 ms of the engine's CPU
OPEN_S = 60.0
DIFF_S = 300.0
DEADLINE_GRACE_S = (
    300.0  # after the role's wall limit: the worker ends its containers itself, unless it is gone
)
SHM_BYTES = 64 * 1024 * 1024  # Docker's own default
HANG_UP_S = 0.5
REMOVAL_PAUSES_S = (0.0, 0.5, 2.0)

# What root needs to work with files of any owner, to become another user as some test suites do, and to kill
# what that user runs.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID", "SETGID", "KILL")

logger = logging.getLogger(__name__)


class DockerSandbox:
    """One running container. Made by DockerSandboxes.open."""

    def __init__(self, engine: "Engine", name: str, shell: Shell, workdir: str) -> None:
        self.id = name
        self.head = ""  # commit that HEAD was at the start; "" outside a repository
        self._engine = engine
        self._shell = shell
        self._workdir = workdir

    async def run(
        self, command: str, *, timeout_s: float, keep_bytes: int = OUTPUT_KEEP_BYTES, plain: bool = False
    ) -> CommandResult:
        """A fresh `bash -c command` in the workdir, stdin closed. Keeps `keep_bytes` of each end of the
        output.

        At `timeout_s` every process of the container but its holder is killed. Raises SandboxError if the
        container is gone or something survives. What a command leaves in the background lives on. A `plain`
        command, of less than 128 KiB, runs nothing that somebody may have put into the workdir: no
        environment file, no program on the PATH.
        """
        return await self._shell.run(command, timeout_s=timeout_s, keep_bytes=keep_bytes, plain=plain)

    async def finish(self, script: str, *, timeout_s: float, keep_bytes: int) -> LastResult:
        """Runs `bash script` in the workdir, stdin closed, and ends the container with its status.

        The status is the engine's word. Nothing that the script started is left when this returns or, at
        `timeout_s`, has to be killed. Raises SandboxError if the container was ended from outside.
        """
        watch = await self._engine.watch(self.id)
        try:
            result = await self._shell.last(
                script, timeout_s=timeout_s, keep_bytes=keep_bytes, keep_notes_bytes=NOTES_KEEP_BYTES
            )
            status = await self._engine.exit_status(self.id, watch)
        finally:
            watch.close()
        if result.exit_code not in (status, None):
            raise SandboxError(
                f"the container ended with status {status}, its holder with {result.exit_code}"
            )
        return result

    async def diff(self) -> bytes:
        """The workdir against the commit that it started from, untracked files included; ends what still runs
        in the container.

        Empty if the repository was broken so that git refuses: then there is no patch to speak of.
        """
        await self._shell.clear()
        result = await self._shell.run(
            diff_since(self.head), timeout_s=DIFF_S, keep_bytes=PATCH_KEEP_BYTES, plain=True
        )
        if result.exit_code is None:
            raise SandboxError(f"git diff took longer than {DIFF_S:.0f} s")
        return result.output if result.exit_code == 0 else b""

    async def put(self, files: Sequence[File]) -> None:
        """Writes `files` as root, their directories with them. Raises SandboxError if one cannot be."""
        if sum(len(file.content) for file in files) > ARCHIVE_FROM_BYTES:
            await self._engine.put_archive(self.id, _tar(files, self._workdir))
            return
        result = await self.run(_writing(files, self._workdir), timeout_s=OPEN_S, plain=True)
        if result.exit_code != 0:
            raise SandboxError(f"cannot write {[file.path for file in files]}: {result.output[-300:]!r}")

    async def cpu_s(self) -> float:
        """CPU time that the container has used, by its cgroup. While a command runs the engine is asked,
        which takes about a second.
        """
        if self._shell.busy:
            return await self._engine.cpu_s(self.id)
        result = await self.run(CPU_NANOSECONDS, timeout_s=OPEN_S, plain=True)
        if result.exit_code != 0:
            raise SandboxError(f"the container's cgroup cannot be read: {result.output[-300:]!r}")
        return int(result.output) / 1e9


class DockerSandboxes:
    """The containers of one process on one engine, `host` or else DOCKER_HOST.

    `max_starting` bounds how many start at once: an engine starts no more per second with more in flight,
    each only takes longer. `fleet` sets these containers apart from those of other fleets on the same engine,
    which the reaper must leave alone.
    """

    def __init__(
        self,
        *,
        max_starting: int = 4,
        fleet: str = "default",
        host: DockerHost | None = None,
        init: bytes | None = None,
        disk: DiskSettings | None = None,
    ) -> None:
        """`init`: the program that becomes the containers' first process, by default the one built on this
        host; none if empty.
        """
        self.fleet = fleet
        self.host = host or docker_host()
        self._init = built_init() if init is None else init
        self.disk = disk or disk_settings()
        self.engine = Engine(self.host)
        self.agent_images = AgentImages(self.engine, self._start)
        self._starting = asyncio.Semaphore(max_starting)
        self._open: set[str] = set()
        self._ended: dict[str, str] = {}  # why we took a container away from its episode

    async def check(self) -> None:
        """Raises SandboxError unless the engine answers."""
        await self.engine.ping()

    @contextlib.asynccontextmanager
    async def open(
        self, claim: Claim, *, role: Literal["agent", "grade"]
    ) -> AsyncGenerator[DockerSandbox, None]:
        """A fresh container of the claim's task, set up, removed at the end; the agent's holds no answers.

        Raises ImageMissing, SandboxError, TaskBroken.
        """
        if role == "agent":
            async with self.agent_images.open(claim) as sandbox:
                yield sandbox
            return
        task = claim.request.task
        async with self._start(claim, role, task.image) as sandbox:
            await set_up(sandbox, task)
            head = await sandbox.run(HEAD, timeout_s=OPEN_S)
            sandbox.head = head.output.decode().strip() if head.exit_code == 0 else ""
            yield sandbox

    @contextlib.asynccontextmanager
    async def _start(self, claim: Claim, role: Role, image: str) -> AsyncGenerator[DockerSandbox, None]:
        name = f"swerve-{role}-{secrets.token_hex(8)}"
        self._open.add(name)
        shell: Shell | None = None
        try:
            async with self._starting:
                shell = await self._prepare(claim, role, image, name)
                await self.engine.start(name)
                await shell.meet(self._init)
            yield DockerSandbox(self.engine, name, shell, claim.request.task.workdir)
        except SandboxError as error:
            if name in self._ended:
                raise SandboxError(f"the container was ended: {self._ended[name]}") from error
            raise
        finally:
            await _surely(self._end(name, shell))

    async def close(self) -> None:
        """Lets go of the engine. Containers still open are not removed."""
        await self.engine.close()

    def is_open(self, name: str) -> bool:
        """Whether this process itself holds the container."""
        return name in self._open

    def open_names(self) -> list[str]:
        """Containers that this process holds."""
        return list(self._open)

    async def interrupt(self, name: str) -> None:
        """Ends what runs in the container; whoever waits for it sees that it was killed. Raises SandboxError."""
        await self.engine.kill(name, KILL)

    async def end(self, name: str, why: str) -> None:
        """Takes a container away from whoever uses it, to whom it is a SandboxError that says `why`."""
        self._ended[name] = why
        logger.warning("container %s was ended: %s", name, why)
        await self.engine.remove(name)

    async def _prepare(self, claim: Claim, role: Role, image: str, name: str) -> Shell:
        """Creates the container and attaches to it, so that nothing it prints is missed."""
        task = claim.request.task
        deadline_s = _deadline_s(claim, role)
        await self.engine.create(
            name,
            task,
            image=image,
            env=environment(task) if role != "clean" else {},  # which an image made of it would keep
            deadline_s=deadline_s,
            init_bytes=len(self._init),
            max_file_bytes=self.disk.max_written_bytes,
            labels=self._labels(claim, role, deadline_s),
        )
        reader, writer = await self.engine.attach(name)
        return Shell(reader, writer, kill_all=functools.partial(self.engine.kill, name, KILL))

    async def _end(self, name: str, shell: Shell | None) -> None:
        """An engine cannot remove a container whose output has nowhere to go: who is not rid of it soon hangs up first."""
        removal = asyncio.create_task(self._remove(name))
        await asyncio.wait({removal}, timeout=HANG_UP_S)
        if shell is not None:
            await shell.close()
        await removal

    async def _remove(self, name: str) -> None:
        for pause_s in REMOVAL_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                await self.engine.remove(name)
                break
            except SandboxError as error:
                logger.warning("container %s is left to the reaper: %s", name, error)
        self._open.discard(name)
        self._ended.pop(name, None)

    def _labels(self, claim: Claim, role: Role, deadline_s: int) -> dict[str, str]:
        return {
            FLEET: self.fleet,
            "swerve.run": claim.request.run_id,
            REQUEST: claim.request.id,
            ATTEMPT: str(claim.attempt),
            "swerve.worker": claim.worker,
            "swerve.role": role,
            DEADLINE: str(int(time.time()) + deadline_s),
        }


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

    async def create(
        self,
        name: str,
        task: Task,
        *,
        image: str,
        env: Mapping[str, str],
        deadline_s: int,
        init_bytes: int,
        max_file_bytes: int,
        labels: Mapping[str, str],
    ) -> None:
        """A container of `image` as `task` wants it. Raises ImageMissing; never pulls."""
        await self._call(
            f"creating a container of {image}",
            lambda client: client.create_container_from_config(
                _config(client, task, image, env, (deadline_s, init_bytes), max_file_bytes, labels), name
            ),
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


def _config(
    client: Client,
    task: Task,
    image: str,
    env: Mapping[str, str],
    holding: tuple[int, int],
    max_file_bytes: int,
    labels: Mapping[str, str],
) -> dict[str, Any]:
    resources = task.resources
    deadline_s, init_bytes = holding
    ulimits = [Ulimit(name="core", soft=0, hard=0)]
    if max_file_bytes:
        ulimits.append(Ulimit(name="fsize", soft=max_file_bytes, hard=max_file_bytes))
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
        image=image,
        entrypoint=["bash", "-p", "-c", HOLDER, "swerve"],
        command=[str(deadline_s), task.workdir, str(init_bytes)],
        user="0:0",
        working_dir=task.workdir,
        environment=dict(env),
        labels=dict(labels),
        healthcheck={"test": ["NONE"]},
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
            client.wait(name, condition="removed")


def _tar(files: Sequence[File], workdir: str) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for file in files:
            entry = tarfile.TarInfo(posixpath.join(workdir, file.path).lstrip("/"))
            entry.size, entry.mode, entry.mtime = len(file.content), file.mode, int(time.time())
            tar.addfile(entry, io.BytesIO(file.content))
    return archive.getvalue()


def _writing(files: Sequence[File], workdir: str) -> str:
    steps: list[str] = []
    for file in files:
        path = posixpath.join(workdir, file.path)
        target = shlex.quote(path)
        steps.append(f"mkdir -p {shlex.quote(posixpath.dirname(path))}")
        steps.append(f"base64 -d >{target} <<<'{base64.b64encode(file.content).decode()}'")
        steps.append(f"chmod {file.mode:o} {target}")
    return " && ".join(steps)


def _deadline_s(claim: Claim, role: Role) -> int:
    limits = claim.request.limits
    wall_s = {"agent": limits.wall_s, "grade": limits.grade_wall_s, "clean": SETUP_S + CLEAN_S}
    return int(wall_s[role] + DEADLINE_GRACE_S)


async def _surely(work: Coroutine[Any, Any, None]) -> None:
    """Ends `work` although the caller be cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
