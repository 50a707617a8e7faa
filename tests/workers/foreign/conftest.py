"""The shipped agent programs, built as `swerve harness build` does where their images are missing."""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import docker
import pytest

from pipeline.harness import Harness, HarnessFile, read_harness


@pytest.fixture(scope="session")
def shipped_program(docker_client: docker.DockerClient) -> Callable[[str], HarnessFile]:
    """Makes a program's image from the registries, once for all tests on this machine, and leaves it there: its name holds the digest of
    what it is made of.
    """

    @cache
    def ready(name: str) -> HarnessFile:
        with (Path(tempfile.gettempdir()) / f"swerve-test-harness-{name}-{os.getuid()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            subprocess.run([sys.executable, "-m", "workers.harness", "build", name], check=True)
        return read_harness(name)

    return ready


@pytest.fixture(scope="session")
def mini(shipped_program: Callable[[str], HarnessFile]) -> Harness:
    return shipped_program("mini").harness
