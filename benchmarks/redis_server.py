"""A Redis of the benchmark's own on a Unix socket: nobody else's data, nothing on disk, no port."""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis.asyncio import Redis

from benchmarks.children import die_with_parent

START_S = 20.0


@contextmanager
def own_redis() -> Iterator[str]:
    """Its URL. Raises RuntimeError if it does not start."""
    with tempfile.TemporaryDirectory(prefix="swerve-bench-redis-") as directory:
        path = Path(directory, "redis.sock")
        options = {
            "port": "0",
            "unixsocket": str(path),
            "save": "",
            "appendonly": "no",
            "maxclients": "16000",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        process = subprocess.Popen(
            ["redis-server", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=directory,
            preexec_fn=die_with_parent,
        )
        try:
            _await(path, process)
            yield f"unix://{path}?db=0"
        finally:
            process.kill()
            process.wait()


def socket_path(url: str) -> str:
    return url.removeprefix("unix://").partition("?")[0]


async def cpu_s(redis: Redis) -> float:
    """CPU time that the server has used."""
    info = await redis.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def _await(path: Path, process: "subprocess.Popen[bytes]") -> None:
    give_up_at = time.monotonic() + START_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > give_up_at:
            raise RuntimeError(f"redis-server did not start (status {process.poll()}, as user {os.getuid()})")
        time.sleep(0.02)
