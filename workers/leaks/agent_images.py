"""Finds what a container reveals of its task's answer, and chooses the image for an agent's container so that nothing in it does.

This is the only definition of such leaks, for opening sandboxes and for reports on images; the shell scripts beside this file do the work.
The agent may see the base commit and its history. Anything else that git holds may come from somebody who knew the answer: later commits,
other branches, remotes, reflogs, stashes, notes, other worktrees, unreachable objects. History may also contain hidden paths; and with a
setup patch, all history contains the code that the patch undoes.

Usually the image is the task's own: the first container of a task in this process is searched, and if it is clean, later ones need no
search. Otherwise the image is cleaned, once per Docker host, under a tag that depends on its source and on how it was cleaned, so that
workers find each other's. Each cleaned image is searched again before the first agent of this process gets a container of it. The grader
always uses the task's own image.
"""

import asyncio
import contextlib
import hashlib
import logging
import posixpath
import shlex
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from pipeline import diff
from pipeline.errors import ImageMissing, SandboxError, TaskBroken
from pipeline.request import Claim
from pipeline.task import Task
from pipeline.telemetry import span
from workers.docker.host import AGENT_IMAGE, SOURCE
from workers.sandbox.git import COMMIT_TREE, CONFIGURE_AGENT, GIT, START, StartState
from workers.sandbox.protocol import Sandbox
from workers.sandbox.setup import is_exact, set_up

CHECK_S = 900.0  # the search walks every object of the repository
# This is not a leak, but it would look like the agent's work; find.sh has the same word
UNCOMMITTED = "uncommitted"

_MARK = b"swerve-leak"  # find.sh has the same
_HERE = Path(__file__).parent
_TASK_PATHS = GIT + (_HERE / "task_paths.sh").read_text()
_FIND, _CLEAN, _BASE = ((_HERE / f"{name}.sh").read_text() for name in ("find", "clean", "base"))

REPOSITORY = "swerve/agent"
CLEAN_S = 1800.0  # cleaning packs the repository's history again
HIDE_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leak:
    """`kind` names the kind of leak in a few words, `detail` the individual leak."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})"


async def find_leaks(sandbox: Sandbox, task: Task, *, first_only: bool = False) -> list[Leak]:
    """The parts of the answer that an agent would find in this sandbox, and UNCOMMITTED changes. `first_only` stops at the first leak.

    Raises SandboxError if the search fails.
    """
    script = f"set -- {_words_of(task, first_only=first_only)}\n{_TASK_PATHS}{_FIND}"
    result = await sandbox.run(script, timeout_s=CHECK_S, as_root=True)
    if result.exit_code != 0:
        tail = result.output[-300:].decode("utf-8", "replace").strip()
        raise SandboxError(f"looking for leaks in {task.image} ended with status {result.exit_code}: {tail}")
    lines = (line.split(b"\t") for line in result.output.splitlines())
    return [
        Leak(line[1].decode(), b"\t".join(line[2:]).decode("utf-8", "replace"))
        for line in lines
        if line[0] == _MARK and len(line) > 2
    ]


def _hiding(task: Task) -> str:
    """The command that removes hidden paths from the work tree; "" if there are none."""
    if not _hidden(task):
        return ""
    return f"rm -rf -- {shlex.join(_hidden(task))}\n"


def cleaning(task: Task) -> str:
    """The command that removes what `find_leaks` finds, from a container that becomes an image. Status 0 means that it completed;
    `find_leaks` must check whether anything is left. Raises TaskBroken for a path that cannot be hidden.
    """
    return f"set -- {_words_of(task)}\n{_TASK_PATHS}{COMMIT_TREE}{_CLEAN}"


def listing_base(task: Task) -> str:
    """The command that lists what an agent may know; base.sh describes its output."""
    return f"set -- {shlex.join([task.base_commit, '', '', '0'])}\n{_TASK_PATHS}{_BASE}"


def _words_of(task: Task, *, first_only: bool = False) -> str:
    """The arguments of task_paths.sh, quoted. Raises TaskBroken for a path that cannot be hidden."""
    hidden = _hidden(task)
    cut = "1" if task.setup_patch.strip() else ""
    changed = [one.new for one in diff.sections(task.setup_patch) if one.new is not None]
    patched = [name.decode("utf-8", "surrogateescape") for name in changed]
    sources = [path for path in [*hidden, *patched] if path.endswith(".py")]
    return shlex.join([task.base_commit, cut, "1" if first_only else "", str(len(hidden)), *hidden, *sources])


def _hidden(task: Task) -> list[str]:
    """Hidden and leaking paths, relative to the workdir if inside it, otherwise absolute."""
    return [_placed(task, path) for path in (*task.hidden_paths, *task.leaking_paths)]


def _placed(task: Task, path: str) -> str:
    workdir = posixpath.normpath(task.workdir)
    full = posixpath.normpath(posixpath.join(workdir, path))
    relative = posixpath.relpath(full, workdir)
    holds_workdir = full == "/" or posixpath.commonpath([full, workdir]) == full
    if "\0" in path or not path.strip() or holds_workdir or relative.split("/")[0] == ".git":
        field = "hidden_paths" if path in task.hidden_paths else "leaking_paths"
        raise TaskBroken(f"{field} of {task.id}: {path!r} cannot be taken away")
    return full if relative.startswith("../") else relative


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
                _hiding(task) + configuring + START, timeout_s=HIDE_S, as_root=True
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
