"""Conversations as pieces that can be compared even if a program changed the format of earlier messages.

The readers of the dialects leave out transport fields (`cache_control`, item ids, statuses, signatures) and join a list of texts into one
text, so a `ChatPiece` contains only what was sent to the policy or what it said. Other changes to replies are handled here: arguments are
compared as JSON values, thoughts are not compared, a call with an id that we made is that call whatever its content, and a reply whose
calls were sent back in several messages is joined again. Texts are compared untrimmed, because no program trims them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import Any, Literal

from msgspec.structs import replace as with_fields

from pipeline.chat import ChatMessage, Role, ToolCall
from workers.foreign.fields import json_value

Copy = Literal["same", "printed", "thoughts", "healed"]
"""The difference between a program's copy and the reply. "printed": its arguments are other JSON text for the same values; "thoughts": they
are missing or cut; "healed": words, names or arguments differ, and its calls' ids identify this reply."""
COPIES: tuple[Copy, ...] = ("same", "printed", "thoughts", "healed")

UNPARTED = -1  # the number of a piece's message if the dialect has items instead of messages


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """The smallest part of a conversation that can be sent by itself: a text, a call, or a call's result."""

    role: Role
    text: str = ""
    thought: str = ""  # an assistant's thought before the text or the call
    call: ToolCall | None = None
    call_id: str = ""  # id of the call whose result this is
    is_error: bool = False  # the program says that the call failed
    message: int = UNPARTED  # number of the message that it is part of


def assistant_pieces(
    text: str, thought: str, calls: Sequence[ToolCall], *, message: int = UNPARTED
) -> list[ChatPiece]:
    """The pieces of an assistant's message. A message without content and calls is one piece without text."""
    made = [ChatPiece("assistant", text, message=message)] if text or not calls else []
    made += [ChatPiece("assistant", call=call, message=message) for call in calls]
    return [replace(made[0], thought=thought), *made[1:]]


def same_piece(one: ChatPiece, other: ChatPiece) -> bool:
    """Whether both have the same content. Thoughts are ignored, because programs trim them or leave them out."""
    if (one.role, one.text, one.call_id) != (other.role, other.text, other.call_id):
        return False
    if one.call is None or other.call is None:
        return one.call is other.call
    return one.call.id == other.call.id and same_call(one.call, other.call)


def same_call(one: ToolCall, other: ToolCall) -> bool:
    """Whether name and arguments are the same; programs print arguments again in their own way."""
    return one.name == other.name and same_arguments(one.arguments, other.arguments)


