"""Responses, OpenAI's newer dialect, which Codex uses.

Its conversations are lists of items instead of messages, so a reply is sent back as several items, which `conversations.py` recognises one
by one. The server stores no state to which a program could refer: the program sends its whole conversation each time.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from pipeline.chat import ChatMessage, Role, ToolCall
from workers.foreign.conversations import ChatPiece
from workers.foreign.dialect import Answer, Asked, event, openai_refusal
from workers.foreign.fields import (
    Json,
    RequestRefused,
    content_in,
    flag_in,
    limit_in,
    objects_in,
    printed,
    text_in,
)
from workers.foreign.tools import FREE_TEXT, ToolSet, arguments_object, read_responses_tools

_TEXTS = frozenset({"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"})
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_CALLS = frozenset({"function_call", "custom_tool_call"})
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})


class ResponsesDialect:
    """`/v1/responses`."""

    path = "responses"

    def read(self, body: Json) -> Asked:
        for name in ("previous_response_id", "conversation", "prompt"):
            if body.get(name) is not None:
                raise RequestRefused(f"{name} is not supported: send the whole conversation")
        if flag_in(body, "background"):
            raise RequestRefused("background is not supported")
        tools = read_responses_tools(body)
        instructions = text_in(body, "instructions")
        pieces = [ChatPiece("system", instructions)] if instructions else []
        pieces += _items(body, tools)
        return Asked(
            tuple(pieces),
            tools,
            text_in(body, "model")[:200],
            flag_in(body, "stream"),
            max_new_tokens=limit_in(body, "max_output_tokens"),
        )

    def sendable(self, said: ChatMessage, asked: Asked) -> ChatMessage:
        return said

    def whole(self, answer: Answer, asked: Asked) -> Json:
        reason = {"reason": "max_output_tokens"} if answer.is_cut else None
        return {
            **_head(answer, asked),
            "status": "incomplete" if answer.is_cut else "completed",
            "incomplete_details": reason,
            "output": list(_output(answer, asked)),
            "usage": _usage(answer),
        }

    def events(self, answer: Answer, asked: Asked) -> Iterator[bytes]:
        for number, data in enumerate(self._events(answer, asked)):
            yield event({**data, "sequence_number": number}, name=data["type"])

    def _events(self, answer: Answer, asked: Asked) -> Iterator[dict[str, Any]]:
        begun: dict[str, Any] = {**_head(answer, asked), "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        for index, item in enumerate(_output(answer, asked)):
            yield from _item_events(index, item)
        ending = "response.incomplete" if answer.is_cut else "response.completed"
        yield {"type": ending, "response": self.whole(answer, asked)}

    def refusal(self, refused: RequestRefused) -> Json:
        return openai_refusal(refused)

    def refusal_event(self, refused: RequestRefused) -> bytes:
        error = cast(dict[str, Any], openai_refusal(refused)["error"])
        failed = {"code": error["code"] or "invalid_prompt", "message": error["message"]}
        response: dict[str, Any] = {"object": "response", "status": "failed", "error": failed, "output": []}
        return event({"type": "response.failed", "response": response}, name="response.failed")


def _items(body: Json, tools: ToolSet) -> Iterator[ChatPiece]:
    """Yields the pieces of the input. A thought belongs to the text or the call that follows it."""
    if isinstance(body.get("input"), str):
        yield ChatPiece("user", text_in(body, "input"))
        return
    thought = ""
    for item in objects_in(body, "input"):
        if text_in(item, "type") == "reasoning":
            thought += content_in(item, "content", _TEXTS) or content_in(item, "summary", _TEXTS)
            continue
        piece = _piece(item, tools)
        if thought and piece.role != "assistant":
            yield ChatPiece("assistant", thought=thought)
        elif thought:
            piece = replace(piece, thought=thought)
        thought = ""
        yield piece
    if thought:
        yield ChatPiece("assistant", thought=thought)


def _piece(item: Json, tools: ToolSet) -> ChatPiece:
    kind = text_in(item, "type")
    if kind in _CALLS:
        name = tools.flat_name(text_in(item, "namespace"), text_in(item, "name"))
        written = text_in(item, "arguments")
        if kind == "custom_tool_call":
            written = printed({FREE_TEXT: text_in(item, "input")})
        return ChatPiece(
            "assistant", call=ToolCall(name=name, arguments=written, id=text_in(item, "call_id"))
        )
    if kind in _RESULTS:
        return ChatPiece("tool", content_in(item, "output", _TEXTS), call_id=text_in(item, "call_id"))
    role = text_in(item, "role")
    if kind not in ("", "message") or role not in _ROLES:
        raise RequestRefused(
            f"an item of the type {(kind or role)[:80]!r} is not supported: the policy reads text and calls only"
        )
    return ChatPiece(_ROLES[role], content_in(item, "content", _TEXTS))


def _output(answer: Answer, asked: Asked) -> Iterator[dict[str, Any]]:
    """Yields the items of a reply. An empty reply becomes a message without text."""
    said, number = answer.said, answer.number
    if said.reasoning:
        summary = [{"type": "summary_text", "text": said.reasoning}]
        yield {"type": "reasoning", "id": f"rs_{number}", "summary": summary, "encrypted_content": None}
    if said.content or not (said.reasoning or said.tool_calls):
        part: dict[str, Any] = {"type": "output_text", "text": said.content, "annotations": []}
        head = {"type": "message", "id": f"msg_{number}", "status": "completed", "role": "assistant"}
        yield {**head, "content": [part]}
    for place, call in enumerate(said.tool_calls):
        yield _call(call, f"fc_{number}_{place}", asked.tools)


def _call(call: ToolCall, identity: str, tools: ToolSet) -> dict[str, Any]:
    namespace, name = tools.parted_name(call.name)
    item: dict[str, Any] = {"id": identity, "call_id": call.id, "status": "completed", "name": name}
    if namespace:
        item["namespace"] = namespace
    if call.name in tools.free_text:
        written = (arguments_object(call.arguments) or {}).get(FREE_TEXT)
        text = written if isinstance(written, str) else call.arguments
        return {"type": "custom_tool_call", **item, "input": text}
    return {"type": "function_call", **item, "arguments": call.arguments}


_LIST_FIELDS = {"reasoning": "summary", "message": "content"}
_TEXT_FIELDS = {"function_call": "arguments", "custom_tool_call": "input"}
_DELTAS = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one item: added empty, filled, done."""
    kind, place = item["type"], {"output_index": index, "item_id": item["id"]}
    field = _TEXT_FIELDS.get(kind)
    emptied: dict[str, Any] = {field: ""} if field is not None else {_LIST_FIELDS[kind]: []}
    yield {
        "type": "response.output_item.added",
        "output_index": index,
        "item": {**item, "status": "in_progress", **emptied},
    }
    if field is not None:
        prefix = f"response.{_DELTAS[kind]}"
        yield {"type": f"{prefix}.delta", **place, "delta": item[field]}
        yield {"type": f"{prefix}.done", **place, field: item[field]}
    elif kind == "message":
        yield from _text_events(item["content"][0], place)
    else:
        yield from _thought_events(item["summary"][0], place)
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _text_events(part: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    at = {**place, "content_index": 0}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
    yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **at, "part": part}


def _thought_events(part: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    at, prefix = {**place, "summary_index": 0}, "response.reasoning_summary"
    yield {"type": f"{prefix}_part.added", **at, "part": {**part, "text": ""}}
    yield {"type": f"{prefix}_text.delta", **at, "delta": part["text"]}
    yield {"type": f"{prefix}_text.done", **at, "text": part["text"]}
    yield {"type": f"{prefix}_part.done", **at, "part": part}


def _head(answer: Answer, asked: Asked) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": asked.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
    }
