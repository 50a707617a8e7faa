"""Small repositories with a history, made by tests."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository whose commits are a day apart."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> "Repository":
        path.mkdir()
        made = cls(path)
        made.git("init", "-q", "-b", "main")
        return made

    def git(
        self, *words: str, number: int = 0, author: str = "Ann <ann@example.invalid>", given: bytes = b""
    ) -> str:
        name, _, email = author.rstrip(">").partition(" <")
        date = f"2024-01-{number + 1:02}T12:00:00+00:00"
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            **{f"GIT_{who}_NAME": name for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": email for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_DATE": date for who in ("AUTHOR", "COMMITTER")},
        }
        command = ["git", "-C", str(self.path), *words]
        done = subprocess.run(command, env=env, input=given, capture_output=True, check=True)
        return done.stdout.decode().strip()

    def commit(
        self,
        message: str | bytes,
        files: Mapping[str, str | bytes | None],
        author: str = "Ann <ann@example.invalid>",
    ) -> str:
        """The hash of a new commit; None removes a file."""
        for name, content in files.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        text = message if isinstance(message, bytes) else message.encode()
        self.git("add", "--all")
        number = int(self.git("rev-list", "--count", "--all"))
        self.git("commit", "-q", "--allow-empty", "-F", "-", number=number, author=author, given=text)
        return self.git("rev-parse", "HEAD")
