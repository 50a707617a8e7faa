"""Prepares a sandbox before its first use: its environment variables, and the task's setup.

A setup is for files: they become part of the commit from which the agent's diff and the grader start. Processes that the script starts may
be absent from the agent's sandbox, whose image can have been made after the setup.
"""

import shlex

from pipeline.agent.config import load_agent
from pipeline.errors import SandboxError, TaskBroken
from pipeline.request import RolloutRequest
from pipeline.task import File, Task
from workers.sandbox.git import COMMIT_TREE, GIT, GIT_VARIABLES, OWNER, TRUST, TRUST_ALWAYS, ended
from workers.sandbox.protocol import Sandbox
from workers.sandbox.users import ROOT

SETUP_S = 1800.0  # limit for the setup script, which may install things
COMMIT_S = 300.0
TAIL_BYTES = 500

# Prevents pagers, progress bars and questions. A task's own variables take precedence.
ENVIRONMENT = {
    "PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_PAGER": "cat",
    "LESS": "-R",
    "GIT_TERMINAL_PROMPT": "0",
    "PIP_PROGRESS_BAR": "off",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "TQDM_DISABLE": "1",
    "DEBIAN_FRONTEND": "noninteractive",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}

PATCH = "/swerve-setup.diff"
MARK = "/swerve-git/settling"
NO_COMMIT = 73
DOES_NOT_APPLY = 74

# Applies PATCH if there is one, and commits whatever differs from HEAD.
SETTLE = f"""{GIT}{OWNER}{COMMIT_TREE}
git rev-parse -q --verify HEAD >/dev/null 2>&1 || exit {NO_COMMIT}
find_owner "$user"
[ "$owner" = 0:0 ] || {{ mark_time {MARK}; trap 'hand_over {MARK} "$user" || exit 1' EXIT; }}
if [ -e {PATCH} ]; then
  git apply --whitespace=nowarn {PATCH} || exit {DOES_NOT_APPLY}
  rm -f {PATCH}
fi
stage_all
tree=$(git write-tree) && head_tree=$(git rev-parse 'HEAD^{{tree}}') || exit 1
[ "$tree" = "$head_tree" ] && exit 0
commit=$(commit_tree "$tree" -p HEAD) && git update-ref HEAD "$commit"
"""


# pip fails at once without a network: the pauses between its retries cost eval scripts 7.5 s per package.
OFFLINE = {"PIP_RETRIES": "0"}


def environment(task: Task) -> dict[str, str]:
    """The environment variables of commands in a container of `task`."""
    return ENVIRONMENT | ({} if task.resources.network else OFFLINE) | task.env


def is_exact(request: RolloutRequest) -> bool:
    """Whether an agent is to find git as the image has it, because its file asks for upstream's behaviour."""
    return request.harness is None and bool(request.agent_config) and load_agent(request.agent_config).exact


def agent_environment(request: RolloutRequest) -> dict[str, str | None]:
    """The variables of an agent's commands. None: one that the image sets and that they do not get."""
    removed = () if is_exact(request) else GIT_VARIABLES
    return dict.fromkeys(removed) | environment(request.task)


async def set_up(sandbox: Sandbox, task: Task) -> None:
    """Run the task's setup, if it has one, and commit its changes.

    Raises SandboxError if the script fails, TaskBroken if the patch does not apply.
    """
    if task.setup_script.strip():
        if sandbox.user != ROOT:  # a user without a home of its own cannot say whom git may trust
            await sandbox.run(TRUST_ALWAYS, timeout_s=COMMIT_S, as_root=True)
        await _run_script(sandbox, task)
    if task.setup_patch.strip():
        await sandbox.put([File(path=PATCH, content=ended(task.setup_patch))])
    if task.setup_script.strip() or task.setup_patch.strip():
        await _commit_changes(sandbox, task)


async def _run_script(sandbox: Sandbox, task: Task) -> None:
    exports = "".join(f"export {name}={shlex.quote(text)}\n" for name, text in environment(task).items())
    result = await sandbox.run(TRUST + exports + task.setup_script, timeout_s=SETUP_S)
    if result.exit_code is None:
        raise SandboxError(
            f"setup_script of {task.id} took longer than {SETUP_S:.0f} s: {_tail(result.output)}"
        )
    if result.exit_code != 0:
        raise SandboxError(
            f"setup_script of {task.id} ended with status {result.exit_code}: {_tail(result.output)}"
        )


async def _commit_changes(sandbox: Sandbox, task: Task) -> None:
    command = f"user={sandbox.user}\n{SETTLE}"
    result = await sandbox.run(command, timeout_s=COMMIT_S, as_root=True)
    has_patch = bool(task.setup_patch.strip())
    if result.exit_code == 0 or (result.exit_code == NO_COMMIT and not has_patch):
        return
    if result.exit_code == NO_COMMIT:
        raise TaskBroken(f"setup_patch of {task.id}: {sandbox.workdir} is not a git repository with a commit")
    if result.exit_code == DOES_NOT_APPLY:
        raise TaskBroken(f"setup_patch of {task.id} does not apply: {_tail(result.output)}")
    raise SandboxError(
        f"committing the setup of {task.id} ended with status {result.exit_code}: {_tail(result.output)}"
    )


def _tail(output: bytes) -> str:
    return output[-TAIL_BYTES:].decode("utf-8", "replace").strip()
