"""Docker containers as sandboxes: one for the agent of an episode, and a new one for its grader.

A container costs four calls to the Docker host (create, attach, start, remove). A command costs none, because it travels over the attached
stream (shell.py). A container is always removed, whatever happens to its caller. If the caller's process dies, the container ends with its
stream, at its deadline, or when an orphan is removed (hosts.py), whichever comes first.
"""

import asyncio
import contextlib
import functools
import io
import logging
import posixpath
import secrets
import tarfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from pipeline import keys
from pipeline.errors import HarnessError, ImageMissing, SandboxError, SandboxRuined, TaskBroken
from pipeline.request import Claim, RolloutRequest
from pipeline.task import File, Task
from pipeline.telemetry import span
from workers.docker.host import ATTEMPT, DEADLINE, FLEET, LEASE, REQUEST, ROLE, RUN, WORKER, DockerHost
from workers.harness.volumes import HarnessVolumes
from workers.leaks.agent_images import CLEAN_S, AgentImages
from workers.sandbox.containers import ContainerApi, ContainerSpec
from workers.sandbox.first_process import CPU_NANOSECONDS, built_init
from workers.sandbox.git import NOTHING_PRINTED, START, TRUST, TRUST_ALWAYS, StartState, ended
from workers.sandbox.protocol import (
    BUSY_FACTOR,
    OUTPUT_KEEP_BYTES,
    CannotWrite,
    CommandResult,
    LastResult,
    Misconfigured,
    PatchCheck,
    Role,
    Sandbox,
    is_starved,
)
from workers.sandbox.setup import SETUP_S, agent_environment, environment, set_up
from workers.sandbox.shell import KILL, ContainerShell, fits, writing
from workers.sandbox.users import READ_FILES, ROOT, look_up, normal
from workers.settings import RUNTIME_VARIABLE, DiskSettings, container_runtime, disk_settings, docker_host

ContainerRole = Role | Literal["clean"]
"""The purpose of a container. "clean": an image for agents is made of it."""

NOTES_KEEP_BYTES = 16 * 1024 * 1024  # bytes kept of each end of the side channel's content
PRINTED = "/swerve-git/printed"
# Bytes kept of each end of a diff. A longer one counts as empty, because without its middle it cannot be applied; encoding a diff holds up
# the event loop in proportion to its size.
PATCH_KEEP_BYTES = 16 * 1024 * 1024
# Larger files are sent as an archive: through the shell a file costs 0.5 us a byte, an archive 35 ms of the Docker host's CPU.
ARCHIVE_FROM_BYTES = 64 * 1024
OPEN_S = 60.0
DIFF_S = 300.0
# Time added to the role's wall limit: an agent's submission is checked, and its tree read, after that. The worker ends its containers
# itself, so only those of a dead worker reach it.
DEADLINE_GRACE_S = 300.0 + 2 * DIFF_S
HANG_UP_S = 0.5  # wait for a removal, before we close the container's stream
REMOVAL_S = 8.0  # longest time that an episode waits for the removal of its container
REMOVAL_PAUSES_S = (0.0, 0.5, 2.0)

logger = logging.getLogger(__name__)


