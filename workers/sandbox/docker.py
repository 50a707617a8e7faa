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
import os
import posixpath
import secrets
import shlex
import socket
import tarfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import docker
import requests
import urllib3
from docker import errors as docker_errors
from docker.types import Ulimit
from docker.utils import kwargs_from_env

from pipeline.errors import ImageMissing, SandboxError
from pipeline.request import Claim
from pipeline.task import File, Task
from workers.sandbox.command import CommandResult
from workers.sandbox.git import HEAD, diff_since
from workers.sandbox.shell import HOLDER, KILL, READ_BYTES, Shell

Role = Literal["agent", "grade"]
T = TypeVar("T")
Client = Any  # docker.APIClient, which has no types

FLEET = "swerve.fleet"
REQUEST = "swerve.request"
ATTEMPT = "swerve.attempt"
DEADLINE = "swerve.deadline"

OUTPUT_KEEP_BYTES = 256 * 1024  # of each end of a command's output
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
REMOVAL_PAUSES_S = (0.0, 0.5, 2.0)

# What root needs to work with files of any owner, to become another user as some test suites do, and to kill
# what that user runs.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID", "SETGID", "KILL")

# Nothing pages, draws progress bars or asks questions; a task's own environment goes on top.
ENVIRONMENT = {
    "PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_PAGER": "cat",
    "LESS": "-R",
    "GIT_TERMINAL_PROMPT": "0",
    "PIP_PROGRESS_BAR": "off",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "TQDM_DISABLE": "1",
    "DEBIAN_FRONTEND": "noninteractive",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}

CPU_NANOSECONDS = """
cd /sys/fs/cgroup
if [ -e cpuacct/cpuacct.usage ]; then read -r used <cpuacct/cpuacct.usage && echo "$used"
else read -r _ used <cpu.stat && echo "${used}000"; fi
"""

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
        self, command: str, *, timeout_s: float, keep_bytes: int = OUTPUT_KEEP_BYTES
    ) -> CommandResult:
        """A fresh `bash -c command` in the workdir, stdin closed. Keeps `keep_bytes` of each end of the
        output.

        At `timeout_s` every process of the container but its holder is killed. Raises SandboxError if the
        container is gone or something survives. What a command leaves in the background lives on.
        """
        return await self._shell.run(command, timeout_s=timeout_s, keep_bytes=keep_bytes)

    async def diff(self) -> bytes:
        """The workdir against the commit that it started from, untracked files included; ends what still runs
        in the container.

        Empty if the repository was broken so that git refuses: then there is no patch to speak of.
        """
        await self._shell.clear()
        result = await self._shell.run(diff_since(self.head), timeout_s=DIFF_S, keep_bytes=PATCH_KEEP_BYTES)
        if result.exit_code is None:
            raise SandboxError(f"git diff took longer than {DIFF_S:.0f} s")
        return result.output if result.exit_code == 0 else b""

    async def put(self, files: Sequence[File]) -> None:
        """Writes `files` as root, their directories with them. Raises SandboxError if one cannot be."""
        if sum(len(file.content) for file in files) > ARCHIVE_FROM_BYTES:
            await self._engine.put_archive(self.id, _tar(files, self._workdir))
            return
        result = await self.run(_writing(files, self._workdir), timeout_s=OPEN_S)
        if result.exit_code != 0:
            raise SandboxError(f"cannot write {[file.path for file in files]}: {result.output[-300:]!r}")

    async def cpu_s(self) -> float:
        """CPU time that the container has used, by its cgroup. While a command runs the engine is asked,
        which takes about a second.
        """
        if self._shell.busy:
            return await self._engine.cpu_s(self.id)
        result = await self.run(CPU_NANOSECONDS, timeout_s=OPEN_S)
        if result.exit_code != 0:
            raise SandboxError(f"the container's cgroup cannot be read: {result.output[-300:]!r}")
        return int(result.output) / 1e9


