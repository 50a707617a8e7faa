"""Processes and mounts of our own: when the first of these processes ends, however that comes about, the kernel ends all
others, and what they had mounted is gone with them.

So nothing outlives chaos, not even one that is itself killed; and what an engine of ours leaves mounted never keeps anybody
from removing its directory.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from infra.processes import PR_SET_PDEATHSIG, libc

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
SYSTEM_CONTAINERD = Path("/run/containerd")
"""Where shims of every engine put their sockets, and where an engine looks for a containerd to use in place of its own."""


def confined(body: Callable[[], int], *, signals: Sequence[signal.Signals]) -> int:
    """The exit status of ``body``, which runs as process 1 of a namespace, with the handlers of ``signals`` that are in force
    now; afterwards those signals are passed on to it. Starts no process ever again. Raises OSError for want of privileges.
    """
    _succeed(libc.unshare(CLONE_NEWPID))
    process = multiprocessing.get_context("fork").Process(target=_enter, args=(body,))
    process.start()

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)

    for number in signals:
        signal.signal(number, pass_on)
    process.join()
    status = process.exitcode
    assert status is not None, "it has ended"
    return status if status >= 0 else 128 - status


def _enter(body: Callable[[], int]) -> None:
    os.setsid()  # Ctrl-C reaches it once, from its parent
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _succeed(libc.unshare(CLONE_NEWNS))
    _mount("none", Path("/"), "", MS_REC | MS_PRIVATE)
    _mount("proc", Path("/proc"), "proc", 0)
    SYSTEM_CONTAINERD.mkdir(parents=True, exist_ok=True)
    _mount("tmpfs", SYSTEM_CONTAINERD, "tmpfs", 0)
    sys.exit(body())


def _mount(source: str, target: Path, kind: str, flags: int) -> None:
    _succeed(libc.mount(source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), None))


def _succeed(result: int) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(
            error, f"no namespaces of our own: {os.strerror(error)}; chaos wants root, as dockerd does"
        )
