"""What each sampled token is part of: a thought, a call of a tool or a command, other text, or the end of the turn.

Workers have taken each reply's text apart, so its parts are known in characters. Which tokens those are is found by decoding,
and only for the replies that are asked about. Marks around thoughts and calls count with them. For statistics, not for training:
a token across two parts counts with the first.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from pipeline.chat import ChatMessage
from pipeline.reply_format import THOUGHT_MARKS
from pipeline.trajectory import Turn
from trainer.batching.batch import ReplyPart, Sample, TokenKind

KINDS: tuple[TokenKind, ...] = get_args(TokenKind)

Decode = Callable[[Sequence[int]], str]


def parts_of(turn: Turn) -> tuple[ReplyPart, ...]:
    """The parts of a reply's text, in order and none of them empty."""
    text, said = turn.text, turn.said
    begin = _end_of_thought(text, said)
    parts = [ReplyPart("thought", begin)]
    for start, end in _calls(text, said, begin) if said.tool_calls else _commands(turn, begin):
        parts += [ReplyPart("text", start), ReplyPart("call", end)]
    parts.append(ReplyPart("text", len(text)))
    ends = [0, *(part.end for part in parts)]
    return tuple(part for part, before in zip(parts, ends, strict=False) if part.end > before)


def token_kinds(sample: Sample, decode: Decode) -> npt.NDArray[np.int8]:
    """The kind of each token of a sample, as its place in KINDS."""
    kinds_T = np.zeros(sample.num_tokens, np.int8)
    for reply in sample.replies:
        ids = sample.tokens_T[reply.start : reply.end].tolist()
        if reply.is_ended:
            kinds_T[reply.end - 1] = KINDS.index("end")
            ids.pop()
        begin = 0
        for part in reply.parts:
            end = _num_tokens(ids, part.end, decode)
            kinds_T[reply.start + begin : reply.start + end] = KINDS.index(part.kind)
            begin = end
        kinds_T[reply.start + begin : reply.start + len(ids)] = KINDS.index("text")
    return kinds_T


def _num_tokens(ids: Sequence[int], num_chars: int, decode: Decode) -> int:
    """The fewest leading tokens whose text has so many characters; all of them if it is shorter."""
    return bisect_left(range(len(ids)), num_chars, key=lambda number: len(decode(ids[:number])))


def _end_of_thought(text: str, said: ChatMessage) -> int:
    """Where the thoughts and the mark that ends them are over; 0 if there are none, or not in one piece."""
    if not said.reasoning or (found := text.find(said.reasoning)) < 0:
        return 0
    end = found + len(said.reasoning)
    for _, mark in THOUGHT_MARKS.values():
        place = end + len(text[end:]) - len(text[end:].lstrip())
        if text.startswith(mark, place):
            return place + len(mark)
    return end


def _calls(text: str, said: ChatMessage, begin: int) -> Iterator[tuple[int, int]]:
    """What is neither thought nor content, where a reply holds tool calls."""
    for line in filter(None, map(str.strip, said.content.splitlines())):
        found = text.find(line, begin)
        if found < 0:
            continue
        if text[begin:found].strip():
            yield begin, found
        begin = found + len(line)
    if text[begin:].strip():
        yield begin, len(text)


def _commands(turn: Turn, begin: int) -> Iterator[tuple[int, int]]:
    """The commands of a reply that writes them as text."""
    for action in turn.actions:
        found = turn.text.find(action.command, begin) if action.command else -1
        if found >= 0:
            begin = found + len(action.command)
            yield found, begin
