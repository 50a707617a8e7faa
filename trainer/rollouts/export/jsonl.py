"""Chats as JSON lines: plain, and for supervised fine-tuning with what is trained of each."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from pipeline.agent.config import load_agent
from pipeline.artefacts import chat, chat_message, rollout_facts
from pipeline.chat import ChatMessage
from pipeline.errors import RequestError
from pipeline.judge import Judgement
from pipeline.trajectory import Trajectory
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
    """A file with one JSON object a line, which appears when it is complete."""

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
        """False for a rollout that has no replies."""
        if not trajectory.turns:
            return False
        facts = rollout_facts(trajectory)
        row = self._row(trajectory) | _tools(trajectory) | {name: facts[name] for name in _FACTS}
        if judgement is not None:
            row["step_scores"] = step_scores(trajectory, judgement)
        self._file.write(json.dumps(row) + "\n")
        return True

    def _row(self, trajectory: Trajectory) -> dict[str, Any]:
        raise NotImplementedError


class Messages(JsonLines):
    """`messages` and nothing else but the facts of the rollout."""

    name = "messages.jsonl"

    def _row(self, trajectory: Trajectory) -> dict[str, Any]:
        return {"messages": chat(trajectory.turns)}


class FineTuning(JsonLines):
    """`messages` of which an assistant's have a `weight`, 1 if it is trained, and the same as tokens.

    `samples` has the tokens exactly as the engine held them, one sample per unbroken run: where the context was cut, the next one
    begins. `loss_mask` is 1 for each token that the policy drew. Without token ids, as of a foreign endpoint, it is empty.
    """

    name = "sft.jsonl"

    def _row(self, trajectory: Trajectory) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for turn in trajectory.turns:
            messages += [_weighted(message, 0) for message in turn.told]
            messages.append(_weighted(turn.said, 1))
        every_step = trajectory.claim.request.context.every_step
        samples = [
            {
                "token_ids": list(branch.tokens),
                "loss_mask": [int(trained) for trained in branch.trained],
                "logprobs": branch.logprobs,
            }
            for branch in branches(trajectory.turns, every_step=every_step)
        ]
        return {"messages": messages, "samples": samples}


def step_scores(trajectory: Trajectory, judgement: Judgement) -> list[float | None]:
    """The judge's score of each turn, None where it abstains."""
    return [judgement.scores.get(turn) for turn in range(len(trajectory.turns))]


def _weighted(message: ChatMessage, weight: int) -> dict[str, Any]:
    made = chat_message(message)
    return made | {"weight": weight} if message.role == "assistant" else made


def _tools(trajectory: Trajectory) -> dict[str, Any]:
    """The tools that the model was told of, if any: templates render them into the prompt."""
    try:
        tools = load_agent(trajectory.claim.request.agent_config).tools
    except RequestError:  # the agent's file is what the rollout failed of
        return {}
    return {"tools": list(tools)} if tools else {}
