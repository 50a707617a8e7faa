"""The source of replies in an episode of an agent program: our own engines, which take token ids, or a server or file that takes messages.

With engines, a prompt consists of the exact ids that they held, and the new messages: such turns can be trained. A foreign server, or a
file of replies, gets the conversation as the program sent it, because the program would send that to the server itself. Such turns have no
ids.

For engines, messages are rendered with the model's chat template. Templates differ in what they accept: a system message after others, two
user messages in a row. A message that a template does not accept is joined to its neighbour. Only messages of the program are rearranged;
replies of the policy keep their ids.
"""

import threading
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from pipeline.chat import ChatMessage
from pipeline.errors import RequestError
from pipeline.trajectory import Turn
from workers.foreign.conversations import ChatPiece, Place, Tree, messages_of
from workers.foreign.dialect import Asked
from workers.foreign.fields import ContextFull, RequestRefused
from workers.foreign.tools import TEXT_VALUES, ToolSet, arguments_object, with_typed_values
from workers.policy.conversation import MIN_ROOM_TOKENS
from workers.policy.render import Renderer
from workers.policy.speaker import AnyVoice, MessageVoice, Speaker, Voice

CHARS_PER_TOKEN = 4  # assumed where no tokenizer is known
MOST_RENDERERS = 64


@dataclass(frozen=True, slots=True)
class AgentPrompt:
    """The prompt of a request. `reply` samples once, under the given number; it raises ContextFull if a server reports that."""

    num_tokens: int
    reply: Callable[[int], Awaitable[Turn]]


class AgentVoice(Protocol):
    """The source of replies to requests whose position in a tree is known."""

    @property
    def context_tokens(self) -> int: ...

    def prompt(self, asked: Asked, place: Place, tree: Tree) -> AgentPrompt:
        """Makes the prompt, which may take a long time. Raises RequestRefused and ContextFull."""
        ...