class DockerSandboxes:
    """The containers of one worker process.

    `max_starting` bounds how many start at once: an engine starts no more per second with more in flight,
    each only takes longer. `fleet` sets these containers apart from those of other fleets on the same engine,
    which the reaper must leave alone.
    """

    def __init__(self, *, max_starting: int = 4, fleet: str = "default") -> None:
        self.fleet = fleet
        self.engine = Engine()
        self._starting = asyncio.Semaphore(max_starting)
        self._open: set[str] = set()

    async def check(self) -> None:
        """Raises SandboxError unless the engine answers."""
        await self.engine.ping()

    @contextlib.asynccontextmanager
    async def open(self, claim: Claim, *, role: Role) -> AsyncGenerator[DockerSandbox, None]:
        """A fresh container of the claim's task, removed at the end. Raises ImageMissing, SandboxError."""
        name = f"swerve-{role}-{secrets.token_hex(8)}"
        self._open.add(name)
        shell: Shell | None = None
        try:
            async with self._starting:
                shell = await self._prepare(claim, role, name)
                await self.engine.start(name)
            sandbox = DockerSandbox(self.engine, name, shell, claim.request.task.workdir)
            head = await sandbox.run(HEAD, timeout_s=OPEN_S)
            sandbox.head = head.output.decode().strip() if head.exit_code == 0 else ""
            yield sandbox
        finally:
            await _surely(self._end(name, shell))

    async def close(self) -> None:
        """Lets go of the engine. Containers still open are not removed."""
        await self.engine.close()

    def is_open(self, name: str) -> bool:
        """Whether this process itself holds the container."""
        return name in self._open

    async def _prepare(self, claim: Claim, role: Role, name: str) -> Shell:
        """Creates the container and attaches to it, so that nothing it prints is missed."""
        deadline_s = _deadline_s(claim, role)
        await self.engine.create(
            name, claim.request.task, deadline_s=deadline_s, labels=self._labels(claim, role, deadline_s)
        )
        reader, writer = await self.engine.attach(name)
        return Shell(reader, writer, kill_all=functools.partial(self.engine.kill, name, KILL))

    async def _end(self, name: str, shell: Shell | None) -> None:
        await self._remove(name)
        if shell is not None:
            await shell.close()

    async def _remove(self, name: str) -> None:
        for pause_s in REMOVAL_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                await self.engine.remove(name)
                break
            except SandboxError as error:
                logger.warning("container %s is left to the reaper: %s", name, error)
        self._open.discard(name)

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

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(ENGINE_THREADS, thread_name_prefix="docker")
        self._connecting = threading.Lock()
        self._client: Client | None = None

    async def ping(self) -> None:
        await self._call("asking the engine", lambda client: client.ping())

    async def create(self, name: str, task: Task, *, deadline_s: int, labels: Mapping[str, str]) -> None:
        """Raises ImageMissing; never pulls."""
        await self._call(
            f"creating a container of {task.image}",
            lambda client: client.create_container_from_config(
                _config(client, task, deadline_s, labels), name
            ),
        )

    async def attach(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The container's standard streams; what it prints is framed."""
        streams: list[socket.socket] = []
        try:
            await self._call(f"attaching to {name}", lambda client: streams.append(_attached(client, name)))
            return await asyncio.open_connection(sock=streams[0], limit=READ_BYTES)
        except asyncio.CancelledError:
            for stream in streams:
                stream.close()
            raise

    async def start(self, name: str) -> None:
        await self._call(f"starting {name}", lambda client: client.start(name))

    async def kill(self, name: str, signal: str) -> None:
        await self._call(f"signalling {name}", lambda client: client.kill(name, signal))

    async def put_archive(self, name: str, tar: bytes) -> None:
        await self._call(f"writing files to {name}", lambda client: client.put_archive(name, "/", tar))

    async def cpu_s(self, name: str) -> float:
        stats = await self._call(
            f"measuring {name}", lambda client: client.stats(name, stream=False, one_shot=True)
        )
        return stats["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9

    async def labelled(self, fleet: str) -> list[tuple[str, dict[str, str]]]:
        """Name and labels of each container of `fleet`, running or not."""
        found = await self._call(
            "listing containers",
            lambda client: client.containers(all=True, filters={"label": f"{FLEET}={fleet}"}),
        )
        return [(container["Names"][0].removeprefix("/"), container["Labels"]) for container in found]

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
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await asyncio.wait({answer})
            answer.exception()
            raise
        except docker_errors.ImageNotFound as error:
            raise ImageMissing(f"{doing}: {error.explanation}") from error
        except (
            docker_errors.DockerException,
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            OSError,
        ) as error:
            raise SandboxError(f"{doing}: {error}") from error

    def _asked(self, ask: Callable[[Client], T]) -> T:
        with self._connecting:
            if self._client is None:
                self._client = docker.APIClient(
                    **kwargs_from_env(), timeout=ENGINE_CALL_S, max_pool_size=ENGINE_THREADS
                )
        return ask(self._client)


def _config(client: Client, task: Task, deadline_s: int, labels: Mapping[str, str]) -> dict[str, Any]:
    resources = task.resources
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
        ulimits=[Ulimit(name="core", soft=0, hard=0)],
        log_config={"Type": "none"},
    )
    return client.create_container_config(
        image=task.image,
        entrypoint=["bash", "-p", "-c", HOLDER, "swerve"],
        command=[str(deadline_s), task.workdir],
        user="0:0",
        working_dir=task.workdir,
        environment=ENVIRONMENT | task.env,
        labels=dict(labels),
        healthcheck={"test": ["NONE"]},
        stdin_open=True,
        host_config=host_config,
    )


def _attached(client: Client, name: str) -> socket.socket:
    """A duplicate of the hijacked connection, for the client's own is closed with its response."""
    if client.base_url.startswith(("https://", "http+docker://ssh")):
        raise docker_errors.DockerException(
            f"DOCKER_HOST is {client.base_url}: only unix:// and plain tcp:// are supported"
        )
    params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
    hijacked: Any = client.attach_socket(name, params)
    stream = socket.socket(fileno=os.dup(hijacked.fileno()))
    hijacked._response.close()
    stream.setblocking(False)
    return stream


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
    return int((limits.wall_s if role == "agent" else limits.grade_wall_s) + DEADLINE_GRACE_S)


async def _surely(work: Coroutine[Any, Any, None]) -> None:
    """Ends `work` although the caller be cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
