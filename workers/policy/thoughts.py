"""Where the thought of a reply ends among its sampled ids, so that it can be taken out without tokenising anything again.

A thought stands between a pair of tags at the reply's beginning, or is opened by the prompt already. A closing tag anywhere
else is text.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
)
"""How thoughts are opened and closed by the model families."""


def opened_thought(prompt_end: Sequence[int], decode: Decode) -> tuple[str, int]:
    """The closing tag of a thought that a prompt ending with these ids has opened, and how many of the ids open it.

    ("", 0) if it opens none; 0 ids if the tag begins inside a token, which is then kept.
    """
    text = decode(prompt_end)
    words = text.rstrip()
    for opening, closing in TAGS:
        if words.endswith(opening):
            start = _num_ids(prompt_end, words.removesuffix(opening), decode)
            is_exact = decode(prompt_end[:start]) == words.removesuffix(opening)
            return closing, len(prompt_end) - start if is_exact else 0
    return "", 0


def thought_tokens(reply: Sequence[int], decode: Decode, *, closing: str, keep_closing: bool) -> int:
    """How many of the reply's first ids are its thought, with the tags and the blank space behind them.

    `closing`: of the thought that the prompt has opened, or "". `keep_closing`: leave that tag, because its opening stays.
    A token that begins inside the thought and ends outside is not counted.
    """
    text = decode(reply)
    end = _end_of_thought(text, closing, keep_closing=keep_closing)
    if end == 0:
        return 0
    num_ids = _num_ids(reply, text[:end], decode)
    return num_ids if len(decode(reply[:num_ids])) <= end else num_ids - 1


def _end_of_thought(text: str, closing: str, *, keep_closing: bool) -> int:
    start = 0
    if not closing:
        start = len(text) - len(text.lstrip())
        closing = next((end for opening, end in TAGS if text.startswith(opening, start)), "")
        if not closing:
            return 0
    found = text.find(closing, start)
    if found < 0:  # never closed: all of it is thought
        return len(text)
    if keep_closing:
        return found
    rest = text[found + len(closing) :]
    return len(text) - len(rest.lstrip())


def _num_ids(ids: Sequence[int], beginning: str, decode: Decode) -> int:
    """The fewest leading ids whose text has `beginning`."""
    return bisect_left(range(len(ids)), x=True, key=lambda num: decode(ids[:num]).startswith(beginning))
