"""The source of replies in an episode of an agent program: our own engines, which take token ids, or a server or file that takes messages.

With engines, a prompt consists of the exact ids that they held, and the new messages: such turns can be trained. A foreign server, or a
file of replies, gets the conversation as the program sent it, because the program would send that to the server itself. Such turns have no
ids.
"""

from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from pipeline.trajectory import Turn
from workers.foreign.canonical import ChatPiece, messages_of
from workers.foreign.dialect import Asked
from workers.foreign.fields import ContextFull
from workers.foreign.rendering import ToolRenderers, with_own_ids
from workers.foreign.tools import TEXT_VALUES, with_typed_values
from workers.foreign.tree import Place, Tree
from workers.policy.context import MIN_ROOM_TOKENS
from workers.policy.speaker import AnyVoice, MessageVoice, Speaker, Voice

CHARS_PER_TOKEN = 4  # assumed where no tokenizer is known


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
        """Makes the prompt, which may take long. Raises RequestRefused and ContextFull."""
        ...


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
