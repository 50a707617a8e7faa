"""Plays the scenes of an agent file through the real package and through our loop, and says where the messages differ."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.agent.config import AgentConfig, load_agent
from pipeline.agent.files import merged, recursive_merge, to_text
from tests.workers.agent.episode import HANGING_S, own_environment
from tests.workers.agent.fidelity import ours, scenes, upstream
from tests.workers.agent.fidelity.packages import directory_of
from tests.workers.agent.fidelity.scenes import Scene

SHOWN_CHARS = 60  # round the first character that differs
# How replies of the text dialect give a command.
ACTS = (
    "THOUGHT: let us see.\n\n```bash\n{}\n```\nThat is it.",
    "THOUGHT: let us see.\n\n```mswea_bash_command\n{}\n```",
    "<bash_code>\n{}\n</bash_code>",
    "I see. <mswea_bash_command>\n{}\n</mswea_bash_command>",
)
CALC = "def add(a, b):\n    return a - b\n"


@dataclass(frozen=True, slots=True)
class AgentFile:
    """An agent file of a version of mini-swe-agent, with what is merged into it."""

    version: str
    specs: tuple[str, ...]

    def tree(self, values: Sequence[str], repository: Path) -> dict[str, Any]:
        swerve = {"swerve": {"exact": True, "upstream": self.version}}
        return recursive_merge(merged([*self.specs, f"environment.cwd={repository}", *values]), swerve)


def scenes_of(file: AgentFile, repository: Path) -> list[Scene]:
    """The scenes of the file's dialect. Raises RequestError for a file that cannot be used."""
    config = load_agent(to_text(file.tree((), repository)))
    if config.dialect == "tool_calls":
        return scenes.tool_scenes()
    act = act_of(config)
    return scenes.text_scenes(
        lambda command: act.replace("{}", command), has_time_limit=config.upstream == "2.4"
    )


def act_of(config: AgentConfig) -> str:
    return next(act for act in ACTS if config.action.findall(act) in (["{}"], ["\n{}\n"]))


def differences(file: AgentFile, chosen: Sequence[Scene], repository: Path) -> Iterator[str]:
    """A line for each scene in which upstream and we differ."""
    given = [given_scene(file, scene, repository) for scene in chosen]
    theirs = upstream_plays(file.version, given)
    for scene, one, their in zip(chosen, given, theirs, strict=True):
        our = asyncio.run(ours.play_scene(one, repository))
        if was_too_busy(scene, our, their):
            yield from differences(file, [replace(scene, command_s=2 * (scene.command_s or 1))], repository)
        elif found := first_difference(our, their):
            yield f"{scene.name}: {found}"


def was_too_busy(scene: Scene, *played: dict[str, Any]) -> bool:
    """Whether a command was ended before it could print what the scene is about, and may be given twice the time."""
    all_printed = all(scene.prints in json.dumps(one["sent"]) for one in played)
    return not all_printed and (scene.command_s or 1) < scenes.MOST_COMMAND_S


def refused_by_us_alone(file: AgentFile, repository: Path) -> str:
    """Why a file that we refuse is a difference: upstream opens an episode with it. "" if upstream cannot either."""
    scene = {"config": file.tree((), repository), "dialect": "text", "task": scenes.TASK, "replies": []}
    [played] = upstream_plays(file.version, [scene])
    return "" if "error" in played else "upstream plays it"


def given_scene(file: AgentFile, scene: Scene, repository: Path) -> dict[str, Any]:
    limits = () if scene.command_s is None else (f"environment.timeout={scene.command_s}",)
    config = file.tree((*scene.values, *limits), repository)
    dialect = load_agent(to_text(config)).dialect
    return {"config": config, "dialect": dialect, "task": scenes.TASK, "replies": scene.replies}


def upstream_plays(version: str, given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the real package sends."""
    environment = own_environment() | {
        "PYTHONPATH": str(directory_of(version)),
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": "/nonexistent/mini-swe-agent",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-P", upstream.__file__],
        input=json.dumps(given),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGING_S * len(given),
    )
    if done.returncode != 0:
        raise RuntimeError(f"mini-swe-agent {version}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def message_difference(our: Sequence[dict[str, Any]], their: Sequence[dict[str, Any]]) -> str:
    """The first place where two lists of messages differ; "" if they are the same byte for byte."""
    for place, (mine, other) in enumerate(zip(our, their, strict=False), 1):
        left, right = _comparable(mine), _comparable(other)
        if left != right:
            key = next(key for key in (*left, *right) if left.get(key) != right.get(key))
            texts = _around(str(left.get(key)), str(right.get(key)))
            return f"message {place} ({right.get('role')}), {key}: {texts}"
    return f"{len(our)} messages where upstream sends {len(their)}" if len(our) != len(their) else ""


def first_difference(our: dict[str, Any], their: dict[str, Any]) -> str:
    """The first place where two plays of a scene differ; "" if they are the same byte for byte."""
    for number, (mine, other) in enumerate(zip(our["sent"], their["sent"], strict=False), 1):
        if found := message_difference(mine, other):
            return f"query {number}, {found}"
    for number, (mine, other) in enumerate(zip(our["asked"], their["asked"], strict=False), 1):
        if mine != other:
            return f"query {number}, fields: {_around(str(mine), str(other))}"
    for key in ("ended", "submission"):
        if our[key] != their[key]:
            return f"{key}: {_around(our[key], their[key])}"
    if len(our["sent"]) != len(their["sent"]):
        return f"{len(our['sent'])} queries where upstream sends {len(their['sent'])}"
    return ""


def _comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Upstream's stand-in leaves out what a reply has not, our messages have it empty."""
    return {key: value for key, value in message.items() if value not in (None, "", [])}


def _around(left: str, right: str) -> str:
    """Both texts near the first character in which they differ."""
    pairs = enumerate(zip(left, right, strict=False))
    at = next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))
    start = max(at - SHOWN_CHARS, 0)
    return f"{left[start : at + SHOWN_CHARS]!r} where upstream has {right[start : at + SHOWN_CHARS]!r}"
