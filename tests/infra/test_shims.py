"""Shims of one dockerd, distinguished from those of others."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from infra.services import began_at_ticks, children_of, end_shims, shims

HOLDING = "bash -c 'echo holds; exec sleep 600' & read"  # printed once it is no longer a copy of the shim
Shim = subprocess.Popen[str]


@pytest.fixture
def shim_of() -> Iterator[Callable[[Path], Shim]]:
    """A process that looks like a shim of the dockerd with this exec root, and the first process of its container."""
    with ExitStack() as cleanup:

        def make(exec_root: Path) -> Shim:
            words = ["containerd-shim-runc-v2", "-c", HOLDING]
            words += ["-namespace", "moby", "-address", f"{exec_root}/containerd/containerd.sock"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            shim = cleanup.enter_context(subprocess.Popen(words, executable="/bin/bash", text=True, **pipes))
            cleanup.callback(shim.kill)
            assert shim.stdout is not None
            shim.stdout.readline()
            return shim

        yield make


def test_the_shims_of_one_dockerd_end_with_their_containers_and_those_of_others_do_not(
    shim_of: Callable[[Path], Shim], tmp_path: Path
) -> None:
    for name in ("ours", "ours-not"):
        (tmp_path / name).mkdir()
    ours, other = shim_of(tmp_path / "ours"), shim_of(tmp_path / "ours-not")
    (container,) = children_of(ours.pid)
    assert shims(tmp_path / "ours") == [ours.pid]
    assert end_shims(tmp_path / "ours") == [ours.pid]
    assert ours.wait() == -9
    while began_at_ticks(container) is not None:  # the kernel ends it when it gets to it
        time.sleep(0.01)
    assert other.poll() is None
    assert shims(tmp_path / "ours") == []
    end_shims(tmp_path / "ours-not")


def test_a_process_may_end_while_its_children_are_looked_for() -> None:
    for _ in range(200):
        with subprocess.Popen(["true"]) as process:
            waiting = threading.Thread(target=process.wait)
            waiting.start()
            while waiting.is_alive():
                children_of(process.pid)  # raises nothing
            waiting.join()


def test_a_root_reached_by_a_link_is_the_same_root(shim_of: Callable[[Path], Shim], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "var").symlink_to(tmp_path / "run")
    shim = shim_of(tmp_path / "var")
    assert shims(tmp_path / "run") == shims(tmp_path / "var") == [shim.pid]
    end_shims(tmp_path / "run")