def same_arguments(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return _same_value(json_value(one), json_value(other))
    except ValueError:
        return False


def _same_value(one: Any, other: Any) -> bool:
    """Equality of JSON values: 1.0 is 1, and neither is true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_value(one[key], other[key]) for key in one)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_value, one, other))  # pyright: ignore[reportUnknownArgumentType]
    return bool(one == other)


def told_end(told: Sequence[ChatPiece], pieces: Sequence[ChatPiece], at: int) -> int | None:
    """Returns the index after `told` in `pieces`; None if `pieces` does not contain `told` at the index `at`."""
    end = at + len(told)
    if end > len(pieces) or not all(map(same_piece, told, pieces[at:end])):
        return None
    return end


def copy_at(said: ChatMessage, pieces: Sequence[ChatPiece], at: int) -> tuple[int, Copy] | None:
    """Returns the index after the copy of a reply that begins at `at`, and how the copy differs; None if there is no copy.

    A reply without calls is recognised by its text alone, a reply with calls by their ids alone.
    """
    return _copy_of_calls(said, pieces, at) if said.tool_calls else _copy_of_words(said, pieces, at)


def _copy_of_words(said: ChatMessage, pieces: Sequence[ChatPiece], at: int) -> tuple[int, Copy] | None:
    piece = pieces[at] if at < len(pieces) else None
    if piece is None or piece.role != "assistant" or piece.call is not None or piece.text != said.content:
        return None
    following = pieces[at + 1] if at + 1 < len(pieces) else None
    if following is not None and following.message == piece.message != UNPARTED:
        return None  # the reply had no such call
    return at + 1, "same" if piece.thought == said.reasoning else "thoughts"


def _copy_of_calls(said: ChatMessage, pieces: Sequence[ChatPiece], at: int) -> tuple[int, Copy] | None:
    own = {call.id: call for call in said.tool_calls}
    words: list[ChatPiece] = []
    found: list[ChatPiece] = []
    for piece in pieces[at:]:
        if piece.role != "assistant":
            break
        if piece.call is not None and piece.call.id in own:
            found.append(piece)
        elif piece.call is None and not found:
            words.append(piece)
        else:
            break
    if not found:
        return None
    returned = [piece.call for piece in found if piece.call is not None]
    text = "".join(piece.text for piece in words)
    thought = "".join(piece.thought for piece in (*words, *found))
    copy: Copy = "same" if thought == said.reasoning else "thoughts"
    has_all = text == said.content and [call.id for call in returned] == list(own)
    if not has_all or not all(same_call(call, own[call.id]) for call in returned):
        copy = "healed"
    elif copy == "same" and any(call.arguments != own[call.id].arguments for call in returned):
        copy = "printed"
    return at + len(words) + len(found), copy


def arranged(pieces: Iterable[ChatPiece], replies: Mapping[str, int]) -> list[ChatPiece]:
    """Returns the pieces with each reply's calls together, followed by the results in the order of the calls.

    `replies` contains, for each id that we made, the number of its reply. Programs send parallel calls back one by one, each before its
    result, and results in the order in which they arrived. Many templates show results without ids, so only their order tells the policy
    which is which.
    """
    return list(_with_sorted_results(_regrouped(pieces, replies)))


def _regrouped(pieces: Iterable[ChatPiece], replies: Mapping[str, int]) -> list[ChatPiece]:
    made: list[ChatPiece] = []
    # The newest reply with calls, and the index at which its next call belongs
    last: tuple[int, int] | None = None
    for piece in pieces:
        reply = None if piece.call is None else replies.get(piece.call.id)
        if reply is None:
            last = last if piece.role in ("tool", "assistant") else None
            made.append(piece)
        elif last is not None and last[0] == reply:
            # Text that a program repeats before a further call of the same message is dropped.
            while len(made) > last[1] and made[-1].message == piece.message != UNPARTED:
                made.pop()
            made.insert(last[1], piece)
            last = reply, last[1] + 1
        else:
            made.append(piece)
            last = reply, len(made)
    return made


def _with_sorted_results(pieces: Sequence[ChatPiece]) -> Iterator[ChatPiece]:
    called_at: dict[str, int] = {}
    numbers = count()
    for are_results, group in groupby(pieces, key=lambda one: one.role == "tool"):
        if are_results:
            yield from sorted(group, key=lambda one: called_at.get(one.call_id, len(pieces)))
            continue
        for piece in group:
            if piece.call is not None:
                called_at[piece.call.id] = next(numbers)
            yield piece


def messages_of(pieces: Iterable[ChatPiece]) -> tuple[ChatMessage, ...]:
    """The pieces as messages: an assistant's text and the calls after it are one message."""
    made: list[ChatMessage] = []
    before: ChatPiece | None = None
    for piece in pieces:
        calls = () if piece.call is None else (piece.call,)
        if before is not None and _goes_on(before, piece):
            made[-1] = with_fields(made[-1], tool_calls=(*made[-1].tool_calls, *calls))
        else:
            made.append(
                ChatMessage(
                    piece.role,
                    piece.text,
                    reasoning=piece.thought,
                    tool_calls=calls,
                    tool_call_id=piece.call_id,
                )
            )
        before = piece
    return tuple(made)


def _goes_on(before: ChatPiece, piece: ChatPiece) -> bool:
    """Whether both belong to one message. If the dialect has items, calls belong to the text before them."""
    if before.role != "assistant":
        return False
    if piece.message != UNPARTED:
        return before.message == piece.message
    return piece.call is not None and not piece.thought
