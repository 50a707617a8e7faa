"""The interface of a dialect, which parses a request into pieces, and writes a reply or a refusal in its own format.

No other module depends on a dialect: the tree, the limits and the sampling use only `Asked` and `Answer`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec.structs import replace

from pipeline.chat import ChatMessage, storable
from pipeline.trajectory import Stop
from workers.foreign.conversations import ChatPiece
from workers.foreign.fields import ContextFull, Json, RequestRefused, printed
from workers.foreign.tools import NO_TOOL_SET, ToolSet, arguments_object

# Headers with which programs tell their conversations apart. They break ties; nothing depends on them.
_SESSIONS = (
    "session-id",
    "thread-id",
    "x-session-id",
    "x-claude-code-session-id",
    "x-claude-code-agent-id",
)
_OF_SUBAGENTS = (
    "x-openai-subagent",
    "x-codex-parent-thread-id",
    "x-parent-session-id",
    "x-claude-code-agent-id",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a reply."""

    pieces: tuple[ChatPiece, ...]
    tools: ToolSet = NO_TOOL_SET
    model: str = ""
    streams: bool = False
    with_usage: bool = True  # whether a stream ends with the numbers of tokens
    max_new_tokens: int | None = None  # the program's own limit


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply as it is sent to the program."""

    number: int  # unique in the episode
    said: ChatMessage
    stop: Stop
    prompt_tokens: int
    sampled_tokens: int

    @property
    def is_cut(self) -> bool:
        return self.stop != "stop"


class Dialect(Protocol):
    """One protocol. Its name is the part of its path after `/v1/`."""

    path: str

    def read(self, body: Json) -> Asked:
        """Parses the body. Raises RequestRefused for content that no template supports."""
        ...

    def sendable(self, said: ChatMessage, asked: Asked) -> ChatMessage:
        """The reply with only what the dialect can express; other parts become text."""
        ...

    def whole(self, answer: Answer, asked: Asked) -> Json:
        """The reply in one object."""
        ...

    def events(self, answer: Answer, asked: Asked) -> Iterator[bytes]:
        """The reply as a stream of events, from the first to the last."""
        ...

    def refusal(self, refused: RequestRefused) -> Json:
        """The body of an answer with status 400."""
        ...

    def refusal_event(self, refused: RequestRefused) -> bytes:
        """The refusal as an event, if a stream has already begun."""
        ...


def event(data: Json, *, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {printed(data)}\n\n".encode()


def session_of(headers: Mapping[str, str]) -> tuple[str, bool]:
    """The key that distinguishes the program's conversation from its others, if the headers have one, and whether the conversation is a
    subagent's.
    """
    session = "/".join(storable(headers[name]) for name in _SESSIONS if name in headers)
    return session, any(name in headers for name in _OF_SUBAGENTS)


def with_broken_calls_as_text(said: ChatMessage) -> ChatMessage:
    """The reply, in which calls whose arguments are not an object become text, as the policy wrote them."""
    calls = tuple(call for call in said.tool_calls if arguments_object(call.arguments) is not None)
    broken = [call.arguments for call in said.tool_calls if call not in calls]
    words = [said.content] if said.content else []
    return replace(said, content="\n".join([*words, *broken]), tool_calls=calls)


def openai_refusal(refused: RequestRefused) -> dict[str, Any]:
    """The error format of OpenAI's dialects."""
    message, code = str(refused), None
    if isinstance(refused, ContextFull):
        code = "context_length_exceeded"
        message = (
            f"This model's maximum context length is {refused.context_tokens} tokens. However, your messages resulted in "
            f"{refused.prompt_tokens or 'many more'} tokens. Please reduce the length of the messages."
        )
    return {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": code},
    }
