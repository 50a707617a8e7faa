"""Rollouts as documents of ATIF, the Agent Trajectory Interchange Format that Harbor reads, versions 1.4 to 1.8.

Each turn is a step of the agent, with ids and log-probs as the engine reported them; nothing is tokenised again. A rollout of several
conversations has a document for each. A turn that several conversations share is a step of each of them, and has metrics in the first of
these documents only, so that every sampled token is in exactly one step. docs/rollouts.md says what becomes of each field.
"""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeline.agent.config import load_agent
from pipeline.artefacts import Json, chat_message, exit_status, model_name, patch_of, rollout_facts
from pipeline.chat import ChatMessage, ToolCall
from pipeline.errors import RequestError, shown_message
from pipeline.judge import Judgement
from pipeline.message import unpack_float32s, unpack_int32s
from pipeline.trajectory import (
    FIRST_IN_CONTEXT,
    Action,
    Failed,
    Trajectory,
    Turn,
    conversations_of,
    parents_of,
)
from trainer.rollouts.export_files import file_name, write_files

VERSIONS = ("1.4", "1.5", "1.6", "1.7", "1.8")
_MAX_DEPTH = 100  # of a call's arguments: pydantic refuses JSON that is nested 200 deep


class AtifDocuments:
    """`ID.json` for each request id, in which the documents of further conversations are embedded. Before 1.7, which brought embedding,
    these are `ID.conversation-2.json` and so on.
    """

    def __init__(self, directory: Path, *, version: str, with_prompts: bool) -> None:
        self.place = directory
        self._version, self._with_prompts = version, with_prompts

    def write(self, trajectory: Trajectory, judgement: Judgement | None) -> bool:
        scores = {} if judgement is None else judgement.scores
        prompts = _prompts(trajectory.turns) if self._with_prompts else None
        first, *others = _Rollout(trajectory, scores, prompts).documents()
        for document in (first, *others):
            _downgrade(document, self._version)
        if others and self._version >= "1.7":
            first["subagent_trajectories"] = others
            others = []
        name = file_name(trajectory.claim.request.id)
        files = {f"{name}.conversation-{number}.json": other for number, other in enumerate(others, 2)}
        files[f"{name}.json"] = first
        write_files(self.place, {path: f"{json.dumps(one)}\n".encode() for path, one in files.items()})
        return True


def _prompts(turns: Sequence[Turn]) -> list[bytes]:
    """The ids of the whole prompt of each turn, packed."""
    prompts, held = list[bytes](), list[bytes]()
    for turn, parent in zip(turns, parents_of(turns), strict=True):
        kept = b"" if parent == FIRST_IN_CONTEXT else held[parent][: 4 * turn.kept_tokens]
        prompts.append(kept + turn.fed)
        held.append(prompts[-1] + turn.sampled)
    return prompts


def _downgrade(document: Json, version: str) -> None:
    """Makes a document one of this version: younger fields are removed, and those with facts are put into an older `extra`."""
    document["schema_version"] = f"ATIF-v{version}"
    if version < "1.7":
        del document["trajectory_id"]
    for step in document["steps"] if version < "1.7" else ():
        extra = step.setdefault("extra", {})
        step.pop("llm_call_count", None)
        if results := step.get("observation", {}).get("results"):
            extra["results"] = [result.pop("extra", {}) for result in results]
        if version < "1.5" and "is_copied_context" in step:
            extra["is_copied_context"] = step.pop("is_copied_context")
    agent = document["agent"]
    if version < "1.5" and "tool_definitions" in agent:
        agent["extra"] = {"tool_definitions": agent.pop("tool_definitions")}


