"""An agent file tried on a task before anything starts: its opening messages, and what looks wrong with them."""

import re
from collections.abc import Iterator
from typing import Final

from pipeline.agent.config import AgentConfig
from pipeline.request import Limits
from pipeline.task import Task

# An absolute path that is a word of its own: no closing tag, no part of a URL, of "and/or" or of an expression.
_PATH: Final = re.compile(r"(?<![\w<:/.}*~\\-])/[A-Za-z_][\w.-]*(?:/[\w.-]+)*")
# Where repositories commonly are.
_USUAL: Final = ("/testbed", "/workspace", "/app", "/repo")
# Paths of the operating system, and those that stand for any other.
_NO_WORKDIR: Final = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/path", "/proc", "/root/.", "/sbin", "/sys", "/tmp", "/usr", "/var",
)  # fmt: skip
_ABOUT_PLACES: Final = re.compile(
    r"director|folder|repositor|code ?base|checked out|located|\bcd\b", re.IGNORECASE
)


def example(config: AgentConfig, task: Task, limits: Limits) -> tuple[str, str]:
    """The system message and the first user message of an episode of `task`. Raises RequestError."""
    return config.opening(_live(config, task, limits, problem=task.problem))


def doubts(config: AgentConfig, task: Task, limits: Limits) -> list[str]:
    """What an agent file says that does not hold for this task, each as a sentence."""
    workdir = task.workdir
    if not workdir:
        return []
    found: list[str] = []
    if config.cwd and config.cwd != workdir:
        where = f"commands start in {config.cwd}" if config.exact else f"commands start in {workdir}"
        found.append(
            f"environment.cwd is {config.cwd}, the directory of task {task.id} is {workdir}: {where}"
        )
    text = "\n".join(config.opening(_live(config, task, limits, problem="")))
    found += [
        f"the prompt names the directory {place}, but task {task.id} is in {workdir}; write {{{{cwd}}}} there"
        for place in dict.fromkeys(_places(text, workdir, config.cwd))
    ]
    return found


def _places(text: str, workdir: str, cwd: str | None) -> Iterator[str]:
    """Directories other than `workdir` that the text speaks of as the place to work in."""
    usual = {*_USUAL, *([cwd] if cwd else [])}
    for line in text.splitlines():
        for path in _PATH.findall(line):
            place = path.rstrip(".")
            if _is_in(place, workdir) or _is_in(workdir, place) or place.startswith(_NO_WORKDIR):
                continue
            root = next((one for one in sorted(usual) if _is_in(place, one)), None)
            if root is not None or _ABOUT_PLACES.search(line):
                yield root or place


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _live(config: AgentConfig, task: Task, limits: Limits, *, problem: str) -> dict[str, object]:
    return {
        "task": problem,
        "cwd": task.workdir,
        "timeout": int(min(limits.command_s, config.command_s or limits.command_s)),
        "step_limit": min(limits.turns, config.step_limit or limits.turns),
        "n_model_calls": 0,
        "model_cost": 0.0,
        "elapsed_seconds": 0,
        "image": task.image,
    }
