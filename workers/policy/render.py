"""Chat text to token ids, append-only: what an engine has seen is never tokenised again.

The first prompt is the chat template's rendering. After each reply only what the template puts behind an
assistant's words is added: the end of its turn, the user's message, the opening of the next reply. A reasoning
model's earlier thoughts therefore stay in its context.

Content is data. Text that reads like a control token (an `<|im_end|>` in a command's output) is encoded as
ordinary text; everything else keeps the merges it has in the template's own rendering.
"""

import re
from collections.abc import Sequence
from typing import Any, Protocol, cast
from uuid import uuid4

import msgspec
from msgspec.structs import replace
from tokenizers import Tokenizer

from pipeline.chat import ChatMessage
from pipeline.chat_template import ChatTemplate
from pipeline.errors import RequestError
from pipeline.tokenizer import TokenizerBundle


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
    """One tokenizer and its chat template. Raises RequestError, when made, if they cannot be used append-only."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        tokenizer_json, self._controls = _hardened(bundle)
        tokenizer = Tokenizer.from_str(tokenizer_json)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        self._tokenizer = cast(_FastTokenizer, tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._bundle = bundle
        self._template = ChatTemplate(bundle)
        self._mark = uuid4().hex  # marks a placeholder in a rendering; no content can contain it by chance
        self._literals = self._spelled_out()
        self._control = re.compile("|".join(map(re.escape, self._controls)))
        self._placeholder = re.compile(f"{self._mark}([0-9]{{6}})")
        self._end_tokens, self.end_id = self._end_of(self._template.end_of_reply)

    @property
    def vocab_size(self) -> int:
        return self._bundle.vocab_size

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._bundle.stop_token_ids

    def first_prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The ids of `messages` and of the opening of a reply."""
        return self._encode(self._template.render(self._guarded(messages)))

    def suffix(self, messages: Sequence[ChatMessage], *, ended: bool) -> list[int]:
        """The ids to put behind a reply: the end of its turn, `messages`, the opening of the next reply.

        `ended`: the reply itself closes with `end_id`, which is then not fed a second time.
        """
        ids = self._encode(self._template.after_reply(self._guarded(messages)))
        return ids[self._end_tokens :] if ended else ids

    def encode_text(self, text: str) -> list[int]:
        """The ids of `text` as content, without any template."""
        return self._encode(self._guard(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids without the stop token at their end; bytes that are not UTF-8 become U+FFFD."""
        words = ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
        return self._tokenizer.decode(list(words), skip_special_tokens=False)

    def _guarded(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        return [replace(message, content=self._guard(message.content)) for message in messages]

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

    def _end_of(self, tail: str) -> tuple[int, int]:
        """How many of the tail's first tokens end the assistant's turn, and the last of them."""
        for position, token in enumerate(self._encode(tail)):
            if token in self.stop_token_ids:
                return position + 1, token
        raise RequestError(
            f"chat_template: no stop token ({self.stop_token_ids}) stands between an assistant's words and the next user's"
        )


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
