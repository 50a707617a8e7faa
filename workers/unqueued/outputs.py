"""Files that a command writes its results to. They are checked for being writable before any work, which may take hours."""

import errno
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote


class Unwritable(ValueError):
    """Results cannot be written where an option wants them; the text names both."""


@contextmanager
def writing(option: str, path: Path) -> Generator[None]:
    """Raises Unwritable if the file operations within fail."""
    try:
        yield
    except OSError as error:
        raise Unwritable(f"{option}: {path} cannot be written: {error.strerror}") from error


def must_be_writable(path: Path, option: str) -> None:
    """Raises Unwritable if the file could not be written later. Writes nothing."""
    with writing(option, path):
        if not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
        elif path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@dataclass(frozen=True, slots=True)
class LogDirectory:
    """Where `--logs` wants whole logs; None: nowhere."""

    path: Path | None

    def check(self) -> None:
        """Makes the directory. Raises Unwritable if it cannot hold logs."""
        if self.path:
            with writing("--logs", self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.path).close()

    def write(self, task_id: str, name: str, log: str) -> None:
        """Writes LOGS/TASK/`name`; nothing if the log is empty. Raises Unwritable."""
        if self.path is None or not log:
            return
        file = self.path / _directory_of(task_id) / name
        with writing("--logs", file):
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(log.encode("utf-8", "surrogateescape"))


def _directory_of(task_id: str) -> str:
    """The task's directory within LOGS: its id in plain characters, and no way out of LOGS."""
    name = quote(task_id, safe=":+@,= ")
    return name.replace(".", "%2E") if name in (".", "..") else name