class DockerSandbox:
    """One running container, a `protocol.Sandbox`. DockerSandboxes.open makes it."""

    def __init__(
        self, api: ContainerApi, name: str, shell: ContainerShell, *, image: str, workdir: str
    ) -> None:
        self.id = name
        self.image = image
        self.start = StartState("", 0)
        self.user = ROOT
        self._api = api
        self._shell = shell
        self._is_finishing = False
        self.workdir = workdir  # absolute

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        keep_bytes: int = OUTPUT_KEEP_BYTES,
        plain: bool = False,
        as_root: bool = False,
    ) -> CommandResult:
        return await self._shell.run(
            command, timeout_s=timeout_s, keep_bytes=keep_bytes, plain=plain, as_root=as_root
        )

    async def become(self, task: Task, *, home_is_given: bool) -> None:
        """Makes the task's user run the commands that are not ours, in its home unless the container's environment names one.

        Raises TaskBroken if the image has no such user, or nothing in it can leave root.
        """
        found = await self.run(READ_FILES, timeout_s=OPEN_S, plain=True)
        try:
            user = look_up(task.user, found.output)
        except ValueError as error:
            raise TaskBroken(
                f"user: {error}: add it to {task.image}, or set the user of {task.id} to one that it has"
            ) from error
        await self._shell.become(user, with_home=not home_is_given)
        tried = await self.run("true", timeout_s=OPEN_S)
        if tried.exit_code != 0:  # where the Docker host maps ids, it may have none for this user
            raise SandboxError(
                f"user: no command can run as {user.ids} on this Docker host: {tried.output[-300:]!r}"
            )
        self.user = user.ids

    async def finish(self, script: str, *, timeout_s: float, keep_bytes: int) -> LastResult:
        self._is_finishing = True
        watch = await self._api.watch(self.id)
        try:
            result = await self._shell.last(
                script, timeout_s=timeout_s, keep_bytes=keep_bytes, keep_notes_bytes=NOTES_KEEP_BYTES
            )
            status = await self._api.exit_status(self.id, watch)
        finally:
            watch.close()
        if result.exit_code not in (status, None):
            raise SandboxError(
                f"the container ended with status {status}, but its first process reported {result.exit_code}"
            )
        return result

    async def interrupt(self) -> None:
        await self._api.kill(self.id, KILL)

    def serve(
        self, port: int, protocol_factory: Callable[[], asyncio.Protocol]
    ) -> contextlib.AbstractAsyncContextManager[None]:
        return self._shell.serve(port, protocol_factory)

    async def diff(self) -> bytes:
        await self._shell.clear()
        result = await self._shell.run(
            self.start.difference, timeout_s=DIFF_S, keep_bytes=PATCH_KEEP_BYTES, plain=True
        )
        if result.exit_code is None and is_starved(result):
            raise SandboxError(f"git diff took longer than {DIFF_S:.0f} s on a machine without CPU for it")
        return result.output if result.exit_code == 0 and not result.dropped_bytes else b""

    async def check(self, printed: bytes) -> PatchCheck:
        await self._shell.clear()
        files = [File(path=PRINTED, content=ended(printed) if printed.strip() else b"")]
        # What the agent left in its place may be a directory, or a pipe that nobody reads.
        command = f"rm -rf {PRINTED}; {writing(files, self.workdir)} || exit\n{self.start.checking(PRINTED)}"
        if not fits(command):
            try:
                await self.put(files)
            except CannotWrite:
                return "unreadable"
            command = self.start.checking(PRINTED)
        result = await self.run(command, timeout_s=DIFF_S, plain=True)
        if result.exit_code is None and is_starved(result):
            raise SandboxError(f"git apply took longer than {DIFF_S:.0f} s on a machine without CPU for it")
        if result.exit_code == NOTHING_PRINTED:
            return "moved"
        return "unreadable" if printed.strip() and result.exit_code != 0 else ""

    async def put(self, files: Sequence[File]) -> None:
        if not files:
            return
        if sum(len(file.content) for file in files) <= ARCHIVE_FROM_BYTES:
            command = writing(files, self.workdir)
            if fits(command):
                await self._write(command, files)
                return
        try:
            await self._api.put_archive(self.id, _tar(files, self.workdir))
        except SandboxError as error:
            await self.run("true", timeout_s=OPEN_S)
            raise CannotWrite(str(error)) from error

    async def _write(self, command: str, files: Sequence[File]) -> None:
        result = await self.run(command, timeout_s=OPEN_S, plain=True)
        if result.exit_code != 0:
            raise CannotWrite(f"cannot write {[file.path for file in files]}: {result.output[-300:]!r}")

    async def export(self, write: Callable[[bytes], bool]) -> None:
        await self._api.export(self.id, write)

    async def cpu_s(self) -> float:
        """Reads the cgroup with a command. While another command runs or is about to, asks the Docker host, which takes about a second."""
        if self._shell.busy or self._is_finishing:
            return await self._api.cpu_s(self.id)
        result = await self.run(CPU_NANOSECONDS, timeout_s=OPEN_S, plain=True)
        if result.exit_code != 0:
            raise SandboxError(f"the container's cgroup cannot be read: {result.output[-300:]!r}")
        return int(result.output) / 1e9


