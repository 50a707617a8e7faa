"""Docker containers for the two roles of an episode: the agent's, and the grader's fresh one.

Four engine calls a container (create, attach, start, remove); a command costs none, it travels over the
attached stream (shell.py). Whatever happens to the caller, its container is removed; should the caller's process die, the
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
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, Literal, TypeVar

from msgspec.structs import replace

from pipeline import keys
from pipeline.errors import SandboxError, TaskBroken
from pipeline.request import Claim
from pipeline.task import File, Task
from workers.docker.host import DockerHost
from workers.leaks.agent_images import CLEAN_S, AgentImages
from workers.sandbox.command import CommandResult, LastResult
from workers.sandbox.containers import ATTEMPT, DEADLINE, FLEET, LEASE, REQUEST, ContainerSpec, Engine
from workers.sandbox.git import HEAD, diff_since
from workers.sandbox.holder import CPU_NANOSECONDS
from workers.sandbox.init import built_init
from workers.sandbox.setup import SETUP_S, environment, set_up
from workers.sandbox.shell import KILL, Shell
from workers.settings import DiskSettings, disk_settings, docker_host

Role = Literal["agent", "grade", "clean"]  # "clean": becomes an image that agents start from
T = TypeVar("T")

OUTPUT_KEEP_BYTES = 256 * 1024  # of each end of a command's output
NOTES_KEEP_BYTES = 16 * 1024 * 1024  # of each end of what came over the side channel
PATCH_KEEP_BYTES = 64 * 1024 * 1024  # a diff longer than this is cut, and so applies nowhere
ARCHIVE_FROM_BYTES = (
    64 * 1024
)  # through the shell a file costs 0.5 us a byte, an archive 35 ms of the engine's CPU
OPEN_S = 60.0
DIFF_S = 300.0
DEADLINE_GRACE_S = (
    300.0  # after the role's wall limit: the worker ends its containers itself, unless it is gone
)
HANG_UP_S = 0.5
REMOVAL_S = 8.0  # that an episode waits for the end of its container
REMOVAL_PAUSES_S = (0.0, 0.5, 2.0)

logger = logging.getLogger(__name__)


class DockerSandbox:
    """One running container. Made by DockerSandboxes.open."""

    def __init__(self, engine: Engine, name: str, shell: Shell, workdir: str) -> None:
        self.id = name
        self.head = ""  # commit that HEAD was at the start; "" outside a repository
        self._engine = engine
        self._shell = shell
        self.workdir = workdir  # absolute

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
            await self._engine.put_archive(self.id, _tar(files, self.workdir))
            return
        result = await self.run(_writing(files, self.workdir), timeout_s=OPEN_S, plain=True)
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
        self._removals: set[asyncio.Task[None]] = set()
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
        claim = replace(claim, request=replace(claim.request, task=await self.placed(claim.request.task)))
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

    async def placed(self, task: Task) -> Task:
        """`task` with its workdir: its own, else the WORKDIR of its image. Raises ImageMissing, SandboxError, TaskBroken."""
        if task.workdir:
            return task
        image = await self.engine.inspect_image(task.image)
        workdir = posixpath.normpath(image["Config"].get("WorkingDir") or "/")
        if workdir == "/":
            raise TaskBroken(
                f"workdir: {task.id} names none, and {task.image} has no WORKDIR: set the task's workdir to the"
                " repository's directory in the image (of a task directory, in its task.json)"
            )
        return replace(task, workdir=workdir)

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
        """Lets go of the engine, once what it was told to remove is gone or left to the reaper. Containers still open are not
        removed.
        """
        await asyncio.gather(*self._removals)
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
        spec = ContainerSpec(
            image=image,
            workdir=task.workdir,
            resources=task.resources,
            env=environment(task) if role != "clean" else {},  # which an image made of it would keep
            deadline_s=deadline_s,
            init_bytes=len(self._init),
            max_file_bytes=self.disk.max_written_bytes,
            labels=self._labels(claim, role, deadline_s),
        )
        await self.engine.create(name, spec)
        reader, writer = await self.engine.attach(name)
        return Shell(reader, writer, kill_all=functools.partial(self.engine.kill, name, KILL))

    async def _end(self, name: str, shell: Shell | None) -> None:
        """An engine cannot remove a container whose output has nowhere to go: who is not rid of it soon hangs up first.

        Nor does an episode wait for long: an engine that lost its containerd in the middle of a removal goes on about it for minutes.
        """
        removal = asyncio.create_task(self._remove(name))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        await asyncio.wait({removal}, timeout=HANG_UP_S)
        if shell is not None:
            await shell.close()
        await asyncio.wait({removal}, timeout=REMOVAL_S)

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
            LEASE: keys.lease(claim.request.id),
            "swerve.worker": claim.worker,
            "swerve.role": role,
            DEADLINE: str(int(time.time()) + deadline_s),
        }


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
