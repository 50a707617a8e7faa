"""Which image an agent's container starts from, so that nothing in it gives the answer away.

Mostly the task's own: the first container of a task in a process is looked through, and if it is clean, that is
remembered, at no cost to any later one. Otherwise the image is cleaned once per engine and kept under a tag that names
its source and the way it was cleaned, so that workers find each other's. Every such image is looked through again
before this process hands out its first container. The grader always has the task's own image.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pipeline.errors import ImageMissing, SandboxError
from pipeline.request import Claim
from pipeline.task import Task
from workers.leaks.cleaning import cleaning
from workers.leaks.find import Leak, find_leaks, hiding
from workers.sandbox.git import HEAD
from workers.sandbox.setup import set_up

if TYPE_CHECKING:
    from workers.sandbox.containers import Engine
    from workers.sandbox.docker import DockerSandbox, Role

REPOSITORY = "swerve/agent"
AGENT_IMAGE = "swerve.agent-image"  # label, "1"
SOURCE = "swerve.source"  # label, the task's image
CLEAN_S = 1800.0  # packs the repository's history anew
HIDE_S = 60.0

logger = logging.getLogger(__name__)


class StillLeaks(SandboxError):
    """The image cannot be cleaned by us: no agent may see it."""

    transient = False

    def __init__(self, task: Task, leaks: list[Leak]) -> None:
        found = "; ".join(map(str, leaks))
        super().__init__(f"{task.image}, cleaned for {task.id}, still gives the answer away: {found}")


class Start(Protocol):
    """Starts a container of `image` for the claim's task."""

    def __call__(
        self, claim: Claim, role: "Role", image: str
    ) -> contextlib.AbstractAsyncContextManager["DockerSandbox"]: ...


class AgentImages:
    """The images that agents' containers of this process start from.

    A tag is taken to mean the same image for as long as the process lives.
    """

    def __init__(self, engine: "Engine", start: Start) -> None:
        self._engine = engine
        self._start = start
        self._images: dict[str, str] = {}  # by `_key`
        self._building: dict[str, asyncio.Lock] = {}

    def image(self, task: Task) -> str | None:
        """Where agents of `task` start from; None before the first."""
        return self._images.get(_key(task))

    @contextlib.asynccontextmanager
    async def open(self, claim: Claim) -> AsyncGenerator["DockerSandbox", None]:
        """A container that is set up and gives nothing away.

        Raises ImageMissing, SandboxError, StillLeaks, TaskBroken.
        """
        async with contextlib.AsyncExitStack() as stack:
            yield (
                await self._from_known(claim, stack)
                or await self._from_source(claim, stack)
                or await self._from_cleaned(claim, stack)
            )

    async def _from_known(self, claim: Claim, stack: contextlib.AsyncExitStack) -> "DockerSandbox | None":
        task = claim.request.task
        image = self.image(task)
        if image is None:
            return None
        try:
            return await self._entered(claim, image, stack)
        except ImageMissing:
            if image == task.image:
                raise
            self._images.pop(_key(task), None)  # evicted meanwhile
            return None

    async def _from_source(self, claim: Claim, stack: contextlib.AsyncExitStack) -> "DockerSandbox | None":
        """None if the task's own image gives something away."""
        task = claim.request.task
        if task.setup_patch.strip():
            return None  # its history always does
        async with contextlib.AsyncExitStack() as trial:
            sandbox = await self._entered(claim, task.image, trial)
            if await find_leaks(sandbox, task, first_only=True):
                return None
            self._images[_key(task)] = task.image
            stack.push_async_exit(trial.pop_all())
            return sandbox

    async def _from_cleaned(self, claim: Claim, stack: contextlib.AsyncExitStack) -> "DockerSandbox":
        task = claim.request.task
        async with self._building.setdefault(_key(task), asyncio.Lock()):
            image = await self._cleaned(claim)
        sandbox = await self._entered(claim, image, stack)
        leaks = await find_leaks(sandbox, task)
        if leaks:
            raise StillLeaks(task, leaks)
        self._images[_key(task)] = image
        return sandbox

    async def _entered(self, claim: Claim, image: str, stack: contextlib.AsyncExitStack) -> "DockerSandbox":
        """A container of `image`, set up, without what is to be hidden, its head read."""
        task = claim.request.task
        sandbox = await stack.enter_async_context(self._start(claim, "agent", image))
        if image == task.image:
            await set_up(sandbox, task)
        head = await sandbox.run(hiding(task) + HEAD, timeout_s=HIDE_S)
        sandbox.head = head.output.decode().strip() if head.exit_code == 0 else ""
        return sandbox

    async def _cleaned(self, claim: Claim) -> str:
        """The tag of the cleaned image, made now unless somebody has made it."""
        task = claim.request.task
        source = await self._engine.inspect_image(task.image)
        image = f"{REPOSITORY}:{_hash(source['Id'], _key(task), cleaning(task))[:24]}"
        try:
            await self._engine.inspect_image(image)
        except ImageMissing:
            logger.info("making %s of %s, which would give away answers", image, task.image)
            await self._make(claim, image, source["Config"])
        return image

    async def _make(self, claim: Claim, image: str, config: dict[str, Any]) -> None:
        task = claim.request.task
        async with self._start(claim, "clean", task.image) as sandbox:
            await set_up(sandbox, task)
            result = await sandbox.run(cleaning(task), timeout_s=CLEAN_S)
            if result.exit_code != 0:
                tail = result.output[-500:].decode("utf-8", "replace").strip()
                raise SandboxError(f"cleaning {task.image} ended with status {result.exit_code}: {tail}")
            leaks = await find_leaks(sandbox, task)
            if leaks:
                raise StillLeaks(task, leaks)
            labels = {AGENT_IMAGE: "1", SOURCE: task.image}
            await self._engine.commit(sandbox.id, image, config, labels)


def _key(task: Task) -> str:
    """Tells tasks apart that need an agent's image of their own."""
    return _hash(
        task.image,
        task.workdir,
        task.base_commit,
        *task.hidden_paths,
        task.setup_script,
        task.setup_patch.hex(),
    )


def _hash(*words: str) -> str:
    return hashlib.sha256(msgspec.json.encode(words)).hexdigest()