class DockerSandboxes:
    """The containers of one process on one Docker host, by default that of DOCKER_HOST; a `protocol.Sandboxes`.

    `fleet` separates them from other fleets' containers on the same host, which are never touched. `max_starting` limits how many
    containers start at once: with more at once, a Docker host does not start more per second, and each only takes longer.
    """

    def __init__(
        self,
        *,
        max_starting: int = 4,
        fleet: str = "default",
        host: DockerHost | None = None,
        init: bytes | None = None,
        disk: DiskSettings | None = None,
        runtime: str | None = None,
    ) -> None:
        """`init` is the program that becomes the containers' first process: by default the one built on this host, none if empty.

        A value of None is taken from the environment's settings.
        """
        self.fleet = fleet
        self.host = host or docker_host()
        self.disk = disk or disk_settings()
        self.api = ContainerApi(self.host)
        self._init = built_init() if init is None else init
        self._runtime = container_runtime() if runtime is None else runtime
        self._runtime_found = not self._runtime
        self._agent_images = AgentImages(self.api, self._start)
        self._harnesses = HarnessVolumes(self.api)
        self._starting = asyncio.Semaphore(max_starting)
        self._open: set[str] = set()
        self._removals: set[asyncio.Task[None]] = set()
        self._configs: dict[str, dict[str, Any]] = {}  # by the image's name
        self._ended: dict[str, SandboxError] = {}  # why we removed a container that was in use, by its name

    async def check(self) -> None:
        await self.api.ping()
        if not self._runtime_found:
            known = await self.api.runtimes()
            if self._runtime not in known:
                raise Misconfigured(
                    f"{RUNTIME_VARIABLE}={self._runtime!r}: the Docker host at {self.host.url} does not know this runtime, "
                    f"only {', '.join(known)}; choose one of these or register it there"
                )
            self._runtime_found = True

    @contextlib.asynccontextmanager
    async def open(self, claim: Claim, *, role: Role) -> AsyncGenerator[Sandbox, None]:
        claim = replace(claim, request=replace(claim.request, task=await self.placed(claim.request.task)))
        if role == "agent":
            async with self._agent_images.open(claim) as sandbox:
                yield sandbox
            return
        task = claim.request.task
        async with self._start(claim, role, task.image) as sandbox:
            with span("set up"):
                await set_up(sandbox, task)
                trust = TRUST if sandbox.user == ROOT else TRUST_ALWAYS
                start = await sandbox.run(trust + START, timeout_s=OPEN_S, as_root=True)
            sandbox.start = StartState.read(start.output)
            yield sandbox

    async def placed(self, task: Task) -> Task:
        """`task` with its workdir and user: its own, otherwise those of its image. Raises ImageMissing, SandboxError, TaskBroken."""
        config = await self._config_of(task.image)
        workdir = task.workdir or posixpath.normpath(config.get("WorkingDir") or "/")
        if not task.workdir and workdir == "/":
            raise TaskBroken(
                f"workdir: {task.id} names none, and {task.image} has no WORKDIR: set the task's workdir to the"
                " repository's directory in the image (of a task directory, in its task.json)"
            )
        return replace(task, workdir=workdir, user=normal(task.user or config.get("User") or ""))

    async def _config_of(self, image: str) -> dict[str, Any]:
        """The run configuration of an image, whose name means the same image for as long as this process lives."""
        if image not in self._configs:
            with span("inspect image"):
                self._configs[image] = (await self.api.inspect_image(image))["Config"] or {}
        return self._configs[image]

    @contextlib.asynccontextmanager
    async def _start(
        self, claim: Claim, role: ContainerRole, image: str
    ) -> AsyncGenerator[DockerSandbox, None]:
        name = f"swerve-{role}-{secrets.token_hex(8)}"
        self._open.add(name)
        shell: ContainerShell | None = None
        with span("container", role=role, container=name):
            try:
                with span("container open"):
                    harness = claim.request.harness if role == "agent" else None
                    volume = await self._harnesses.ready(harness) if harness is not None else ""
                    async with self._starting:
                        shell = await self._prepare(claim, role, image, name, volume)
                        await self.api.start(name)
                        await shell.meet(self._init)
                task = claim.request.task
                sandbox = DockerSandbox(self.api, name, shell, image=image, workdir=task.workdir)
                if task.user != ROOT:
                    of_image = (await self._config_of(task.image)).get("Env") or ()
                    home_is_given = "HOME" in task.env or any(word.startswith("HOME=") for word in of_image)
                    await sandbox.become(task, home_is_given=home_is_given)
                yield sandbox
            except SandboxError as error:
                explained = await self._explained(name, error)
                if explained is error:
                    raise
                raise explained from error
            finally:
                with span("container close"):
                    await _uncancelled(self._end(name, shell))

    async def _explained(self, name: str, error: SandboxError) -> SandboxError:
        """`error`, or the reason why the container is gone, if it is known.

        The Docker host's report decides whether a process in it is at fault.
        """
        if name in self._ended:
            return self._ended[name]
        with contextlib.suppress(SandboxError):
            if not isinstance(error, ImageMissing | SandboxRuined) and await self.api.used_up_memory(name):
                return SandboxRuined("memory used up: the container's first process was killed")
        return error

    async def close(self) -> None:
        await asyncio.gather(*self._removals)
        await self.api.close()

    def is_open(self, name: str) -> bool:
        """Whether this process uses the container."""
        return name in self._open

    def open_names(self) -> list[str]:
        """Containers that this process uses."""
        return list(self._open)

    async def interrupt(self, name: str) -> None:
        """Kills the processes in the container; its user gets the result of a killed command. Raises SandboxError."""
        await self.api.kill(name, KILL)

    async def end(self, name: str, why: SandboxError) -> None:
        """Force-removes a container in use; its user gets `why`."""
        self._ended[name] = why
        logger.warning("removing container %s: %s", name, why)
        await self.api.remove(name)

    async def _prepare(
        self, claim: Claim, role: ContainerRole, image: str, name: str, volume: str
    ) -> ContainerShell:
        """Creates the container and attaches to it before it starts, so that no output is missed."""
        task = claim.request.task
        deadline_s = _deadline_s(claim, role)
        spec = ContainerSpec(
            image=image,
            workdir=task.workdir,
            resources=task.resources,
            env=_environment(claim.request, role),
            deadline_s=deadline_s,
            init_bytes=len(self._init),
            max_file_bytes=self.disk.max_written_bytes,
            runtime=self._runtime,
            labels=self._labels(claim, role, deadline_s),
            harness_volume=volume,
        )
        await self.api.create(name, spec)
        # Docker recreates a volume that was removed in between; nobody can remove a volume that a container uses.
        if volume and not await self._harnesses.is_the_same(volume):
            raise HarnessError(f"volume {volume} was removed while a container was created")
        reader, writer = await self.api.attach(name)
        return ContainerShell(reader, writer, kill_all=functools.partial(self.api.kill, name, KILL))

    async def _end(self, name: str, shell: ContainerShell | None) -> None:
        """Remove the container.

        Docker cannot remove a container whose attached stream is blocked, so the stream is closed after HANG_UP_S. The episode waits
        for REMOVAL_S at most: a Docker daemon that loses its containerd during a removal tries for minutes.
        """
        removal = asyncio.create_task(self._remove(name), name=f"remove container {name}")
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
                await self.api.remove(name)
                break
            except SandboxError as error:
                logger.warning("container %s was not removed, it ends at its deadline: %s", name, error)
        self._open.discard(name)
        self._ended.pop(name, None)

    def _labels(self, claim: Claim, role: ContainerRole, deadline_s: int) -> dict[str, str]:
        return {
            FLEET: self.fleet,
            RUN: claim.request.run_id,
            REQUEST: claim.request.id,
            ATTEMPT: str(claim.attempt),
            LEASE: keys.lease(claim.request.id),
            WORKER: claim.worker,
            ROLE: role,
            DEADLINE: str(int(time.time()) + deadline_s),
        }


def _environment(request: RolloutRequest, role: ContainerRole) -> Mapping[str, str | None]:
    match role:
        case "agent":
            return agent_environment(request)
        case "grade":
            return environment(request.task)
        case "clean":  # the image made of the container would keep them
            return {}


def _tar(files: Sequence[File], workdir: str) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for file in files:
            entry = tarfile.TarInfo(posixpath.join(workdir, file.path).lstrip("/"))
            entry.size, entry.mode, entry.mtime = len(file.content), file.mode, int(time.time())
            tar.addfile(entry, io.BytesIO(file.content))
    return archive.getvalue()


def _deadline_s(claim: Claim, role: ContainerRole) -> int:
    limits = claim.request.limits
    wall_s = {"agent": limits.wall_s, "grade": BUSY_FACTOR * limits.grade_wall_s, "clean": SETUP_S + CLEAN_S}
    return int(wall_s[role] + DEADLINE_GRACE_S)


async def _uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work` to its end even if the caller is cancelled in the meantime."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
