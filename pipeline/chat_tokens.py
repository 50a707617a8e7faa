"""Chat text to token ids, append-only: what an engine has seen is never tokenised again.

The first prompt is the chat template's rendering. After each reply, only the text that the template puts after an assistant's content is
added: the end of its turn, the next messages, the opening of the next reply. A reasoning model's earlier thoughts therefore stay in its
context, and its tool calls stay as it wrote them.

Content is data. Text that looks like a control token (an `<|im_end|>` in a command's output) is encoded as ordinary text; everything else
is tokenised as in the template's own rendering.

Workers feed an engine by it, and supervised fine-tuning trains by it, so both have the same ids. The tokenizer itself is an argument: this
package imports none.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from pipeline.chat import THOUGHT_MARKS, ChatMessage, ReplyFormat
from pipeline.chat_template import ChatTemplate, Tools
from pipeline.errors import RequestError
from pipeline.tokenizer import TokenizerBundle

OPENING_TOKENS = 64  # tokens of a prompt's end, more than any opening of a thought has


class _Encoding(Protocol):
    ids: list[int]


class FastTokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that is used, with the types that its own stubs lack."""

    encode_special_tokens: bool

    def encode(self, sequence: str, *, add_special_tokens: bool) -> _Encoding: ...
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...
    def no_truncation(self) -> None: ...
    def no_padding(self) -> None: ...


