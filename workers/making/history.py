"""Reads the history of a repository that nobody vouches for: its commits, files and differences.

Everything is read through a bare repository that borrows the objects of the given one: settings, attributes, hooks and filters of the
repository, the user and the machine have no effect, nothing is checked out on this machine, and nothing is written to the repository.
Files and differences are read up to a limit, so that a huge one makes a commit fall away instead of using up the memory.
"""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

MOST_BYTES = 2 * 1024**2  # size of a difference or a file that is read
GIT_S = 300
_LOG = "--format=tformat:%H%x00%P%x00%an%x00%ae%x00%aI%x00%cI%x00%B"
_NUM_FIELDS = 7
NO_COMMIT = "0" * 40
# Author and committer of every base commit, so that its hash depends on its files alone.
_SAME = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "base"), ("EMAIL", "base@localhost"), ("DATE", "2025-01-01T00:00:00Z"))
}


class GitError(ValueError):
    """A command of git failed; the message is its own. `status` is the status with which it ended, 0 if it was not run to its end."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class TooLarge(GitError):
    """The output of a command of git is longer than what is read of it."""


class Fallen(ValueError):
    """A commit becomes no task. `reason` is one of a few that are counted, `detail` says more about this commit."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit; times as ISO 8601."""

    sha: str
    parents: tuple[str, ...]
    author: str
    email: str
    authored: str
    committed: str
    message: str


@dataclass(frozen=True, slots=True)
class PathChange:
    """What happened to one path: modes and ids of its content before and after."""

    path: bytes
    old_mode: str
    new_mode: str
    old: str
    new: str


