"""Checks that the repository in a task's image is at the task's base commit.

Hidden tests are restored from the base commit, and the history that an agent sees ends there. If the image has another
commit checked out, or does not have this one, the task is not what it says. In images of SWE-bench and its relatives the
builder commits on top of the base; `Task.builder_commits` says so.
"""

import shlex
from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import GraderError
from pipeline.task import Task
from workers.sandbox.git import GIT
from workers.sandbox.protocol import CommandResult

LOOK_S = 60.0
_FIX = "check out base_commit in the image, or set base_commit to what the image has"
SHOWN_CHARS = 12  # of a commit's hash

# $1 base commit, $2 "1" if a setup may have put a commit of ours on top. Prints HEAD, the base commit ("-": there is none),
# whether their files are the same, and how many commits HEAD is ahead ("-": the base is not in its history).
_LOOK = f"""{GIT}
head=$(git rev-parse --verify HEAD) || exit 1
if [ "$2" ] && [ "$(git log -1 --format=%ae HEAD)" = swerve@localhost ]; then head=$(git rev-parse HEAD^) || exit 1; fi
base=$(git rev-parse -q --verify "$1^{{commit}}") || {{ echo "$head - - -"; exit 0; }}
same=no
git diff-tree --quiet "$base" "$head" && same=yes
ahead=-
git merge-base --is-ancestor "$base" "$head" && ahead=$(git rev-list --count "$base..$head")
echo "$head $base $same $ahead"
"""


class Repository(Protocol):
    """A container of the task, set up. Raises SandboxError."""

    @property
    def workdir(self) -> str: ...

    async def run(self, command: str, *, timeout_s: float) -> CommandResult: ...


@dataclass(frozen=True, slots=True)
class BaseCommit:
    """What is wrong with a task's base commit, and what is only worth knowing; "" if nothing is."""

    fault: str = ""
    warning: str = ""


SOUND = BaseCommit()


async def look_at_base(repository: Repository, task: Task) -> BaseCommit:
    """Compares the base commit with HEAD. A task without one means HEAD, whatever that is.

    Raises SandboxError, and GraderError if there is no HEAD.
    """
    if not task.base_commit:
        return SOUND
    has_setup = "1" if task.setup_script.strip() or task.setup_patch.strip() else ""
    result = await repository.run(
        f"set -- {shlex.join([task.base_commit, has_setup])}\n{_LOOK}", timeout_s=LOOK_S
    )
    words = result.output.decode("utf-8", "replace").split()
    place = f"{repository.workdir} of {task.image}"
    if result.exit_code != 0 or len(words) != 4:
        raise GraderError(f"workdir: {place} is not a git repository with a commit")
    head, base, same, ahead = words
    at = f"the repository at {place} has {head[:SHOWN_CHARS]} checked out"
    if base == "-":
        return BaseCommit(fault=f"base_commit: {task.base_commit} is no commit there; {at}: {_FIX}")
    if base == head:
        return SOUND
    if task.builder_commits and ahead != "-":
        commits = f"{ahead} commit{'s' if ahead != '1' else ''}"
        return BaseCommit(warning=f"base_commit: HEAD of the image is {commits} of its builder later")
    if same == "yes":
        return BaseCommit(warning=f"base_commit: {at}, which has the same files")
    where = "which is not in its history" if ahead == "-" else f"{ahead} commits before it"
    return BaseCommit(fault=f"base_commit: {at}, not {task.base_commit[:SHOWN_CHARS]}, {where}: {_FIX}")
