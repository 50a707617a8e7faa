"""A trajectory in the formats that other tools read: mini-swe-agent's traj.json and preds.json, messages of a chat.

Everything here is made from what the policy was shown, said and did, and from the end of the episode. Nothing of the known fix, the
hidden tests or the log of grading is read, so a file made of it can be shown to anybody who may see the problem.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pipeline.chat import ChatMessage
from pipeline.errors import shown_message
from pipeline.request import RolloutRequest
from pipeline.trajectory import Action, Exhausted, Failed, Outcome, Submitted, Trajectory, Turn, outcome_tag
from pipeline.weights import version_name

TRAJECTORY_FORMAT = "mini-swe-agent-1.1"

Json = dict[str, Any]

# The source of the patch; "": no patch.
PatchSource = Literal["", "submission", "git_diff_fallback"]

_LIMITS = {
    "turns": "LimitsExceeded",
    "wall_s": "TimeExceeded",
    "format_errors": "RepeatedFormatError",
    "context": "ContextWindowExceededError",
    "sandbox": "SandboxRuined",
}
_FAILURES = {
    "sandbox": "SandboxError",
    "engine": "EngineError",
    "harness": "HarnessError",
    "grader": "GraderError",
    "request": "RequestError",
    "worker": "WorkerError",
}


def exit_status(outcome: Outcome) -> str:
    """The end of the episode under mini-swe-agent's names, or under ours where mini-swe-agent has none."""
    match outcome:
        case Submitted():
            return "Submitted"
        case Exhausted(limit=limit):
            return _LIMITS[limit]
        case Failed(boundary=boundary):
            return _FAILURES[boundary]


def patch_of(outcome: Outcome) -> bytes:
    """The patch that was graded; empty if the episode failed."""
    return b"" if isinstance(outcome, Failed) else outcome.patch


def patch_source(outcome: Outcome) -> PatchSource:
    if not patch_of(outcome).strip():
        return ""
    printed = isinstance(outcome, Submitted) and not outcome.from_tree
    return "submission" if printed else "git_diff_fallback"


def instance_id(task_id: str) -> str:
    """The id of the task in the data set that it was imported from: "swe-gym:repo__name-1" -> "repo__name-1"."""
    source, colon, instance = task_id.partition(":")
    return instance if colon and instance else source


def model_name(trajectory: Trajectory) -> str:
    """The name of the policy that replied: the endpoint's model, or RUN@VERSION of the newest weights that sampled a token."""
    request = trajectory.claim.request
    if request.endpoint is not None:
        return request.endpoint.model
    versions = [span.version for turn in trajectory.turns for span in turn.versions]
    return version_name(request.run_id, max(versions, default=request.version_at_enqueue))


def chat_message(message: ChatMessage) -> Json:
    """The message as OpenAI's API writes it; thoughts are `reasoning_content`."""
    made: Json = {"role": message.role, "content": message.content}
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        made["tool_call_id"] = message.tool_call_id
    return made


def chat(turns: Sequence[Turn]) -> list[Json]:
    """All messages in order, each once: the messages that the policy was shown, and its replies.

    Messages that a later cut removed from its context are included.
    """
    return [chat_message(message) for turn in turns for message in (*turn.told, turn.said)]


def trajectory_json(trajectory: Trajectory) -> Json:
    """The content of mini-swe-agent 2's `ID.traj.json`, with fields of our own under `info.swerve`."""
    request, outcome = trajectory.claim.request, trajectory.outcome
    submission = patch_of(outcome).decode(errors="replace")
    info: Json = {
        "model_stats": {"instance_cost": 0.0, "api_calls": len(trajectory.turns)},
        "config": _config(request, model_name(trajectory)),
        "exit_status": exit_status(outcome),
        "submission": submission,
        "swerve": rollout_facts(trajectory),
    }
    if isinstance(outcome, Failed):
        info["exception_str"] = shown_message(outcome.boundary, outcome.message)
    end = {
        "role": "exit",
        "content": submission if isinstance(outcome, Submitted) else exit_status(outcome),
        "extra": {"exit_status": exit_status(outcome), "submission": submission},
    }
    return {
        "info": info,
        "messages": [*_annotated(trajectory.turns), end],
        "trajectory_format": TRAJECTORY_FORMAT,
        "instance_id": instance_id(request.task.id),
    }


def prediction(instance: str, patch: bytes, *, model: str) -> Json:
    """The row of `preds.json` under the instance id."""
    return {
        "model_name_or_path": model,
        "instance_id": instance,
        "model_patch": patch.decode(errors="replace"),
    }


