"""Messages of a chat, as chat templates, agents' prompts and artefacts use them, and the format in which a model writes its thoughts and
tool calls, recognised by the text of its chat template.

Of formats only the names are here, for the trainer's plan and the recipe. `workers/policy/formats.py` reads replies in these formats.
"""

from typing import Literal, get_args

from msgspec.structs import replace

from pipeline.message import Message

Role = Literal["system", "user", "assistant", "tool"]

# The delimiters around thoughts. "harmony" has channels. A template without thoughts also gets "think".
ThoughtFormat = Literal["think", "mistral", "harmony", "seed", "cohere", "gemma"]
CallFormat = Literal[
    "none",
    "hermes",
    "qwen3_coder",
    "seed",
    "glm",
    "llama3",
    "mistral",
    "harmony",
    "deepseek",
    "kimi_k2",
    "minimax",
    "pythonic",
]
CALL_FORMATS: tuple[CallFormat, ...] = get_args(CallFormat)

# The texts at which thoughts begin and end.
THOUGHT_MARKS: dict[ThoughtFormat, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "harmony": ("<|channel|>analysis<|message|>", "<|end|>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma": ("<|channel>thought\n", "<channel|>"),
}

# The first format whose texts all occur in the template applies.
_CALLS: tuple[tuple[CallFormat, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|start|>assistant")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek", ("tool\u2581calls\u2581begin",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax", ("<minimax:tool_call>", "<invoke name=")),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("seed", ("<seed:tool_call>", "<function=")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("pythonic", ("<|tool_call_start|>",)),
    ("none", ("<tool_calls>[",)),
    ("hermes", ("<tool_call>", "</tool_call>", '"arguments": ')),
    ("hermes", ("<tool_call>", "</tool_call>", '\\"arguments\\": ')),
    ("llama3", ("<|start_header_id|>", '"parameters": dictionary')),
)
_THOUGHTS: tuple[tuple[ThoughtFormat, str], ...] = (
    ("harmony", "<|channel|>analysis"),
    ("mistral", "[THINK]"),
    ("seed", "<seed:think>"),
    ("cohere", "<|START_THINKING|>"),
    ("gemma", "<|channel>thought"),
)


class ToolCall(Message, frozen=True, kw_only=True):
    """A call of a tool in an assistant's message."""

    name: str
    arguments: str  # the policy's own text; a JSON object if the call is well-formed
    id: str = ""  # what a tool's message refers to; "" where the format has none


class ChatMessage(Message, frozen=True):
    """One message. An assistant's `content` is without its thoughts and tool calls."""

    role: Role
    content: str
    reasoning: str = ""  # an assistant's thoughts
    tool_calls: tuple[ToolCall, ...] = ()  # an assistant's calls, in order
    tool_call_id: str = ""  # in a tool's message: the id of the call that it answers


def storable(text: str) -> str:
    """`text` with a question mark for each half of a surrogate pair, which an escape in JSON can make and UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


def storable_message(message: ChatMessage) -> ChatMessage:
    """`message` with every text of it storable."""
    calls = tuple(
        ToolCall(name=storable(call.name), arguments=storable(call.arguments), id=storable(call.id))
        for call in message.tool_calls
    )
    return replace(
        message,
        content=storable(message.content),
        reasoning=storable(message.reasoning),
        tool_calls=calls,
        tool_call_id=storable(message.tool_call_id),
    )


class ReplyFormat(Message, frozen=True, kw_only=True):
    """The formats by which replies are parsed."""

    thoughts: ThoughtFormat = "think"
    tool_calls: CallFormat = "none"


def recognised(template: str) -> ReplyFormat:
    """The format that a chat template uses."""
    calls: list[CallFormat] = [name for name, words in _CALLS if all(word in template for word in words)]
    thoughts: list[ThoughtFormat] = [name for name, word in _THOUGHTS if word in template]
    return ReplyFormat(
        thoughts=thoughts[0] if thoughts else "think", tool_calls=calls[0] if calls else "none"
    )
