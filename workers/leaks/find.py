"""Finds what a container reveals of its task's answer, and removes it from containers that become an image.

This is the only definition, for opening sandboxes and for reports on images; the shell scripts beside this file do the work.

The agent may see the base commit and its history. Anything else that git holds may come from somebody who knew the answer: later commits,
other branches, remotes, reflogs, stashes, notes, other worktrees, unreachable objects. History may also contain hidden paths; and with a
setup patch, all history contains the code that the patch undoes.
"""

import posixpath
import shlex
from dataclasses import dataclass
from pathlib import Path

from pipeline import diff
from pipeline.errors import SandboxError, TaskBroken
from pipeline.task import Task
from workers.sandbox.git import COMMIT_TREE, GIT
from workers.sandbox.protocol import Sandbox

CHECK_S = 900.0  # the search walks every object of the repository
# This is not a leak, but it would look like the agent's work; find.sh has the same word
UNCOMMITTED = "uncommitted"

_MARK = b"swerve-leak"  # find.sh has the same
_HERE = Path(__file__).parent
_TASK_PATHS = GIT + (_HERE / "task_paths.sh").read_text()
_FIND, _CLEAN, _BASE = ((_HERE / f"{name}.sh").read_text() for name in ("find", "clean", "base"))


@dataclass(frozen=True, slots=True)
class Leak:
    """`kind` names the kind of leak in a few words, `detail` the individual leak."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})"


async def find_leaks(sandbox: Sandbox, task: Task, *, first_only: bool = False) -> list[Leak]:
    """The parts of the answer that an agent would find in this sandbox, and UNCOMMITTED changes. `first_only` stops at the first leak.

    Raises SandboxError if the search fails.
    """
    script = f"set -- {_words_of(task, first_only=first_only)}\n{_TASK_PATHS}{_FIND}"
    result = await sandbox.run(script, timeout_s=CHECK_S, as_root=True)
    if result.exit_code != 0:
        tail = result.output[-300:].decode("utf-8", "replace").strip()
        raise SandboxError(f"looking for leaks in {task.image} ended with status {result.exit_code}: {tail}")
    lines = (line.split(b"\t") for line in result.output.splitlines())
    return [
        Leak(line[1].decode(), b"\t".join(line[2:]).decode("utf-8", "replace"))
        for line in lines
        if line[0] == _MARK and len(line) > 2
    ]


def hiding(task: Task) -> str:
    """The command that removes hidden paths from the work tree; "" if there are none."""
    if not _hidden(task):
        return ""
    return f"rm -rf -- {shlex.join(_hidden(task))}\n"


def cleaning(task: Task) -> str:
    """The command that removes what `find_leaks` finds, from a container that becomes an image. Status 0 means that it completed;
    `find_leaks` must check whether anything is left. Raises TaskBroken for a path that cannot be hidden.
    """
    return f"set -- {_words_of(task)}\n{_TASK_PATHS}{COMMIT_TREE}{_CLEAN}"


def listing_base(task: Task) -> str:
    """The command that lists what an agent may know; base.sh describes its output."""
    return f"set -- {shlex.join([task.base_commit, '', '', '0'])}\n{_TASK_PATHS}{_BASE}"


def _words_of(task: Task, *, first_only: bool = False) -> str:
    """The arguments of task_paths.sh, quoted. Raises TaskBroken for a path that cannot be hidden."""
    hidden = _hidden(task)
    cut = "1" if task.setup_patch.strip() else ""
    changed = [one.new for one in diff.sections(task.setup_patch) if one.new is not None]
    patched = [name.decode("utf-8", "surrogateescape") for name in changed]
    sources = [path for path in [*hidden, *patched] if path.endswith(".py")]
    return shlex.join([task.base_commit, cut, "1" if first_only else "", str(len(hidden)), *hidden, *sources])


def _hidden(task: Task) -> list[str]:
    """Hidden and leaking paths, relative to the workdir if inside it, otherwise absolute."""
    return [_placed(task, path) for path in (*task.hidden_paths, *task.leaking_paths)]


def _placed(task: Task, path: str) -> str:
    workdir = posixpath.normpath(task.workdir)
    full = posixpath.normpath(posixpath.join(workdir, path))
    relative = posixpath.relpath(full, workdir)
    holds_workdir = full == "/" or posixpath.commonpath([full, workdir]) == full
    if "\0" in path or not path.strip() or holds_workdir or relative.split("/")[0] == ".git":
        field = "hidden_paths" if path in task.hidden_paths else "leaking_paths"
        raise TaskBroken(f"{field} of {task.id}: {path!r} cannot be taken away")
    return full if relative.startswith("../") else relative
