"""Removes the containers that the workers of one run on this machine left behind, and nobody else's."""

import socket
import subprocess
from collections.abc import Callable, Iterable

from infra.processes import Child

WORKER_LABEL = "swerve.worker"


def remove_containers(started: Iterable[Child], say: Callable[[str], None]) -> None:
    """Force-remove the containers of the workers among `started`, all of which have ended.

    Other workers on the same Redis and Docker keep theirs: a container's label names the worker that made it.
    """
    owners = {worker_name(child) for child in started if child.name.startswith("worker-")}
    found = [container for container, owner in labelled() if owner in owners]
    if found:
        subprocess.run(["docker", "rm", "--force", "--volumes", *found], capture_output=True, check=False)
        say(f"removed {len(found)} containers that were left")


def worker_name(worker: Child) -> str:
    """The name that the worker gives itself, see `workers/settings.py`."""
    return f"{socket.gethostname()}/{worker.pid}"


def labelled() -> list[tuple[str, str]]:
    """Id and worker of every container that a worker made, running or not; nothing if Docker does not answer."""
    words = f'{{{{.ID}}}} {{{{.Label "{WORKER_LABEL}"}}}}'
    listing = ["docker", "ps", "--all", "--filter", f"label={WORKER_LABEL}", "--format", words]
    lines = subprocess.run(listing, capture_output=True, text=True, check=False).stdout.splitlines()
    return [(container, owner) for container, _, owner in (line.partition(" ") for line in lines)]
