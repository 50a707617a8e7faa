"""Chat completions, OpenAI's older dialect: OpenCode, Qwen Code, Pi, mini-swe-agent, OpenHands and aider use it."""

import time
from collections.abc import Iterator
from typing import Any

from pipeline.chat import ChatMessage, Role, ToolCall
from workers.foreign.conversations import ChatPiece, assistant_pieces
from workers.foreign.dialect import Answer, Asked, event, openai_refusal
from workers.foreign.fields import (
    Json,
    RequestRefused,
    as_object,
    content_in,
    flag_in,
    limit_in,
    objects_in,
    printed,
    text_in,
)
from workers.foreign.tools import read_chat_tools

_TEXTS = frozenset({"text", "refusal"})
_THOUGHTS = ("reasoning_content", "reasoning", "reasoning_text")
_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user"}


class ChatDialect:
    """`/v1/chat/completions`."""

    path = "chat/completions"

    def read(self, body: Json) -> Asked:
        if body.get("n") not in (None, 1):
            raise RequestRefused("n is not 1: there is one reply to a request")
        if body.get("functions"):
            raise RequestRefused("functions are not supported; describe them as tools")
        pieces: list[ChatPiece] = []
        for number, message in enumerate(objects_in(body, "messages")):
            pieces += _pieces(message, number)
        options = body.get("stream_options")
        asks_usage = options is not None and flag_in(as_object(options, "stream_options"), "include_usage")
        return Asked(
            tuple(pieces),
            read_chat_tools(body),
            text_in(body, "model")[:200],
            flag_in(body, "stream"),
            asks_usage,
            limit_in(body, "max_completion_tokens", "max_tokens"),
        )

    def sendable(self, said: ChatMessage, asked: Asked) -> ChatMessage:
        return said

    def whole(self, answer: Answer, asked: Asked) -> Json:
        said = answer.said
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["tool_calls"] = [_call(call) for call in said.tool_calls]
            message["content"] = said.content or None
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(answer)}
        return {
            **_head(answer, asked, "chat.completion"),
            "choices": [choice],
            "usage": _usage(answer),
        }

    def events(self, answer: Answer, asked: Asked) -> Iterator[bytes]:
        said = answer.said
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": said.reasoning}] if said.reasoning else []
        deltas += [{"content": said.content}] if said.content else []
        deltas += [
            {"tool_calls": [{"index": number, **_call(call)}]} for number, call in enumerate(said.tool_calls)
        ]
        head = _head(answer, asked, "chat.completion.chunk")
        for delta in deltas:
            yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(answer)}]})
        if asked.with_usage:
            yield event({**head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def refusal(self, refused: RequestRefused) -> Json:
        return openai_refusal(refused)

    def refusal_event(self, refused: RequestRefused) -> bytes:
        return event(openai_refusal(refused))


def _pieces(message: Json, number: int) -> list[ChatPiece]:
    role = text_in(message, "role")
    if role == "assistant":
        return _assistant(message, number)
    content = content_in(message, "content", _TEXTS)
    if role == "tool":
        return [ChatPiece("tool", content, call_id=text_in(message, "tool_call_id"), message=number)]
    if role not in _ROLES:
        raise RequestRefused(f"messages of the role {role[:80]!r} are not supported")
    return [ChatPiece(_ROLES[role], content, message=number)]


def _assistant(message: Json, number: int) -> list[ChatPiece]:
    if message.get("function_call"):
        raise RequestRefused("function_call is not supported; send tool_calls")
    thought = next((text for name in _THOUGHTS if (text := text_in(message, name))), "")
    calls = [_read_call(call) for call in objects_in(message, "tool_calls")]
    return assistant_pieces(content_in(message, "content", _TEXTS), thought, calls, message=number)


def _read_call(call: Json) -> ToolCall:
    fields = as_object(call.get("function"), "a call's function")
    arguments = fields.get("arguments")
    text = text_in(fields, "arguments") if isinstance(arguments, str | None) else printed(arguments)
    return ToolCall(name=text_in(fields, "name"), arguments=text, id=text_in(call, "id"))


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _head(answer: Answer, asked: Asked, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.number}",
        "object": kind,
        "created": int(time.time()),
        "model": asked.model,
    }


def _finish(answer: Answer) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.said.tool_calls else "stop"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
    }
