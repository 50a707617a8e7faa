"""The policy's renderer as workers use it, and the end of the thoughts in a reply.

`pipeline/chat_tokens.py` says what becomes of messages; here the tokenizer is loaded.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from tokenizers import Tokenizer

from pipeline.chat_template import Tools
from pipeline.chat_tokens import ChatTokens, FastTokenizer
from pipeline.tokenizer import TokenizerBundle

Decode = Callable[[Sequence[int]], str]

_NEXT_MESSAGE = "<|start|>assistant"  # in harmony, thoughts are separate messages before the reply's


@dataclass(frozen=True, slots=True)
class ThoughtFinder:
    """Finds thoughts in the replies for one tokenizer and chat template."""

    decode: Decode
    begin: str
    end: str
    is_opened: bool = False  # whether every prompt opens a thought
    opening: tuple[int, ...] = ()  # the ids that open it; none if they are not separable from other text

    @classmethod
    def of(cls, decode: Decode, marks: tuple[str, str], prompt_end: Sequence[int]) -> "ThoughtFinder":
        """The finder for this decoder and these delimiters. `prompt_end`: the last ids of any prompt."""
        begin, end = marks[0].rstrip(), marks[1]
        words = decode(prompt_end).rstrip()
        if not words.endswith(begin):
            return cls(decode, begin, end)
        before = words.removesuffix(begin)
        num_before = _num_ids(prompt_end, before, decode)
        is_separable = decode(prompt_end[:num_before]) == before
        return cls(decode, begin, end, True, tuple(prompt_end[num_before:]) if is_separable else ())

    def num_tokens(self, reply: Sequence[int]) -> int:
        """The number of the reply's first ids that are its thought, including the delimiters and the white space after them.

        If the opening of the thought cannot be removed from the prompt, its end delimiter stays, too.
        """
        text = self.decode(reply)
        end = self._end_of_thought(text)
        if end == 0:
            return 0
        num_ids = _num_ids(reply, text[:end], self.decode)
        return num_ids if len(self.decode(reply[:num_ids])) <= end else num_ids - 1

    def _end_of_thought(self, text: str) -> int:
        start = len(text) - len(text.lstrip())
        if not self.is_opened and not text.startswith(self.begin, start):
            return 0
        while True:
            found = text.find(self.end, start)
            if found < 0:  # the thought does not end, so all of the reply belongs to it
                return len(text)
            if self.is_opened and not self.opening:
                return found
            behind = text[found + len(self.end) :]
            rest = behind.removeprefix(_NEXT_MESSAGE).lstrip()
            start = len(text) - len(rest)
            if not (behind.startswith(_NEXT_MESSAGE) and rest.startswith(self.begin)):
                return start


def _num_ids(ids: Sequence[int], beginning: str, decode: Decode) -> int:
    """The smallest number of leading ids whose text begins with `beginning`."""
    return bisect_left(range(len(ids)), x=True, key=lambda num: decode(ids[:num]).startswith(beginning))


class Renderer(ChatTokens):
    """The chat tokens of one bundle, for an agent with these tools. Raises RequestError, when made, if they cannot be used append-only."""

    def __init__(self, bundle: TokenizerBundle, tools: Tools = ()) -> None:
        super().__init__(bundle, _load, tools)


def _load(tokenizer_json: str) -> FastTokenizer:
    return cast(FastTokenizer, Tokenizer.from_str(tokenizer_json))  # pyright: ignore[reportUnknownMemberType]
