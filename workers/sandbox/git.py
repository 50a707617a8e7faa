"""Git commands for use inside a container. They ignore configuration that the image or the agent may have left."""

from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parent

GIT = (_HERE / "git.sh").read_text()
"""The shell function `git`, with which every script here begins."""

COMMIT_TREE = (_HERE / "commit_tree.sh").read_text()
"""The shell functions `stage_all` and `commit_tree`. They go after GIT."""

HEAD = GIT + "git rev-parse --verify HEAD 2>/dev/null"

_AGENT_CONFIG = "/swerve-git/agent"
CONFIGURE_AGENT = f"CONFIG={_AGENT_CONFIG}\n{(_HERE / 'agent_git.sh').read_text()}"
"""Writes the configuration of git for an agent's commands. It prints nothing and ends with any status."""

AGENT_GIT: dict[str, str | None] = {
    "GIT_CONFIG_GLOBAL": _AGENT_CONFIG,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_EXTERNAL_DIFF": None,
    "GIT_DIFF_OPTS": None,
    "GIT_CONFIG_COUNT": None,
    "GIT_CONFIG_PARAMETERS": None,
    "GIT_DIR": None,
    "GIT_WORK_TREE": None,
    "GIT_INDEX_FILE": None,
    "GIT_TRACE": None,
}
"""Variables of an agent's commands, for that configuration. None: the image's own is taken away, because it would change a difference."""


def diff_since(commit: str) -> str:
    """The command that prints the workdir's changes since `commit`, new files included, as a git patch."""
    return f"""{GIT}
rm -f .git/index.lock
git add --all --ignore-errors >/dev/null 2>&1
git diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames \\
  --src-prefix=a/ --dst-prefix=b/ {commit or "HEAD"} 2>/dev/null
"""


def no_repository(workdir: str, image: str, elsewhere: Sequence[str] = ()) -> str:
    """The error text for a task whose repository is not at `workdir` of its image, with advice.

    `elsewhere` are other directories with repositories.
    """
    found = f" (one is at {' and at '.join(elsewhere)})" if elsewhere else ""
    return (
        f"workdir: {workdir} of {image} is not a git repository with a commit{found}: set the task's workdir to the"
        " repository's directory in the image, in the row's column workdir or in task.json, and import it again"
    )
