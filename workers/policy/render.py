"""Chat text to token ids, append-only: what an engine has seen is never tokenised again.

The first prompt is the chat template's rendering. After each reply only what the template puts behind an
assistant's words is added: the end of its turn, the next messages, the opening of the next reply. A reasoning
model's earlier thoughts therefore stay in its context, and its tool calls stay as it wrote them.

Content is data. Text that reads like a control token (an `<|im_end|>` in a command's output) is encoded as
ordinary text; everything else keeps the merges it has in the template's own rendering.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast
from uuid import uuid4

import msgspec
from msgspec.structs import replace
from tokenizers import Tokenizer

from pipeline.chat import ChatMessage
from pipeline.chat_template import ChatTemplate
from pipeline.errors import RequestError
from pipeline.reply_format import THOUGHT_MARKS, ReplyFormat
from pipeline.template_text import Tools
from pipeline.tokenizer import TokenizerBundle

OPENING_TOKENS = 64  # of a prompt's end, more than any opening of a thought has


class _Encoding(Protocol):
    ids: list[int]


class _FastTokenizer(Protocol):
    """What is used of `tokenizers.Tokenizer`, with the types that its own stubs leave out."""

    encode_special_tokens: bool

    def encode(self, sequence: str, *, add_special_tokens: bool) -> _Encoding: ...
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...
    def no_truncation(self) -> None: ...
    def no_padding(self) -> None: ...


class Renderer:
    """One tokenizer and its chat template, for an agent with these tools. Raises RequestError, when made, if they cannot be used
    append-only.
    """

    def __init__(self, bundle: TokenizerBundle, tools: Tools = ()) -> None:
        tokenizer_json, self._controls = _hardened(bundle)
        tokenizer = Tokenizer.from_str(tokenizer_json)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        self._tokenizer = cast(_FastTokenizer, tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._bundle = bundle
        self._template = ChatTemplate(bundle, tools)
        self._mark = uuid4().hex  # marks a placeholder in a rendering; no content can contain it by chance
        self._literals = self._spelled_out()
        self._control = re.compile("|".join(map(re.escape, self._controls)))
        self._placeholder = re.compile(f"{self._mark}([0-9]{{6}})")
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
        """Whether `prompt` ends within a thought, so that the reply begins there."""
        begin, _ = THOUGHT_MARKS[self.reply_format.thoughts]
        return self._decode(prompt[-OPENING_TOKENS:]).rstrip().endswith(begin.rstrip())

    def first_prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The ids of `messages` and of the opening of a reply."""
        return self._encode(self._template.render(self._guarded(messages)))

    def conversation(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The ids of a whole conversation, at whose end nobody replies; for models that score one."""
        return self._encode(self._template.rerender(self._guarded(messages), opening=False))

    def suffix(self, messages: Sequence[ChatMessage], *, last_id: int | None) -> list[int]:
        """The ids to put behind a reply: the end of its turn, `messages`, the opening of the next reply.

        `last_id` is the reply's last token. If it already ends the turn as the template does, that end is not fed a second time.
        """
        ids = self._encode(self._template.after_reply(self._guarded(messages)))
        if self.has_tools and messages and messages[0].role == "tool":
            end, begins_at = self._end_of_calls, self._end_of_calls.end_tokens - 1
        else:
            end, begins_at = self._end, 0
        return ids[end.end_tokens if last_id in end.closing_ids else begins_at :]

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

    def _guard(self, content: str) -> str:
        """`content` with a placeholder for each text that would become a control token."""
        return self._control.sub(lambda found: f"{self._mark}{self._controls.index(found[0]):06d}", content)

    def _encode(self, rendered: str) -> list[int]:
        ids: list[int] = []
        for index, piece in enumerate(self._placeholder.split(rendered)):
            if index % 2:  # the placeholder's number
                ids += self._literals[int(piece)]
            elif piece:
                ids += self._pieces(piece)
        return ids

    def _pieces(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _spelled_out(self) -> list[list[int]]:
        """For each control token's text its ids as ordinary text. Raises RequestError if the vocabulary has no other way to
        write it.
        """
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
        """Where the template ends the turn of a reply without tool calls."""
        ids = self._encode(self._template.end_of_reply)
        at, token = self._first_stop(ids)
        if token is not None:
            return _End(at + 1, token, frozenset({token}))
        # Some templates end the last reply with the stop token and earlier ones with another control token. The one that was
        # sampled then stands in the other's place.
        control_ids = {self._tokenizer.token_to_id(text) for text in self._controls}
        ends = [position for position, token in enumerate(ids) if token in control_ids]
        finals = [token for token in self._encode(self._template.final_end) if token in control_ids]
        if not ends or not finals or finals[0] not in self.stop_token_ids:
            raise RequestError(
                f"chat_template: no stop token ({self.stop_token_ids}) stands between an assistant's words and the next user's"
            )
        return _End(ends[0] + 1, finals[0], frozenset(self.stop_token_ids))

    def _end_of_call(self) -> "_End":
        """Where the template ends the turn of a reply with tool calls. In front of it is the end of the call itself."""
        at, token = self._first_stop(self._encode(self._template.end_of_call))
        if token is None:
            raise RequestError(
                f"chat_template: no stop token ({self.stop_token_ids}) stands between a tool call and its result"
            )
        return _End(at + 1, token, frozenset({token}))

    def _first_stop(self, ids: Sequence[int]) -> tuple[int, int | None]:
        for position, token in enumerate(ids):
            if token in self.stop_token_ids:
                return position, token
        return -1, None


@dataclass(frozen=True, slots=True)
class _End:
    """The end of an assistant's turn, among the tokens that the template puts behind its words."""

    end_tokens: int  # how many of the first tokens are up to and with it
    stop_id: int  # with which the policy ends a reply
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
