"""Git commands for use inside a container. They ignore configuration that the image or the agent may have left."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.sandbox.users import ROOT

_HERE = Path(__file__).parent

GIT_VARIABLES = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_ATTR_SOURCE",
    "GIT_COMMON_DIR",
    "GIT_CONFIG_COUNT",
    "GIT_CONFIG_PARAMETERS",
    "GIT_DIFF_OPTS",
    "GIT_DIR",
    "GIT_EXTERNAL_DIFF",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PAGER_IN_USE",
    "GIT_TRACE",
    "GIT_TRACE2",
    "GIT_TRACE2_EVENT",
    "GIT_TRACE2_PERF",
    "GIT_TRACE_PACKET",
    "GIT_TRACE_PACK_ACCESS",
    "GIT_TRACE_PERFORMANCE",
    "GIT_TRACE_REFS",
    "GIT_TRACE_SETUP",
    "GIT_TRACE_SHALLOW",
    "GIT_WORK_TREE",
)
"""Variables of an image that would change a difference, or what it is a difference of. Our git and an agent's do not get them."""

GIT = f"unset {' '.join(GIT_VARIABLES)}\n{(_HERE / 'git.sh').read_text()}"
"""The shell function `git`, with which every script here begins."""

_TREE = (_HERE / "tree.sh").read_text()

COMMIT_TREE = (_HERE / "commit_tree.sh").read_text()
"""The shell functions `stage_all` and `commit_tree`. They go after GIT."""

OWNER = (_HERE / "owner.sh").read_text()
"""The shell functions `find_owner` and `hand_over`, which are root's. They go after GIT."""

STARTED = "/swerve-git/started"
"""A file as old as the start of an agent's work, or of a grading."""

START = f"""{GIT}{OWNER}
: >|{STARTED}
git rev-parse --verify HEAD 2>/dev/null && {{
  stat -c %Z /swerve-git/.gitconfig 2>/dev/null || echo 0
  find_owner
  echo "$owner"
}}"""
"""Prints HEAD, the time at which git.sh has just written its file, and the owner of the work tree: the time in seconds, by the clock of
files, which no program can set. It is 0 if that cannot be read, so that every file counts as touched."""

# In the system's file, which no HOME replaces, and in the user's, which another installation of git reads too.
_TRUST = """trust() {
  command git config --system --add safe.directory '*'
  command git config --global --add safe.directory '*'
  [ -O ~ ] || chown -h "$(stat -c %u:%g ~)" ~/.gitconfig ~/.config/git/config
} >/dev/null 2>&1
"""

TRUST = f"""{_TRUST}{{ [ -O . ] && [ -O .git ]; }} || trust
"""
"""Lets scripts of a task use git in the repository of another user."""

TRUST_ALWAYS = f"{_TRUST}trust\n"
"""The same for a user who is not the one that calls it."""

CONFIGURE_AGENT = _TRUST + (_HERE / "agent_git.sh").read_text()
"""Changes the image's configuration of git for an agent. It prints nothing and ends with any status."""


NOTHING_PRINTED = 70  # status of `checking`


@dataclass(frozen=True, slots=True)
class StartState:
    """The state in which an agent finds a repository."""

    commit: str  # "" outside a repository
    at_s: int  # Unix seconds, by the clock of files
    owner: str = ROOT  # of the work tree: ids of user and group

    @classmethod
    def read(cls, printed: bytes) -> "StartState":
        """The start that START printed."""
        words = printed.decode().split()
        return cls(words[0], int(words[1]), words[2]) if len(words) == 3 else cls("", 0)

    @property
    def difference(self) -> str:
        """The command that prints the workdir's changes since then as a git patch, new files included."""
        return f"{self._functions}print_difference"

    def checking(self, path: str) -> str:
        """The command that checks the printed patch in the file `path`. Its status is NOTHING_PRINTED if it is empty although HEAD has
        moved to other files, another one if git cannot apply it to the files at the start, and otherwise 0.
        """
        return f"{self._functions}check_printed {path}"

    @property
    def _functions(self) -> str:
        return f"{GIT}{_TREE}START={self.commit} SINCE={self.at_s}\n"


def ended(patch: bytes) -> bytes:
    """`patch` with the last newline that it may lack, without which git calls it corrupt."""
    return patch if patch.endswith(b"\n") else patch + b"\n"


def no_repository(workdir: str, image: str, elsewhere: Sequence[str] = ()) -> str:
    """The error text for a task whose repository is not at `workdir` of its image, with advice.

    `elsewhere` are other directories with repositories.
    """
    found = f" (one is at {' and at '.join(elsewhere)})" if elsewhere else ""
    return (
        f"workdir: {workdir} of {image} is not a git repository with a commit{found}: set the task's workdir to the"
        " repository's directory in the image, in the row's column workdir or in task.json, and import it again"
    )
