"""Chooses the image for an agent's container, so that nothing in it reveals the answer.

Usually that is the task's own image: the first container of a task in this process is searched, and if it is clean, later ones need no
search. Otherwise the image is cleaned, once per Docker host, under a tag that depends on its source and on how it was cleaned, so that
workers find each other's.  Each cleaned image is searched again before the first agent of this process gets a container of it. The grader
always uses the task's own image.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal, Protocol

import msgspec

from pipeline.errors import ImageMissing, SandboxError
from pipeline.request import Claim
from pipeline.task import Task
from pipeline.telemetry import span
from workers.docker.host import AGENT_IMAGE, SOURCE
from workers.leaks.find import Leak, cleaning, find_leaks, hiding
from workers.sandbox.git import CONFIGURE_AGENT, START, StartState
from workers.sandbox.protocol import Sandbox
from workers.sandbox.setup import is_exact, set_up

REPOSITORY = "swerve/agent"
CLEAN_S = 1800.0  # cleaning packs the repository's history again
HIDE_S = 60.0

logger = logging.getLogger(__name__)


class StillLeaks(SandboxError):
    """The image cannot be cleaned, so no agent may get it."""

    transient = False

    def __init__(self, task: Task, leaks: list[Leak]) -> None:
        found = "; ".join(map(str, leaks))
        super().__init__(f"{task.image}, cleaned for {task.id}, still gives the answer away: {found}")


class Start(Protocol):
    """Starts a container of `image` for the claim's task: for an agent, or for cleaning."""

    def __call__(
        self, claim: Claim, role: Literal["agent", "clean"], image: str
    ) -> contextlib.AbstractAsyncContextManager[Sandbox]: ...


class ImageStore(Protocol):
    """The store of images. Raises SandboxError."""

    async def inspect_image(self, image: str) -> dict[str, Any]:
        """Its "Id" and "Config". Raises ImageMissing."""
        ...

    async def commit(
        self, name: str, image: str, config: Mapping[str, Any], labels: Mapping[str, str]
    ) -> None:
        """Makes `image` from the files of container `name`, with the configuration `config`."""
        ...


class AgentImages:
    """The images for agents' containers of this process.

    We assume that a tag means the same image for as long as the process lives.
    """

    def __init__(self, store: ImageStore, start: Start) -> None:
        self._store = store
        self._start = start
        self._images: dict[str, str] = {}  # keys are those of `_key`
        self._building: dict[str, asyncio.Lock] = {}

    @contextlib.asynccontextmanager
    async def open(self, claim: Claim) -> AsyncGenerator[Sandbox, None]:
        """A container that is set up and does not reveal the answer.

        Raises ImageMissing, SandboxError, StillLeaks, TaskBroken.
        """
        async with contextlib.AsyncExitStack() as stack:
            yield (
                await self._from_known(claim, stack)
                or await self._from_source(claim, stack)
                or await self._from_cleaned(claim, stack)
            )

    async def _from_known(self, claim: Claim, stack: contextlib.AsyncExitStack) -> Sandbox | None:
        task = claim.request.task
        image = self._images.get(_key(task))
        if image is None:
            return None
        try:
            return await self._entered(claim, image, stack)
        except ImageMissing:
            if image == task.image:
                raise
            self._images.pop(_key(task), None)  # it was evicted
            return None

    async def _from_source(self, claim: Claim, stack: contextlib.AsyncExitStack) -> Sandbox | None:
        """A container of the task's own image; None if that image reveals something."""
        task = claim.request.task
        if task.setup_patch.strip():
            return None  # its history always gives the patch away
        async with contextlib.AsyncExitStack() as trial:
            sandbox = await self._entered(claim, task.image, trial)
            with span("search for leaks"):
                found = await find_leaks(sandbox, task, first_only=True)
            if found:
                return None
            self._images[_key(task)] = task.image
            stack.push_async_exit(trial.pop_all())
            return sandbox

    async def _from_cleaned(self, claim: Claim, stack: contextlib.AsyncExitStack) -> Sandbox:
        task = claim.request.task
        with span("clean image"):
            async with self._building.setdefault(_key(task), asyncio.Lock()):
                image = await self._cleaned(claim)
        sandbox = await self._entered(claim, image, stack)
        with span("search for leaks"):
            leaks = await find_leaks(sandbox, task)
        if leaks:
            raise StillLeaks(task, leaks)
        self._images[_key(task)] = image
        return sandbox

    async def _entered(self, claim: Claim, image: str, stack: contextlib.AsyncExitStack) -> Sandbox:
        """Starts a container of `image`, sets it up, removes the hidden paths, and reads the commit that it starts from."""
        task = claim.request.task
        sandbox = await stack.enter_async_context(self._start(claim, "agent", image))
        with span("set up"):
            if image == task.image:
                await set_up(sandbox, task)
            # After the setup, which is to find git as it does where the patch is graded.
            configuring = "" if is_exact(claim.request) else CONFIGURE_AGENT
            start = await sandbox.run(
                hiding(task) + configuring + START, timeout_s=HIDE_S, as_root=True
            )
        sandbox.start = StartState.read(start.output)
        return sandbox

    async def _cleaned(self, claim: Claim) -> str:
        """The tag of the cleaned image, which is made now unless it exists."""
        task = claim.request.task
        source = await self._store.inspect_image(task.image)
        image = f"{REPOSITORY}:{_hash(source['Id'], _key(task), cleaning(task))[:24]}"
        try:
            await self._store.inspect_image(image)
        except ImageMissing:
            logger.info("making %s, because %s gives answers away", image, task.image)
            await self._make(claim, image, source["Config"])
        return image

    async def _make(self, claim: Claim, image: str, config: dict[str, Any]) -> None:
        task = claim.request.task
        async with self._start(claim, "clean", task.image) as sandbox:
            await set_up(sandbox, task)
            result = await sandbox.run(cleaning(task), timeout_s=CLEAN_S, as_root=True)
            if result.exit_code != 0:
                tail = result.output[-500:].decode("utf-8", "replace").strip()
                raise SandboxError(f"cleaning {task.image} ended with status {result.exit_code}: {tail}")
            leaks = await find_leaks(sandbox, task)
            if leaks:
                raise StillLeaks(task, leaks)
            labels = {AGENT_IMAGE: "1", SOURCE: task.image}
            await self._store.commit(sandbox.id, image, config, labels)


def _key(task: Task) -> str:
    """A key that is equal for tasks that can share an agents' image."""
    return _hash(
        task.image,
        task.workdir,
        task.user,
        task.base_commit,
        *task.hidden_paths,
        task.setup_script,
        task.setup_patch.hex(),
        *(f"leaking {path}" for path in task.leaking_paths),
    )


def _hash(*words: str) -> str:
    return hashlib.sha256(msgspec.json.encode(words)).hexdigest()
