"""A worker's temporary files, named so that those of a killed process can be found and removed.

There is only one kind, which exists for some seconds: a log that swebench's parsers read from a file. Containers mount nothing of the host,
and a worker creates no temporary directory.
"""

import tempfile
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO

PREFIX = "swerve-worker-"
STALE_S = 3600.0


def temporary_file(*, suffix: str) -> AbstractContextManager[IO[bytes]]:
    """A named file that is deleted when it is closed."""
    return tempfile.NamedTemporaryFile(prefix=PREFIX, suffix=suffix)


def remove_stale() -> list[Path]:
    """Remove files of ours that nobody has written to for STALE_S, except other users'; returns them."""
    removed: list[Path] = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if path.is_file() and time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()
                removed.append(path)
    return removed
