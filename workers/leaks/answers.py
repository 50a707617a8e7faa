"""Searches for the answer itself in everything that an agent could read: in the problem statement, and in all files of its image.

agent_images.py checks what git may contain besides the base commit, and is fast enough for every episode. This module is for
`workers.verify`, which records the results, and for `workers.leaks`.
"""

import asyncio
import atexit
import contextlib
import re
import socket
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import SandboxError
from pipeline.task import Task
from pipeline.taskfile import Gold
from workers.isolation.calls import LimitExceeded, Processes
from workers.isolation.process import CallLimits
from workers.leaks.agent_images import Leak, listing_base
from workers.leaks.search import FoundLeak, ImageQuery, KnownRepository, SearchReport, search
from workers.leaks.signature import signature_of, telling_lines
from workers.sandbox.protocol import Sandbox

BASE_S = 300.0
BASE_KEEP_BYTES = 128 * 1024 * 1024  # limit of what is kept from each end of the list of files and commits
SEARCH_CPU_S = 1800
SEARCH_MEMORY_BYTES = 4 * 1024**3
MOST_BYTES = 256 * 1024**3  # size of all files of an image, holes in files included
NAMED_AT_MOST = 3  # number of places named for one leak

_FILES_CHANGED = re.compile(r"^\W*files changed\b", re.MULTILINE | re.IGNORECASE)
_DIFF = re.compile(r"^(?:diff --git |@@ -\d+,?\d* \+\d+)", re.MULTILINE)

_processes = Processes(
    num_processes=2, limits=CallLimits(cpu_s=SEARCH_CPU_S, memory_bytes=SEARCH_MEMORY_BYTES)
)
atexit.register(_processes.close)


class Unsearchable(SandboxError):
    """The files of the image make the search exceed its limits, so it is unknown whether the image reveals the answer."""

    transient = False


async def search_image(sandbox: Sandbox, task: Task, gold: Gold | None) -> SearchReport:
    """Searches all files of an agent's sandbox. Raises SandboxError, and Unsearchable."""
    query = ImageQuery(signature=signature_of(task, gold), base=await _base(sandbox, task))
    with (
        tempfile.TemporaryDirectory(prefix="swerve-leaks-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        address = str(Path(folder) / "files")
        listener.bind(address)
        listener.listen(1)
        listener.setblocking(False)
        searching = asyncio.create_task(_processes.call(search, address, query), name="search an image")
        try:
            connecting = asyncio.create_task(
                asyncio.get_running_loop().sock_accept(listener), name="searcher connects"
            )
            await asyncio.wait({searching, connecting}, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                await _send(sandbox, connecting.result()[0])
            else:
                connecting.cancel()
            return await searching
        except LimitExceeded as error:
            raise Unsearchable(f"{task.image} could not be searched for the answer {error}") from error
        finally:
            searching.cancel()


async def _send(sandbox: Sandbox, connection: socket.socket) -> None:
    """Sends the image's files. Raises SandboxError, and Unsearchable if they exceed the limit."""
    num_bytes = 0

    def write(piece: bytes) -> bool:
        nonlocal num_bytes
        num_bytes += len(piece)
        if num_bytes > MOST_BYTES:
            return False
        with contextlib.suppress(OSError):  # the process ended and has reported why
            connection.sendall(piece)
            return True
        return False

    with connection:
        connection.setblocking(True)
        await sandbox.export(write)
    if num_bytes > MOST_BYTES:
        raise Unsearchable(f"{sandbox.image} has more than {MOST_BYTES >> 30} GiB of files")


async def _base(sandbox: Sandbox, task: Task) -> KnownRepository:
    """The repository that an agent may know. Raises SandboxError."""
    result = await sandbox.run(
        listing_base(task), timeout_s=BASE_S, keep_bytes=BASE_KEEP_BYTES, as_root=True
    )
    if result.exit_code != 0 or result.dropped_bytes:
        raise SandboxError(f"reading the base commit in {task.image} ended with status {result.exit_code}")
    if not result.output:
        return KnownRepository()
    top, git_directory, *entries = result.output.split(b"\0")
    history = entries.pop()
    pairs = (entry.split(b"\t", 1) for entry in entries if entry)
    files = {path: words.split()[2].decode() for words, path in pairs}
    commits = {*history.decode().split(), *([task.base_commit] if task.base_commit else [])}
    return KnownRepository(top=top, git_directory=git_directory, files=files, history=frozenset(commits))


def leaks_of(found: Sequence[FoundLeak]) -> list[Leak]:
    """One leak for each kind, which names a few places."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for one in found:
        places[one.kind].append(one.where)
    return [Leak(kind, _few(names)) for kind, names in places.items()]


def answers_in_problem(task: Task, gold: Gold | None) -> list[Leak]:
    """The answer's text in the problem statement."""
    leaks: list[Leak] = []
    if _FILES_CHANGED.search(task.problem):
        leaks.append(Leak("problem", "lists the files changed"))
    if _DIFF.search(task.problem):
        leaks.append(Leak("problem", "holds a diff"))
    for kind, lines in telling_lines(gold).items():
        told = [line for line in lines if line in task.problem]
        # Tests often repeat an example from the problem statement.
        if told and (kind == "solution" or 2 * len(told) >= len(lines)):
            leaks.append(Leak("problem", f"has {len(told)} of {len(lines)} lines of the {kind}"))
    return leaks


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(sorted(names)[:NAMED_AT_MOST]) + more