def rollout_facts(trajectory: Trajectory) -> Json:
    """The facts that distinguish one rollout from another, without its text. A reward of None: it was not graded."""
    request, reward = trajectory.claim.request, trajectory.reward
    versions = [span.version for turn in trajectory.turns for span in turn.versions]
    return {
        "request_id": request.id,
        "run_id": request.run_id,
        "purpose": request.purpose,
        "task_id": request.task.id,
        "group_id": request.group_id,
        "member": request.member,
        "outcome": outcome_tag(trajectory.outcome),
        "patch_source": patch_source(trajectory.outcome),
        "from_tree": trajectory.outcome.from_tree if isinstance(trajectory.outcome, Submitted) else "",
        "reward": None if reward is None else reward.value,
        "resolved": None if reward is None else reward.resolved,
        "version_first": min(versions, default=None),
        "version_last": max(versions, default=None),
        "sampled_tokens": sum(_num_sampled(turn) for turn in trajectory.turns),
        "num_cuts": sum(turn.cut is not None for turn in trajectory.turns),
        "attempt": trajectory.claim.attempt,
        "started_at": trajectory.started_at,
        "finished_at": trajectory.finished_at,
    }


def _num_sampled(turn: Turn) -> int:
    if turn.sampled or turn.usage is None:
        return len(turn.sampled) // 4
    return turn.usage.completion_tokens


def _config(request: RolloutRequest, model: str) -> Json:
    """The part of mini-swe-agent's configuration with the limits and the sampling of the episode."""
    sampling, limits = request.sampling, request.limits
    asked: Json = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
    }
    return {
        "agent": {"step_limit": limits.turns, "wall_time_limit_seconds": limits.wall_s},
        "model": {
            "model_name": model,
            "model_kwargs": asked if request.endpoint is None else request.endpoint.options,
        },
        "environment": {
            "image": request.task.image,
            "cwd": request.task.workdir,
            "timeout": limits.command_s,
        },
    }


def _annotated(turns: Sequence[Turn]) -> list[Json]:
    """The messages with mini-swe-agent's `extra`: the actions of a reply, and the output that a message shows.

    A reply that was removed from the context as a format error is not a message, as in upstream; the message about it quotes it.
    """
    messages: list[Json] = []
    before: Turn | None = None
    for turn in turns:
        told = _told(turn.told, before)
        if turn.cut is not None and turn.cut.forgot_reply:
            forgotten = messages.pop()
            told[0]["extra"]["model_response"] = forgotten["content"]
        messages += told
        extra: Json = {"actions": [_action(action) for action in turn.actions], "cost": 0.0}
        if turn.cut is not None:
            extra["num_omitted"] = turn.cut.num_omitted
        messages.append({**chat_message(turn.said), "extra": extra})
        before = turn
    if before is not None:
        messages += _unshown(before)
    return messages


def _told(told: Sequence[ChatMessage], before: Turn | None) -> list[Json]:
    """The messages after the turn `before`; None: the opening messages."""
    messages = [chat_message(message) for message in told]
    if before is None:
        return messages
    if not before.actions:
        return [{**message, "extra": {"interrupt_type": "FormatError"}} for message in messages]
    for place, (message, told_one) in enumerate(zip(messages, told, strict=True)):
        action = _action_told_by(told_one, place, before.actions)
        if action is not None and action.observation is not None:
            message["extra"] = _output(action)
    return messages


def _action_told_by(message: ChatMessage, place: int, actions: Sequence[Action]) -> Action | None:
    """The action whose output the message shows: by the id of its tool call, or else by the message's index."""
    if message.tool_call_id:
        for action in actions:
            if action.tool_call_id == message.tool_call_id:
                return action
    return actions[place] if place < len(actions) else None


def _unshown(last: Turn) -> list[Json]:
    """The outputs of the last reply's commands. The episode ended before any template made messages of them."""
    return [
        {
            **(
                {"role": "tool", "tool_call_id": action.tool_call_id}
                if action.tool_call_id
                else {"role": "user"}
            ),
            "content": action.observation.output,
            "extra": {**_output(action), "was_shown": False},
        }
        for action in last.actions
        if action.observation is not None
    ]


def _action(action: Action) -> Json:
    return {"command": action.command} | (
        {"tool_call_id": action.tool_call_id} if action.tool_call_id else {}
    )


def _output(action: Action) -> Json:
    seen = action.observation
    assert seen is not None
    return {
        "raw_output": seen.output,
        "returncode": -1 if seen.exit_code is None else seen.exit_code,
        "dropped_chars": seen.dropped_chars,
        "wall_s": seen.wall_s,
    }


def dump(value: Json) -> str:
    """The value as indented JSON, as mini-swe-agent writes its files. Lone surrogates, which a policy can write, are escaped."""
    return json.dumps(value, indent=2)
