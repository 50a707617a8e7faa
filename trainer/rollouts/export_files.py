"""Rollouts as text files that other tools read: in folders, mini-swe-agent's and those of the slime-based system that Swerve replaces;
and as JSON lines of chats, plain or for supervised fine-tuning with the trained parts marked.
"""

import json
import re
import zlib
from collections.abc import Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from msgspec.structs import asdict

from pipeline import artefacts
from pipeline.agent.config import load_agent
from pipeline.artefacts import chat, chat_message, rollout_facts
from pipeline.chat import ChatMessage
from pipeline.errors import RequestError
from pipeline.judge import Judgement
from pipeline.trajectory import Failed, Trajectory, Turn, conversations_of
from trainer.batching.samples import branches
from trainer.learner import directories

_FACTS = (
    "request_id",
    "task_id",
    "purpose",
    "group_id",
    "reward",
    "resolved",
    "outcome",
    "version_last",
    "num_cuts",
)


class JsonLines:
    """A file with one JSON object per line, which appears when it is complete."""

    name: ClassVar[str]

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.place = directory / self.name
        self._partial = self.place.with_name(f".{self.name}.partial")
        self._file = self._partial.open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is None:
            self._partial.replace(self.place)
            directories.sync(self.place.parent)
        else:
            self._partial.unlink(missing_ok=True)

    def write(self, trajectory: Trajectory, judgement: Judgement | None) -> bool:
        """Writes the rollout; returns False if it has no replies. Each of several conversations makes its own line."""
        facts = rollout_facts(trajectory)
        shared = _tools(trajectory) | {name: facts[name] for name in _FACTS}
        seen = set[int]()
        for numbers in conversations_of(trajectory.turns):
            row = self._row(trajectory, numbers, seen) | shared
            if judgement is not None:
                row["step_scores"] = [judgement.scores.get(number) for number in numbers]
            self._file.write(json.dumps(row) + "\n")
            seen |= {*numbers}
        return bool(seen)

    def _row(self, trajectory: Trajectory, numbers: Sequence[int], seen: Set[int]) -> dict[str, Any]:
        """The line of the conversation of the turns `numbers`; the turns in `seen` are in earlier lines too."""
        raise NotImplementedError


class Messages(JsonLines):
    """The field `messages` and the facts of the rollout, nothing else."""

    name = "messages.jsonl"

    def _row(self, trajectory: Trajectory, numbers: Sequence[int], seen: Set[int]) -> dict[str, Any]:
        del seen
        return {"messages": chat([trajectory.turns[number] for number in numbers])}


class FineTuning(JsonLines):
    """The field `messages`, in which an assistant's messages have a `weight` that is 1 in the one line in which it is trained, and the same
    as tokens.

    `samples` contains the tokens exactly as the engine held them, one sample per unbroken run: the next one begins where the context was
    cut. A rollout's first line has the samples of all its conversations. `loss_mask` is 1 for each trained token. Without token ids, as
    from a foreign endpoint, `samples` is empty.
    """

    name = "sft.jsonl"

    def _row(self, trajectory: Trajectory, numbers: Sequence[int], seen: Set[int]) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for number in numbers:
            turn = trajectory.turns[number]
            messages += [_weighted(message, 0) for message in turn.told]
            messages.append(_weighted(turn.said, int(number not in seen and not turn.aside)))
        every_step = trajectory.claim.request.context.every_step
        samples = [
            {
                "token_ids": list(branch.tokens),
                "loss_mask": [int(trained) for trained in branch.trained],
                "logprobs": branch.logprobs,
            }
            for branch in branches(() if seen else trajectory.turns, every_step=every_step)
        ]
        return {"messages": messages, "samples": samples}


def step_scores(trajectory: Trajectory, judgement: Judgement) -> list[float | None]:
    """The judge's score of each turn, None where it abstains."""
    return [judgement.scores.get(turn) for turn in range(len(trajectory.turns))]


def _weighted(message: ChatMessage, weight: int) -> dict[str, Any]:
    made = chat_message(message)
    return made | {"weight": weight} if message.role == "assistant" else made


def _tools(trajectory: Trajectory) -> dict[str, Any]:
    """The tools that the model was offered, if any: templates render them into the prompt."""
    try:
        tools = load_agent(trajectory.claim.request.agent_config).tools
    except RequestError:  # the rollout failed because of the agent's file
        return {}
    return {"tools": list(tools)} if tools else {}


SLIME_FORMAT = "slime-mini-swe-remote-1"

_UNSAFE = re.compile(r"[^A-Za-z0-9._+=@-]+")


class MiniFolders:
    """`ID/ID.traj.json` for each request id, in mini-swe-agent's format 1.1."""

    def __init__(self, directory: Path) -> None:
        self.place = directory

    def write(self, trajectory: Trajectory, judgement: Judgement | None) -> bool:
        del judgement  # these formats have no field for one
        name = file_name(trajectory.claim.request.id)
        write_files(
            self.place / name,
            {f"{name}.traj.json": artefacts.dump(artefacts.trajectory_json(trajectory)).encode()},
        )
        return True


class SlimeFolders:
    """`INSTANCE__NANOSECONDS/` with `traj.json`, `patch.diff` and `meta.json`, without the known fix, which the older system put into the
    last."""

    def __init__(self, directory: Path) -> None:
        self.place = directory

    def write(self, trajectory: Trajectory, judgement: Judgement | None) -> bool:
        del judgement  # these formats have no field for one
        request = trajectory.claim.request
        files = {
            "traj.json": artefacts.dump(_slime_trajectory(trajectory)).encode(),
            "patch.diff": artefacts.patch_of(trajectory.outcome),
            "meta.json": artefacts.dump(_slime_meta(trajectory)).encode(),
        }
        name = file_name(artefacts.instance_id(request.task.id))
        write_files(self.place / f"{name}__{_nanoseconds(trajectory)}", files)
        return True


def file_name(name: str) -> str:
    """A name that is safe as a file's: no separators, no leading dot."""
    return _UNSAFE.sub("_", name).lstrip(".") or "_"


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Writes files, each of which appears when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        partial = folder / f".{name}.partial"
        partial.write_bytes(content)
        partial.replace(folder / name)


def _nanoseconds(trajectory: Trajectory) -> int:
    """Returns when it finished, in Unix nanoseconds. The last three digits come from its id: two trajectories hardly ever share a folder,
    and a repeated export uses the same one.
    """
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