class _Rollout:
    """The documents of one rollout, of version 1.8. `prompts` is None if steps are written without the ids of their prompts."""

    def __init__(
        self, trajectory: Trajectory, scores: Mapping[int, float], prompts: Sequence[bytes] | None
    ) -> None:
        self._trajectory, self._turns = trajectory, trajectory.turns
        self._parents = parents_of(trajectory.turns)
        self._scores, self._prompts = scores, prompts

    def documents(self) -> list[Json]:
        """A document for each conversation. The first is that with the most turns that are not asides."""
        found = [*conversations_of(self._turns)] or [()]
        main = max(found, key=lambda numbers: sum(not self._turns[number].aside for number in numbers))
        found.remove(main)
        documents, seen = list[Json](), set[int]()
        for numbers in (main, *found):
            documents.append(self._document(numbers, seen, len(documents) + 1))
            seen |= {*numbers}
        return documents

    def _document(self, numbers: Sequence[int], seen: Set[int], conversation: int) -> Json:
        request_id, end = self._trajectory.claim.request.id, exit_status(self._trajectory.outcome)
        steps = [*self._steps(numbers, seen)] or [
            {"source": "system", "message": f"The episode ended before the policy was asked: {end}"}
        ]
        notes = " ".join(self._notes(numbers, seen))
        return {
            "schema_version": "",
            "session_id": request_id,
            "trajectory_id": request_id if conversation == 1 else f"{request_id}#{conversation}",
            "agent": _agent(self._trajectory),
            "steps": [{"step_id": number} | step for number, step in enumerate(steps, 1)],
            **({"notes": notes} if notes else {}),
            "final_metrics": {
                f"total_{kind}": sum(step.get("metrics", {}).get(kind, 0) for step in steps)
                for kind in ("prompt_tokens", "completion_tokens")
            }
            | {"total_steps": len(steps)},
            "extra": _facts(self._trajectory) | {"conversation": conversation},
        }

    def _notes(self, numbers: Sequence[int], seen: Set[int]) -> Iterator[str]:
        if self._trajectory.reward is None:
            yield "The rollout failed, so it has no reward."
        if cut := [number for number in numbers if self._is_cut(number)]:
            yield (
                f"The prompts of turns {cut} do not extend those before them, because parts of the context were removed: they begin "
                "with the first metrics.extra.kept_tokens tokens of what came before."
            )
        if copied := [number for number in numbers if number in seen]:
            yield f"Turns {copied} are copies; the document of an earlier conversation has their metrics."
        if asides := [number for number in numbers if self._turns[number].aside]:
            yield f"Turns {asides} are asides, which are never trained."

    def _is_cut(self, number: int) -> bool:
        turn, parent = self._turns[number], self._parents[number]
        if parent == FIRST_IN_CONTEXT:
            return False
        before = self._turns[parent]
        num_before = before.kept_tokens + (len(before.fed) + len(before.sampled)) // 4
        return turn.cut is not None or turn.kept_tokens < num_before

    def _steps(self, numbers: Sequence[int], seen: Set[int]) -> Iterator[Json]:
        told = self._turns[numbers[0]].told if numbers else ()
        for number, following in zip(numbers, (*numbers[1:], None), strict=False):
            calls = _calls(self._turns[number], number)
            results, rest = _results(calls, () if following is None else self._turns[following].told)
            step = self._turn_step(number, calls, results)
            if number not in seen:
                step |= {"metrics": self._metrics(number), "llm_call_count": 1}
            for one in (*map(_told_step, told), step):
                yield one | ({"is_copied_context": True} if number in seen else {})
            told = rest

    def _turn_step(self, number: int, calls: Sequence["_TurnCall"], results: Sequence[Json]) -> Json:
        turn = self._turns[number]
        extra: Json = {"turn": number, "after": self._parents[number], "stop": turn.stop}
        for name in ("finish_reason", "aside", "thread", "engine", "generate_s", "engine_wait_s"):
            if value := getattr(turn, name):
                extra[name] = value
        if turn.cut is not None:
            extra["cut"] = msgspec.to_builtins(turn.cut)
        if number in self._scores:
            extra["step_score"] = self._scores[number]
        step: Json = {"source": "agent", "message": turn.said.content, "extra": extra}
        if turn.asked_at:
            step["timestamp"] = datetime.fromtimestamp(turn.asked_at, UTC).isoformat()
        if turn.said.reasoning:
            step["reasoning_content"] = turn.said.reasoning
        if calls:
            step["tool_calls"] = [call.json for call in calls]
            if malformed := {call.id: call.wrote.arguments for call in calls if call.arguments is None}:
                extra["malformed_arguments"] = malformed
        if results:
            step["observation"] = {"results": results}
        return step

    def _metrics(self, number: int) -> Json:
        turn = self._turns[number]
        if turn.usage is not None and not turn.sampled:
            usage = turn.usage
            return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        extra: Json = {
            "kept_tokens": turn.kept_tokens,
            "fed_token_ids": list(unpack_int32s(turn.fed)),
            "repeated_tokens": turn.repeated_tokens,
            "versions": msgspec.to_builtins(turn.versions),
            "digest": turn.digest.hex(),
            "routing_bytes": len(turn.routing),
        }
        metrics: Json = {
            "prompt_tokens": turn.kept_tokens + len(turn.fed) // 4,
            "completion_tokens": len(turn.sampled) // 4,
            "completion_token_ids": list(unpack_int32s(turn.sampled)),
            "extra": extra,
        }
        if self._prompts is not None:
            metrics["prompt_token_ids"] = list(unpack_int32s(self._prompts[number]))
        logprobs = list(unpack_float32s(turn.logprobs))
        if all(map(isfinite, logprobs)):
            metrics["logprobs"] = logprobs
        else:  # JSON has no number for some of them
            extra["logprobs"] = [str(value) for value in logprobs]
        return metrics


