"""Process and mount namespaces of our own: when their first process ends, even if it is killed, the kernel ends all other
processes in them and removes their mounts.

So nothing outlives a campaign that is itself killed, and mounts of its dockerd never keep anyone from removing its directory.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from infra.processes import PR_SET_PDEATHSIG, libc

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
SYSTEM_CONTAINERD = Path("/run/containerd")
"""Shims of every dockerd put their sockets here, and dockerd looks here for a containerd to use instead of its own."""


def run_confined(body: Callable[[], int], *, signals: Sequence[signal.Signals]) -> int:
    """Run `body` as process 1 of new namespaces and return its exit status.

    It starts with the handlers of `signals` that are installed now; we pass these signals on to it, also those that arrive
    while it starts. This process can start no other processes any more. Raises OSError without the privileges.
    """
    _check(libc.unshare(CLONE_NEWPID))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    process = multiprocessing.get_context("fork").Process(target=_enter, args=(body, before))
    process.start()

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)

    for number in signals:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    process.join()
    status = process.exitcode
    assert status is not None, "it has ended"
    return status if status >= 0 else 128 - status


def _enter(body: Callable[[], int], mask: Iterable[int]) -> None:
    os.setsid()  # so that Ctrl-C reaches it once, passed on by its parent
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _check(libc.unshare(CLONE_NEWNS))
    _mount("none", Path("/"), "", MS_REC | MS_PRIVATE)
    _mount("proc", Path("/proc"), "proc", 0)
    SYSTEM_CONTAINERD.mkdir(parents=True, exist_ok=True)
    _mount("tmpfs", SYSTEM_CONTAINERD, "tmpfs", 0)
    sys.exit(body())


def _mount(source: str, target: Path, kind: str, flags: int) -> None:
    _check(libc.mount(source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), None))


def _check(result: int) -> None:
    if result:
        error = ctypes.get_errno()
        reason = os.strerror(error)
        raise OSError(error, f"no namespaces of our own: {reason}; run infra.chaos as root, as dockerd is")