class ToolRenderer:
    """Renders the messages of programs with one set of tools. Raises RequestRefused if the template cannot express them."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    def opened(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The prompt of a conversation's first reply."""
        if not messages:
            raise RequestRefused("there are no messages")
        return self._first_that_renders(messages, self.renderer.first_prompt)

    def told(self, messages: Sequence[ChatMessage], *, last_id: int | None) -> list[int]:
        """The ids after a reply that ends with `last_id`, up to the opening of the next reply."""
        return self._first_that_renders(
            messages, lambda arranged: self.renderer.suffix(arranged, last_id=last_id)
        )

    def _first_that_renders(
        self, messages: Sequence[ChatMessage], render: Callable[[Sequence[ChatMessage]], list[int]]
    ) -> list[int]:
        arranged = self._as_taken(messages)
        try:
            return render(arranged)
        except RequestError:
            plain = _joined([_with_readable_calls(message) for message in arranged])
        try:
            return render(plain)
        except RequestError as error:
            raise RequestRefused(
                f"the model's chat template cannot render these messages: {error}"
            ) from error

    def _as_taken(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The messages with one system message at the beginning; later ones become user messages unless the template accepts them."""
        template = self.renderer.template
        num_leading = next(
            (number for number, message in enumerate(messages) if message.role != "system"), len(messages)
        )
        leading, later = messages[:num_leading], list(messages[num_leading:])
        if not template.takes_later_system:
            later = [
                replace(message, role="user") if message.role == "system" else message for message in later
            ]
        if not template.takes_users_in_a_row:
            later = _joined(later, roles=("user",))
        system = "\n\n".join(message.content for message in leading)
        return [ChatMessage("system", system), *later] if leading else later


class ToolRenderers:
    """The renderers of one tokenizer, one for each set of tools. Episodes may share it. The least recently used one is dropped."""

    def __init__(self, base: Renderer) -> None:
        self._base = base
        self._made: dict[bytes, ToolRenderer] = {}
        self._lock = threading.Lock()  # prompts are rendered in threads

    def of(self, tools: ToolSet) -> ToolRenderer:
        """The renderer for these tools; it takes a moment if they are new. Raises RequestRefused if the template cannot show them."""
        with self._lock:
            made = self._made.pop(tools.key, None) or self._make(tools)
            self._made[tools.key] = made
            while len(self._made) > MOST_RENDERERS:
                del self._made[next(iter(self._made))]
            return made

    def _make(self, tools: ToolSet) -> ToolRenderer:
        try:
            return ToolRenderer(self._base.with_tools(tools.described))
        except RequestError as error:
            raise RequestRefused(f"the model's chat template cannot show these tools: {error}") from error


def agent_voice(voice: AnyVoice, context_tokens: int) -> AgentVoice:
    """The voice for an episode whose program is configured with a context of `context_tokens`."""
    if isinstance(voice, Voice):
        return RenderedVoice(voice.speaker, ToolRenderers(voice.renderer))
    return ToldVoice(voice, context_tokens)


@dataclass(frozen=True, slots=True)
class RenderedVoice:
    """Replies by engines, whose prompts are ids."""

    speaker: Speaker
    renderers: ToolRenderers  # may be shared with other episodes of the same tokenizer

    @property
    def context_tokens(self) -> int:
        return self.speaker.context_tokens

    def prompt(self, asked: Asked, place: Place, tree: Tree) -> AgentPrompt:
        told = with_own_ids(messages_of(place.told), tree.own_ids)
        renderer, parent = self.renderers.of(asked.tools), place.parent
        held = [] if parent is None else parent.ids()
        fed = renderer.opened(told) if parent is None else renderer.told(told, last_id=held[-1])
        ids = array("i", [*held, *fed])  # packed: many may wait for their turn
        if len(ids) > self.context_tokens - min(MIN_ROOM_TOKENS, self.speaker.max_new_tokens):
            raise ContextFull(len(ids), self.context_tokens)

        async def reply(number: int) -> Turn:
            turn = await self.speaker.reply(
                renderer.renderer,
                ids,
                kept_tokens=len(held),
                number=number,
                max_new_tokens=asked.max_new_tokens,
            )
            if renderer.renderer.reply_format.tool_calls not in TEXT_VALUES:
                return turn
            calls = tuple(with_typed_values(call, asked.tools) for call in turn.said.tool_calls)
            return replace(turn, reply=replace(turn.said, tool_calls=calls))

        return AgentPrompt(len(ids), reply)


@dataclass(frozen=True, slots=True)
class ToldVoice:
    """Replies from a source that takes messages. Its own context decides when a conversation is too long."""

    voice: MessageVoice
    context_tokens: int  # the number of tokens that the program was configured with

    def prompt(self, asked: Asked, place: Place, tree: Tree) -> AgentPrompt:
        messages = with_own_ids(messages_of(asked.pieces), tree.own_ids)

        async def reply(number: int) -> Turn:
            turn = await self.voice.reply(
                messages, asked.tools.described, number=number, max_new_tokens=asked.max_new_tokens
            )
            if turn is None:
                raise ContextFull(None, self.context_tokens)
            return turn

        num_chars = asked.tools.num_chars + sum(num_chars_of(piece) for piece in asked.pieces)
        return AgentPrompt(num_chars // CHARS_PER_TOKEN, reply)


def num_chars_of(piece: ChatPiece) -> int:
    """The number of characters of a piece."""
    call = piece.call
    return len(piece.text) + len(piece.thought) + (len(call.name) + len(call.arguments) if call else 0)


def with_own_ids(messages: Sequence[ChatMessage], own: Mapping[str, str]) -> list[ChatMessage]:
    """The messages with the ids of calls that the policy wrote itself; "" if its format has none.

    `own` contains the policy's id for each id that we made. So the context never contains an id of ours.
    """
    return [
        replace(
            message,
            tool_call_id=own.get(message.tool_call_id, message.tool_call_id),
            tool_calls=tuple(
                replace(call, id=own[call.id]) if call.id in own else call for call in message.tool_calls
            ),
        )
        for message in messages
    ]


def _joined(
    messages: Sequence[ChatMessage], roles: Sequence[str] = ("system", "user", "assistant")
) -> list[ChatMessage]:
    """The messages after joining those that follow another of the same role, for the roles in `roles`."""
    made: list[ChatMessage] = []
    for message in messages:
        last = made[-1] if made else None
        if last is None or message.role not in roles or last.role != message.role or last.tool_calls:
            made.append(message)
            continue
        content = "\n\n".join(text for text in (last.content, message.content) if text)
        made[-1] = replace(message, content=content, reasoning=last.reasoning + message.reasoning)
    return made


def _with_readable_calls(message: ChatMessage) -> ChatMessage:
    """The message, in which calls whose arguments are not an object become text."""
    broken = [call for call in message.tool_calls if arguments_object(call.arguments) is None]
    if not broken:
        return message
    words = [message.content] if message.content else []
    words += [f"{call.name} {call.arguments}" for call in broken]
    kept = tuple(call for call in message.tool_calls if call not in broken)
    return replace(message, content="\n".join(words), tool_calls=kept)