def _agent(trajectory: Trajectory) -> Json:
    request = trajectory.claim.request
    agent: Json = {"name": "mini-swe-agent", "version": "unknown", "model_name": model_name(trajectory)}
    if request.harness is not None:
        return agent | {"name": request.harness.name, "version": request.harness.version}
    try:
        loaded = load_agent(request.agent_config)
    except RequestError:  # the rollout failed because of the agent's file
        return agent
    tools = {"tool_definitions": list(loaded.tools)} if loaded.tools else {}
    return agent | {"version": loaded.upstream} | tools


def _facts(trajectory: Trajectory) -> Json:
    """The facts for which ATIF has no field. The log of grading and the outcomes of tests are left out: they may quote hidden tests."""
    outcome, reward = trajectory.outcome, trajectory.reward
    facts = rollout_facts(trajectory) | {
        "exit_status": exit_status(outcome),
        "decided_by": None if reward is None else reward.decided_by,
        "control": None if reward is None else reward.control,
        "patch": patch_of(outcome).decode(errors="replace"),
    }
    if isinstance(outcome, Failed):
        facts["error"] = shown_message(outcome.boundary, outcome.message)
    return facts


class _TurnCall(NamedTuple):
    id: str
    wrote: ToolCall  # as the policy wrote it, perhaps without an id
    action: Action | None  # None: it led to none

    @property
    def arguments(self) -> Json | None:
        """None if the text is not a JSON object that every reader takes."""
        try:
            found = msgspec.json.decode(self.wrote.arguments, type=dict[str, Any])
            return found if _depth(found) <= _MAX_DEPTH else None
        except (msgspec.DecodeError, RecursionError):
            return None

    @property
    def json(self) -> Json:
        return {"tool_call_id": self.id, "function_name": self.wrote.name, "arguments": self.arguments or {}}

    def result(self, content: str) -> Json:
        result: Json = {"source_call_id": self.id, "content": content}
        if self.action is not None and (seen := self.action.observation) is not None:
            result["extra"] = {
                "exit_code": seen.exit_code,
                "dropped_chars": seen.dropped_chars,
                "wall_s": seen.wall_s,
            }
        return result


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _calls(turn: Turn, number: int) -> list[_TurnCall]:
    """The calls of turn `number`. A command in the text of a reply is a call of bash."""
    actions, found = list(turn.actions), list[tuple[ToolCall, Action | None]]()
    for call in turn.said.tool_calls:
        place = next((place for place, one in enumerate(actions) if one.tool_call_id == call.id), None)
        found.append((call, None if place is None else actions.pop(place)))
    for action in actions:
        arguments = msgspec.json.encode({"command": action.command}).decode()
        found.append((ToolCall(name="bash", arguments=arguments, id=action.tool_call_id), action))
    return [
        _TurnCall(call.id or f"turn-{number}-call-{place}", call, action)
        for place, (call, action) in enumerate(found)
    ]


def _results(
    calls: Sequence[_TurnCall], answers: Sequence[ChatMessage]
) -> tuple[list[Json], list[ChatMessage]]:
    """The results of calls, as the policy was shown them, and those of the messages after the reply that are none.

    A message with an id is the result of the call that has it; messages without one are the results of calls without one, in order.
    """
    waiting, results, rest = list(calls), list[Json](), list[ChatMessage]()
    for message in answers:
        is_result = message.role in ("user", "tool")
        call = next((one for one in waiting if is_result and one.wrote.id == message.tool_call_id), None)
        if call is None:
            rest.append(message)
        else:
            waiting.remove(call)
            results.append(call.result(message.content))
    for call in waiting:
        if call.action is not None and call.action.observation is not None:
            unshown = call.result(call.action.observation.output)
            results.append(unshown | {"extra": unshown["extra"] | {"was_shown": False}})
    return results, rest


def _told_step(message: ChatMessage) -> Json:
    """The step of a message to the policy that is no result of its last reply's calls. An agent program may send any role."""
    if message.role in ("system", "user"):
        return {"source": message.role, "message": message.content}
    source = "agent" if message.role == "assistant" else "user"
    whole = chat_message(message)
    return {"source": source, "message": whole.pop("content"), "extra": whole | {"was_sampled": False}}