class ChatTokens:
    """One tokenizer and its chat template, for an agent with these tools. `load` makes a tokenizer of the text of a tokenizer.json.

    Raises RequestError, when made, if they cannot be used append-only.
    """

    def __init__(
        self, bundle: TokenizerBundle, load: Callable[[str], FastTokenizer], tools: Tools = ()
    ) -> None:
        tokenizer_json, self._controls = _hardened(bundle)
        self._tokenizer = load(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._bundle = bundle
        self._mark = uuid4().hex  # marks a placeholder in a rendering; no content can contain it by chance
        self._literals = self._spelled_out()
        self._control = re.compile("|".join(map(re.escape, self._controls)))
        self._placeholder = re.compile(f"{self._mark}([0-9]{{6}})")
        self._describe(tools)

    def with_tools(self, tools: Tools) -> Self:
        """Another one with the same tokenizer, which takes long to load, for an agent with these tools.

        Raises RequestError like the constructor.
        """
        other = copy.copy(self)
        other._describe(tools)
        return other

    def _describe(self, tools: Tools) -> None:
        self.template = ChatTemplate(self._bundle, [self._guarded_tree(tool) for tool in tools])
        self._end = self._end_of_reply()
        self._end_of_calls = self._end_of_call() if tools else self._end
        self.has_tools = bool(tools)

    @property
    def vocab_size(self) -> int:
        return self._bundle.vocab_size

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._bundle.stop_token_ids

    @property
    def end_id(self) -> int:
        """The token with which the policy ends a reply without tool calls."""
        return self._end.stop_id

    @property
    def reply_format(self) -> ReplyFormat:
        return self._bundle.reply_format

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether `prompt` ends within a thought, so that the reply begins with it."""
        begin, _ = THOUGHT_MARKS[self.reply_format.thoughts]
        return self._decode(prompt[-OPENING_TOKENS:]).rstrip().endswith(begin.rstrip())

    def first_prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The ids of `messages` and of the opening of a reply."""
        return self._encode(self.template.render(self._guarded(messages)))

    def conversation(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The ids of a complete conversation, without the tokens that open a next reply. It is for models that score conversations."""
        return self._encode(self.template.rerender(self._guarded(messages), opening=False))

    def suffix(self, messages: Sequence[ChatMessage], *, last_id: int | None) -> list[int]:
        """The ids that follow a reply: the end of its turn, `messages`, the opening of the next reply.

        `last_id` is the reply's last token. If it already ends the turn as the template does, that end is not fed a second time.
        """
        ids = self._encode(self.template.after_reply(self._guarded(messages)))
        if self.has_tools and messages and messages[0].role == "tool":
            end, begins_at = self._end_of_calls, self._end_of_calls.end_tokens - 1
        else:
            end, begins_at = self._end, 0
        return ids[end.end_tokens if last_id in end.closing_ids else begins_at :]

    def reply(self, message: ChatMessage) -> list[int]:
        """The ids that a policy samples in saying `message`, the token that ends its turn included.

        Words alone are encoded as they are. Thoughts and tool calls are written as the template writes them in the last message, but for an
        empty thought, which some templates write before words and calls. Raises RequestError where the template cannot write them after
        its opening of a reply.
        """
        (guarded,) = self._guarded([message])
        begin, end = THOUGHT_MARKS[self.reply_format.thoughts]
        is_in_thought = self.template.opening.rstrip().endswith(begin.rstrip())
        if not (message.reasoning or message.tool_calls or is_in_thought):
            return [*self._encode(guarded.content), self._end.stop_id]
        text = self.template.reply_text(guarded)
        if not message.reasoning:
            text = re.sub(rf"\A{re.escape(begin)}\s*{re.escape(end)}\s*", "", text)
        ids = self._encode(text)
        at, token = self._first_stop(ids)
        if token is None:
            raise RequestError(
                f"chat_template: the template puts no stop token ({self.stop_token_ids}) after a last reply with thoughts or tool calls"
            )
        return ids[: at + 1]

    def encode_text(self, text: str) -> list[int]:
        """The ids of `text` as content, without any template."""
        return self._encode(self._guard(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids without the stop token at their end; bytes that are not UTF-8 become U+FFFD."""
        words = ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
        return self._decode(words)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _guarded(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        return [
            replace(
                message,
                content=self._guard(message.content),
                reasoning=self._guard(message.reasoning),
                tool_calls=tuple(
                    replace(call, name=self._guard(call.name), arguments=self._guard(call.arguments))
                    for call in message.tool_calls
                ),
                tool_call_id=self._guard(message.tool_call_id),
            )
            for message in messages
        ]

    def _guarded_tree(self, value: Any) -> Any:
        """A description of a tool in which all texts are guarded."""
        if isinstance(value, str):
            return self._guard(value)
        if isinstance(value, Mapping):
            fields = cast(Mapping[str, Any], value)
            return {self._guard(name): self._guarded_tree(one) for name, one in fields.items()}
        if isinstance(value, list | tuple):
            return [self._guarded_tree(one) for one in cast(Sequence[Any], value)]
        return value

    def _guard(self, content: str) -> str:
        """`content` with a placeholder for each text that would become a control token."""
        return self._control.sub(lambda found: f"{self._mark}{self._controls.index(found[0]):06d}", content)

    def _encode(self, rendered: str) -> list[int]:
        ids: list[int] = []
        for index, piece in enumerate(self._placeholder.split(rendered)):
            if index % 2:  # the piece is the placeholder's number
                ids += self._literals[int(piece)]
            elif piece:
                ids += self._pieces(piece)
        return ids

    def _pieces(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _spelled_out(self) -> list[list[int]]:
        """The ids of each control token's text as ordinary text. Raises RequestError if the vocabulary cannot write it in another way."""
        control_ids = {self._tokenizer.token_to_id(text) for text in self._controls}
        self._tokenizer.encode_special_tokens = True
        spelled: list[list[int]] = []
        for text in self._controls:
            ids = self._pieces(text)
            if not control_ids.isdisjoint(ids):  # the vocabulary itself has the text in one piece
                ids = [token for letter in text for token in self._pieces(letter)]
            if not control_ids.isdisjoint(ids):
                raise RequestError(
                    f"tokenizer.json: {text!r} cannot be written without becoming a control token"
                )
            spelled.append(ids)
        self._tokenizer.encode_special_tokens = False
        return spelled

    def _end_of_reply(self) -> "_End":
        """The end of the turn of a reply without tool calls, in the template."""
        ids = self._encode(self.template.end_of_reply)
        at, token = self._first_stop(ids)
        if token is not None:
            return _End(at + 1, token, frozenset({token}))
        # Some templates end the last reply with the stop token and earlier ones with another control token. The sampled one then replaces
        # the other.
        control_ids = {self._tokenizer.token_to_id(text) for text in self._controls}
        ends = [position for position, token in enumerate(ids) if token in control_ids]
        finals = [token for token in self._encode(self.template.final_end) if token in control_ids]
        if not ends or not finals or finals[0] not in self.stop_token_ids:
            raise RequestError(
                f"chat_template: the template puts no stop token ({self.stop_token_ids}) between an assistant's message and the next "
                "user message"
            )
        return _End(ends[0] + 1, finals[0], frozenset(self.stop_token_ids))

    def _end_of_call(self) -> "_End":
        """The end of the turn of a reply with tool calls, in the template. The end of the call itself comes before it."""
        at, token = self._first_stop(self._encode(self.template.end_of_call))
        if token is None:
            raise RequestError(
                f"chat_template: the template puts no stop token ({self.stop_token_ids}) between a tool call and its result"
            )
        return _End(at + 1, token, frozenset({token}))

    def _first_stop(self, ids: Sequence[int]) -> tuple[int, int | None]:
        for position, token in enumerate(ids):
            if token in self.stop_token_ids:
                return position, token
        return -1, None


@dataclass(frozen=True, slots=True)
class _End:
    """The end of an assistant's turn, among the tokens that the template puts after its content."""

    end_tokens: int  # number of leading tokens up to the end token, which is included
    stop_id: int  # the token with which the policy ends a reply
    closing_ids: frozenset[int]  # a reply whose last token is one of these needs no other end


def _hardened(bundle: TokenizerBundle) -> tuple[str, list[str]]:
    """tokenizer.json with its control tokens marked special and matched before any normalisation; and their texts, longest
    first.

    Control tokens are the special ones and those that stop sampling. A normaliser must not turn a look-alike into one.
    """
    try:
        tree = msgspec.json.decode(bundle.tokenizer_json, type=dict[str, Any])
        added: list[dict[str, Any]] = tree.get("added_tokens") or []
        controls = [token for token in added if token["special"] or token["id"] in bundle.stop_token_ids]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise RequestError(f"tokenizer.json: {error}") from error
    if not controls:
        raise RequestError("tokenizer.json: no added token is special or stops sampling")
    for token in controls:
        token |= {"special": True, "normalized": False}
    texts = sorted((token["content"] for token in controls), key=len, reverse=True)
    return msgspec.json.encode(tree).decode(), texts
