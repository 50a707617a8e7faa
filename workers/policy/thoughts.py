"""Where the thought of a reply ends among its sampled ids, so that it can be taken out without tokenising anything again.

A thought stands between a pair of marks at the reply's beginning, or the prompt has opened it already. Marks anywhere else are
text. It is found by decoding: whole tokens go, and a token that is only in part thought stays.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]

_NEXT_MESSAGE = "<|start|>assistant"  # in harmony, thoughts are messages of their own before the reply's


@dataclass(frozen=True, slots=True)
class ThoughtFinder:
    """Of one tokenizer and chat template."""

    decode: Decode
    begin: str
    end: str
    is_opened: bool = False  # by every prompt
    opening: tuple[int, ...] = ()  # the ids that open it; none if they are not separable from other text

    @classmethod
    def of(cls, decode: Decode, marks: tuple[str, str], prompt_end: Sequence[int]) -> "ThoughtFinder":
        """`prompt_end`: the last ids of any prompt."""
        begin, end = marks[0].rstrip(), marks[1]
        words = decode(prompt_end).rstrip()
        if not words.endswith(begin):
            return cls(decode, begin, end)
        before = words.removesuffix(begin)
        num_before = _num_ids(prompt_end, before, decode)
        is_separable = decode(prompt_end[:num_before]) == before
        return cls(decode, begin, end, True, tuple(prompt_end[num_before:]) if is_separable else ())

    def num_tokens(self, reply: Sequence[int]) -> int:
        """How many of the reply's first ids are its thought, with its marks and the blank space behind them.

        If what opened it cannot be taken out of the prompt, the mark that ends it stays too.
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
            if found < 0:  # never closed: all of it is thought
                return len(text)
            if self.is_opened and not self.opening:
                return found
            behind = text[found + len(self.end) :]
            rest = behind.removeprefix(_NEXT_MESSAGE).lstrip()
            start = len(text) - len(rest)
            if not (behind.startswith(_NEXT_MESSAGE) and rest.startswith(self.begin)):
                return start


def _num_ids(ids: Sequence[int], beginning: str, decode: Decode) -> int:
    """The fewest leading ids whose text has `beginning`."""
    return bisect_left(range(len(ids)), x=True, key=lambda num: decode(ids[:num]).startswith(beginning))
