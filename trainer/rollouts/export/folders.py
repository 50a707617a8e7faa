"""Rollouts as files in folders: mini-swe-agent's, and those of the slime-based system that Swerve replaces."""

import re
import zlib
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from pipeline import artefacts
from pipeline.judge import Judgement
from pipeline.trajectory import Failed, Trajectory, Turn

SLIME_FORMAT = "slime-mini-swe-remote-1"

_UNSAFE = re.compile(r"[^A-Za-z0-9._+=@-]+")


class MiniFolders:
    """`ID/ID.traj.json` for each request id, in mini-swe-agent's format 1.1."""

    def __init__(self, directory: Path) -> None:
        self.place = directory

    def write(self, trajectory: Trajectory, judgement: Judgement | None) -> bool:
        del judgement  # these formats have no place for one
        name = file_name(trajectory.claim.request.id)
        _write(
            self.place / name,
            {f"{name}.traj.json": artefacts.dump(artefacts.trajectory_json(trajectory)).encode()},
        )
        return True


class SlimeFolders:
    """`INSTANCE__NANOSECONDS/` with `traj.json`, `patch.diff` and `meta.json`, without the known fix that used to be in the last."""

    def __init__(self, directory: Path) -> None:
        self.place = directory

    def write(self, trajectory: Trajectory, judgement: Judgement | None) -> bool:
        del judgement  # these formats have no place for one
        request = trajectory.claim.request
        files = {
            "traj.json": artefacts.dump(_slime_trajectory(trajectory)).encode(),
            "patch.diff": artefacts.patch_of(trajectory.outcome),
            "meta.json": artefacts.dump(_slime_meta(trajectory)).encode(),
        }
        name = file_name(artefacts.instance_id(request.task.id))
        _write(self.place / f"{name}__{_nanoseconds(trajectory)}", files)
        return True


def file_name(name: str) -> str:
    """A name that is safe as a file's: no separators, no leading dot."""
    return _UNSAFE.sub("_", name).lstrip(".") or "_"


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        partial = folder / f".{name}.partial"
        partial.write_bytes(content)
        partial.replace(folder / name)


def _nanoseconds(trajectory: Trajectory) -> int:
    """When it finished. The last digits are of its id, so that two never share a folder and an export repeated finds its own."""
    return int(trajectory.finished_at * 1e6) * 1000 + zlib.crc32(trajectory.claim.request.id.encode()) % 1000


def _slime_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    request, outcome, reward = trajectory.claim.request, trajectory.outcome, trajectory.reward
    return {
        "messages": artefacts.chat(trajectory.turns),
        "step_debug": [_step(number, turn) for number, turn in enumerate(trajectory.turns, 1)],
        "info": {
            "instance_id": artefacts.instance_id(request.task.id),
            "exit_status": artefacts.exit_status(outcome),
            "error": outcome.message if isinstance(outcome, Failed) else None,
            "steps": len(trajectory.turns),
            "patch_source": artefacts.patch_source(outcome) or None,
            "reward": None if reward is None else reward.value,
            "eval_result": None
            if reward is None
            else {"resolved": reward.resolved, "decided_by": reward.decided_by, "elapsed": reward.grade_s},
            "group_index": request.group_id,
            "index": request.member,
            "swerve": artefacts.rollout_facts(trajectory),
        },
        "trajectory_format": SLIME_FORMAT,
    }


def _step(number: int, turn: Turn) -> dict[str, Any]:
    seen = [action.observation for action in turn.actions]
    return {
        "step": number,
        "commands": [action.command for action in turn.actions],
        "returncodes": [
            None if one is None else -1 if one.exit_code is None else one.exit_code for one in seen
        ],
        "finish_reason": "stop" if turn.stop == "stop" else "length",
        "context_tokens": turn.kept_tokens + len(turn.fed) // 4,
        "sampled_tokens": len(turn.sampled) // 4,
        "generate_s": turn.generate_s,
    }


def _slime_meta(trajectory: Trajectory) -> dict[str, Any]:
    request = trajectory.claim.request
    opening = trajectory.turns[0].told if trajectory.turns else ()
    return {
        "instance_id": artefacts.instance_id(request.task.id),
        "sampling_params": asdict(request.sampling),
        "sample_metadata": {
            "task_id": request.task.id,
            "repo": request.task.repo,
            "base_commit": request.task.base_commit,
            "image": request.task.image,
            "workdir": request.task.workdir,
            "problem_statement": request.task.problem,
        },
        "sample_prompt": [artefacts.chat_message(message) for message in opening],
        "group_index": request.group_id,
        "index": request.member,
    }