def run_git(words: Sequence[str], *, env: dict[str, str], most_bytes: int = 0) -> bytes:
    """The output of git. Raises GitError, and TooLarge if there is more than `most_bytes`, unless that is 0."""
    try:
        with subprocess.Popen(
            ["git", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
        ) as git:
            head = b""
            if most_bytes:
                assert git.stdout is not None
                if len(head := git.stdout.read(most_bytes + 1)) > most_bytes:
                    git.kill()
                    raise TooLarge(f"git {words[-1]}: more than {most_bytes} bytes")
            output, errors = git.communicate(timeout=GIT_S)
    except FileNotFoundError as error:
        raise GitError("git is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise GitError(f"git {words[0]} took more than {GIT_S} s") from error
    if git.returncode:
        said = errors.decode("utf-8", "replace").strip()[-500:]
        raise GitError(said or f"git {words[0]} failed", git.returncode)
    return head + output


def _plain_environment() -> dict[str, str]:
    """The environment without variables of git."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def in_repository(repository: Path, *words: str) -> str:
    """The output of git in the repository itself. Raises GitError naming REPO."""
    try:
        return run_git(["-C", str(repository), *words], env=_plain_environment()).decode().strip()
    except GitError as error:
        raise GitError(f"REPO: {repository}: {error}") from error


def resolved(repository: Path, name: str, option: str) -> str:
    """The hash of a commit that the repository calls `name`. Raises GitError naming the option, or REPO."""
    in_repository(repository, "rev-parse", "--git-dir")
    try:
        return in_repository(
            repository, "rev-parse", "--verify", "-q", "--end-of-options", f"{name}^{{commit}}"
        )
    except GitError as error:
        raise GitError(f"{option}: {repository} has no commit {name!r}") from error


class History:
    """The commits of `repository`, read through the bare repository `borrowed`, which is made if it is not there."""

    def __init__(self, repository: Path, borrowed: Path) -> None:
        """Raises GitError naming REPO if it is no repository that git may read."""
        self.repository, self._borrowed = repository, borrowed
        self._env = _plain_environment() | {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_NO_LAZY_FETCH": "1",
            "LC_ALL": "C",
        }
        objects, shallow = (
            in_repository(repository, "rev-parse", "--git-path", name) for name in ("objects", "shallow")
        )
        if not (borrowed / "HEAD").exists():
            run_git(["init", "-q", "--bare", "--template=", str(borrowed)], env=self._env)
        (borrowed / "objects/info").mkdir(parents=True, exist_ok=True)
        (borrowed / "objects/info/alternates").write_text(f"{(repository / objects).resolve()}\n")
        if (cut := repository / shallow).is_file():
            (borrowed / "shallow").write_bytes(cut.read_bytes())

    def git(self, *words: str, most_bytes: int = 0, env: dict[str, str] | None = None) -> bytes:
        return run_git(
            ["--git-dir", str(self._borrowed), "-c", "core.quotePath=true", *words],
            env=self._env | (env or {}),
            most_bytes=most_bytes,
        )

    @property
    def origin(self) -> str:
        """The address of the remote `origin` without credentials; "" if there is none."""
        try:
            return re.sub(r"//[^/@]*@", "//", in_repository(self.repository, "remote", "get-url", "origin"))
        except GitError:
            return ""

    def commits(self, head: str, *words: str) -> Iterator[Commit]:
        """The commits on the line of first parents, newest first."""
        fields = self.git("log", "-z", "--first-parent", "--encoding=UTF-8", _LOG, *words, head, "--").split(
            b"\0"
        )
        for at in range(0, len(fields) - _NUM_FIELDS + 1, _NUM_FIELDS):
            sha, parents, author, email, authored, committed, message = (
                field.decode("utf-8", "replace") for field in fields[at : at + _NUM_FIELDS]
            )
            yield Commit(sha, tuple(parents.split()), author, email, authored, committed, message)

    def changes(self, base: str, head: str) -> list[PathChange]:
        fields = self.git("diff-tree", "-r", "-z", "--raw", "--no-renames", "--full-index", base, head).split(
            b"\0"
        )
        found: list[PathChange] = []
        for header, path in zip(fields[::2], fields[1::2], strict=False):
            old_mode, new_mode, old, new, _ = header.decode().lstrip(":").split(" ")
            found.append(PathChange(path, old_mode, new_mode, old, new))
        return found

    def blob(self, sha: str) -> bytes:
        """The content; nothing for a side that is absent. Raises TooLarge."""
        return b"" if sha == NO_COMMIT else self.git("cat-file", "blob", sha, most_bytes=MOST_BYTES)

    def diff(self, base: str, head: str) -> str:
        """The difference as git applies it. Raises Fallen for one that cannot be kept as text."""
        words = ("--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "--full-index")
        try:
            return self.git("diff", *words, base, head, "--", most_bytes=MOST_BYTES).decode()
        except TooLarge as error:
            raise Fallen("difference too large", f"more than {MOST_BYTES >> 20} MiB") from error
        except UnicodeDecodeError as error:
            raise Fallen("difference is not UTF-8") from error

    def files(self, commit: str) -> dict[str, str]:
        """The ids of the regular files of a commit by their paths; paths that are not UTF-8 are left out."""
        found: dict[str, str] = {}
        for entry in self.git("ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0"):
            words, _, path = entry.partition(b"\t")
            if words.startswith(b"100"):
                try:
                    found[path.decode()] = words.split()[2].decode()
                except UnicodeDecodeError:
                    continue
        return found

    def is_ancestor(self, commit: str, other: str) -> bool:
        """Whether `other` was made on top of `commit`; not if either is not there."""
        try:
            return self.git("merge-base", "--is-ancestor", commit, other) == b""
        except GitError:
            return False

    def contains(self, commit: str, word: str) -> bool:
        """Whether a file of the commit has this word."""
        try:
            return bool(self.git("grep", "-q", "-w", "-F", "-I", "-e", word, commit, "--") == b"")
        except GitError:
            return False

    def bundle(self, base: str, file: Path) -> None:
        """Writes a bundle of `base_commit(base)`, whose ref is its hash below refs/bases."""
        commit = self.base_commit(base)
        self.git("update-ref", f"refs/bases/{commit}", commit)
        self.git("bundle", "create", "-q", str(file), f"refs/bases/{commit}")

    def base_commit(self, base: str) -> str:
        """The hash of a commit with the files of `base`, and without any history."""
        return self.git("commit-tree", f"{base}^{{tree}}", "-m", "base", env=_SAME).decode().strip()

    def changed(self, commit: str, files: Mapping[str, bytes | None]) -> str:
        """The hash of such a commit with the files of `commit`, of which these have other content, or are removed if that is None."""
        index, file = self._borrowed / "changed-index", self._borrowed / "changed-file"
        env = {"GIT_INDEX_FILE": str(index), "GIT_WORK_TREE": str(file.parent), "GIT_LITERAL_PATHSPECS": "1"}
        self.git("read-tree", commit, env=env)
        for path, content in files.items():
            if content is None:
                self.git("update-index", "--force-remove", "--", path, env=env)
                continue
            file.write_bytes(content)
            mode = self.git("ls-files", "--stage", "--", path, env=env).decode().split()[0]
            blob = self.git("hash-object", "-w", "--no-filters", str(file)).decode().strip()
            self.git("update-index", "--cacheinfo", f"{mode},{blob},{path}", env=env)
        return self.base_commit(self.git("write-tree", env=env).decode().strip())

    def paths_with(self, commit: str, lines: Iterable[str]) -> list[str]:
        """The paths of the files of a commit that have any of these lines, or a longer one with it."""
        words = [word for line in lines for word in ("-e", line)]
        return self._grep(commit, "-F", *words) if words else []

    def binary_paths(self, commit: str) -> list[str]:
        """The paths of the files of a commit that git takes for binary ones, or that are empty."""
        return sorted(self.files(commit).keys() - {*self._grep(commit, "-I", "-e", "")})

    def _grep(self, commit: str, *words: str) -> list[str]:
        """The paths that git grep finds. Raises GitError."""
        try:
            found = self.git("grep", "-l", "-z", *words, commit, "--")
        except GitError as error:
            if error.status == 1:  # nothing found
                return []
            raise
        prefix = f"{commit}:"
        return [path.decode("utf-8", "replace").removeprefix(prefix) for path in found.split(b"\0") if path]


def iso_date(text: str, option: str, *, is_end: bool = False) -> str:
    """The date in ISO format; with `is_end`, a day without a time is its last second. Git would read a text that is no date as the present
    time. Raises ValueError naming the option.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{option}: {text!r} must be a date such as 2024-05-31") from error
    is_day = len(text) <= len("2024-05-31")
    return (found.replace(hour=23, minute=59, second=59) if is_end and is_day else found).isoformat()
