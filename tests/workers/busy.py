"""A machine whose cores other programs use: containers beside those of a test, so that the kernel shares the cores out between them
however it groups the processes of sessions.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import docker

HOGS_PER_CORE = 6
SPIN = "for _ in $(seq {}); do while :; do :; done & done; wait"


@contextmanager
def busy_machine(client: docker.DockerClient, image: str, *, num_processes: int = 1) -> Iterator[None]:
    """HOGS_PER_CORE containers for each core, each with so many busy processes."""
    with ExitStack() as hogs:
        for _ in range(HOGS_PER_CORE * (os.cpu_count() or 1)):
            command = ["timeout", "1200", "sh", "-c", SPIN.format(num_processes)]  # it ends if this test is killed
            hog = client.containers.create(image, command, entrypoint="", network_mode="none")
            hogs.callback(hog.remove, force=True)
            hog.start()
        yield


def idle_s() -> float:
    """For how long the machine's cores have been idle, added up, waiting for a disk included."""
    ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[4:6]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
