"""Messages, Anthropic's dialect, which Claude Code uses."""

from collections.abc import Iterator
from typing import Any

from pipeline.chat import ChatMessage, Role, ToolCall
from workers.foreign.conversations import ChatPiece, assistant_pieces
from workers.foreign.dialect import Answer, Asked, event, with_broken_calls_as_text
from workers.foreign.fields import (
    ContextFull,
    Json,
    RequestRefused,
    content_in,
    flag_in,
    limit_in,
    objects_in,
    printed,
    text_in,
    unknown_content,
)
from workers.foreign.tools import arguments_object, read_messages_tools

_TEXTS = frozenset({"text"})
_ROLES: dict[str, Role] = {"user": "user", "system": "system"}
# Programs return a thought only if it has a signature. This one proves nothing.
_SIGNATURE = "c3dlcnZl"


class MessagesDialect:
    """`/v1/messages`."""

    path = "messages"

    def read(self, body: Json) -> Asked:
        system = content_in(body, "system", _TEXTS)
        pieces = [ChatPiece("system", system)] if system else []
        for number, message in enumerate(objects_in(body, "messages")):
            pieces += _pieces(message, number)
        return Asked(
            tuple(pieces),
            read_messages_tools(body),
            text_in(body, "model")[:200],
            flag_in(body, "stream"),
            max_new_tokens=limit_in(body, "max_tokens"),
        )

    def sendable(self, said: ChatMessage, asked: Asked) -> ChatMessage:
        """Turns calls with malformed arguments into text, unless the reply is streamed: only a stream can carry such arguments."""
        return said if asked.streams else with_broken_calls_as_text(said)

    def whole(self, answer: Answer, asked: Asked) -> Json:
        said = answer.said
        content: list[dict[str, Any]] = []
        if said.reasoning:
            content.append({"type": "thinking", "thinking": said.reasoning, "signature": _SIGNATURE})
        if said.content:
            content.append({"type": "text", "text": said.content})
        content += [{**_call(call), "input": arguments_object(call.arguments)} for call in said.tool_calls]
        return {**_head(answer, asked), "content": content, **_ending(answer), "usage": _usage(answer)}

    def events(self, answer: Answer, asked: Asked) -> Iterator[bytes]:
        usage = {**_usage(answer), "output_tokens": 0}
        begun: dict[str, Any] = {
            **_head(answer, asked),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        yield _event("message_start", message={**begun, "usage": usage})
        for index, (block, deltas) in enumerate(_blocks(answer.said)):
            yield _event("content_block_start", index=index, content_block=block)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_ending(answer), usage=_usage(answer))
        yield _event("message_stop")

    def refusal(self, refused: RequestRefused) -> Json:
        message = str(refused)
        if isinstance(refused, ContextFull):
            tokens = refused.prompt_tokens or "many more"
            message = f"prompt is too long: {tokens} tokens > {refused.context_tokens} maximum"
        return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}

    def refusal_event(self, refused: RequestRefused) -> bytes:
        return event(self.refusal(refused), name="error")


def _pieces(message: Json, number: int) -> Iterator[ChatPiece]:
    role, content = text_in(message, "role"), message.get("content")
    if role == "assistant":
        yield from _assistant(message, number)
    elif role not in _ROLES:
        raise RequestRefused(f"messages of the role {role[:80]!r} are not supported")
    elif not isinstance(content, list):
        yield ChatPiece(_ROLES[role], text_in(message, "content"), message=number)
    else:
        yield from _told(message, _ROLES[role], number)


def _told(message: Json, role: Role, number: int) -> Iterator[ChatPiece]:
    """Yields the results in a message, and the joined texts between them."""
    texts: list[str] = []
    for block in objects_in(message, "content"):
        kind = text_in(block, "type")
        if kind == "text":
            texts.append(text_in(block, "text"))
            continue
        if kind != "tool_result":
            raise unknown_content(block)
        if texts:
            yield ChatPiece(role, "".join(texts), message=number)
            texts = []
        yield ChatPiece(
            "tool",
            content_in(block, "content", _TEXTS),
            call_id=text_in(block, "tool_use_id"),
            is_error=flag_in(block, "is_error"),
            message=number,
        )
    if texts:
        yield ChatPiece(role, "".join(texts), message=number)


def _assistant(message: Json, number: int) -> list[ChatPiece]:
    if not isinstance(message.get("content"), list):
        return assistant_pieces(text_in(message, "content"), "", (), message=number)
    text, thought, calls = "", "", list[ToolCall]()
    for block in objects_in(message, "content"):
        kind = text_in(block, "type")
        if kind == "text":
            text += text_in(block, "text")
        elif kind == "thinking":
            thought += text_in(block, "thinking")
        elif kind == "tool_use":
            written = printed(block.get("input"))
            calls.append(ToolCall(name=text_in(block, "name"), arguments=written, id=text_in(block, "id")))
        elif kind != "redacted_thinking":
            raise unknown_content(block)
    return assistant_pieces(text, thought, calls, message=number)


def _blocks(said: ChatMessage) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yields each block in its initial form, and the deltas that fill it."""
    if said.reasoning:
        thought = {"type": "thinking_delta", "thinking": said.reasoning}
        signature = {"type": "signature_delta", "signature": _SIGNATURE}
        yield {"type": "thinking", "thinking": "", "signature": ""}, [thought, signature]
    if said.content:
        yield {"type": "text", "text": ""}, [{"type": "text_delta", "text": said.content}]
    for call in said.tool_calls:
        written = {"type": "input_json_delta", "partial_json": call.arguments}
        yield {**_call(call), "input": {}}, [written]


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, name=kind)


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _head(answer: Answer, asked: Asked) -> dict[str, Any]:
    return {"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "model": asked.model}


def _ending(answer: Answer) -> dict[str, Any]:
    reason = "max_tokens" if answer.is_cut else "tool_use" if answer.said.tool_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "input_tokens": answer.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": answer.sampled_tokens,
    }
