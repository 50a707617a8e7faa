"""The conversations that an agent program sends: pieces that can be compared even if the program changed the format of earlier messages,
and the tree of an episode, in which each reply has the reply that it follows.

The readers of the dialects leave out transport fields (`cache_control`, item ids, statuses, signatures) and join a list of texts into one
text, so a `ChatPiece` contains only what was sent to the policy or what it said. Other changes to replies are handled here: arguments are
compared as JSON values, thoughts are not compared, a call with an id that we made is that call whatever its content, and a reply whose
calls were sent back in several messages is joined again. Texts are compared untrimmed, because no program trims them.

A program sends its whole conversation with each request. The policy's own replies are recognised by their position in the conversation,
never by their text alone: a request continues the deepest recorded reply for which it begins with all messages and replies from the root to
that reply. The messages after that reply are new input. Any other request starts a branch or a new root: a title, a subagent, a summary, an
edit, a second try. The sampled ids stay in the context, whatever the program changed in its copy.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from typing import Any, Literal

from msgspec.structs import replace as with_fields

from pipeline.chat import ChatMessage, Role, ToolCall
from pipeline.message import unpack_int32s
from pipeline.trajectory import FIRST_IN_CONTEXT, Action, Observation, Turn
from workers.foreign.fields import json_value
from workers.foreign.tools import NO_TOOLS, arguments_object

Copy = Literal["same", "printed", "thoughts", "healed"]
"""The difference between a program's copy and the reply. "printed": its arguments are other JSON text for the same values; "thoughts": they
are missing or cut; "healed": words, names or arguments differ, and its calls' ids identify this reply."""
COPIES: tuple[Copy, ...] = ("same", "printed", "thoughts", "healed")

UNPARTED = -1  # the number of a piece's message if the dialect has items instead of messages

MOST_NODES = 1024
_COMMANDS = ("command", "cmd", "script")  # names under which programs' tools take a command


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


@dataclass(slots=True, eq=False)
class Node:
    """A recorded reply. Nodes are compared by identity: two replies with the same text are two nodes."""

    number: int  # index of its sampling, in the order of the requests
    parent: "Node | None"
    tools_key: bytes
    told: tuple[ChatPiece, ...]  # the messages since the parent's reply; for a root, all messages before it
    said: ChatMessage  # the reply as it was sent to the program; its calls have our ids
    turn: Turn
    session: str = ""
    is_subagent: bool = False
    children: list["Node"] = field(default_factory=list["Node"])
    is_taken: bool = False  # whether the program has received it
    results: dict[str, Observation | None] = field(default_factory=dict[str, Observation | None])
    is_acted: bool = False  # whether viewers of the episode have been shown the results of its calls
    copy: Copy | None = None  # the most changed copy that came back; None if no copy came back
    is_quoted_later: bool = False  # whether a later prompt of another conversation contains its text

    @property
    def root(self) -> "Node":
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def path(self) -> list["Node"]:
        """The replies from the root to this one."""
        found: list[Node] = [self]
        while found[-1].parent is not None:
            found.append(found[-1].parent)
        return found[::-1]

    def ids(self) -> list[int]:
        """The exact ids that the engine held after this reply."""
        held: list[int] = []
        for node in self.path():
            held += unpack_int32s(node.turn.fed)
            held += unpack_int32s(node.turn.sampled)
        return held


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a request in the tree."""

    parent: Node | None
    told: tuple[ChatPiece, ...]  # the messages after the parent's reply
    copies: tuple[tuple[Node, Copy], ...] = ()  # the copies of the replies on the path to `parent`
    num_quoted: int = 0  # number of the episode's tool calls in `told` that are not on the path to `parent`


@dataclass(slots=True)
class Tree:
    """All replies of one episode, in the order in which they were finished."""

    nodes: list[Node] = field(default_factory=list[Node])
    roots: list[Node] = field(default_factory=list[Node])
    # The number of the reply that made each call, by our id of the call.
    _replies: dict[str, int] = field(default_factory=dict[str, int])
    # The id that the policy wrote for each call, by our id of the call.
    own_ids: dict[str, str] = field(default_factory=dict[str, str])

    def place(self, asked: Sequence[ChatPiece], tools_key: bytes, session: str = "") -> Place:
        """Finds the position of a request with these pieces."""
        pieces = arranged(asked, self._replies)
        best: tuple[tuple[int, bool, bool, int], Node] | None = None
        copies: dict[Node, Copy] = {}
        open_nodes = [(root, 0) for root in self.roots if root.tools_key == tools_key]
        while open_nodes:
            node, at = open_nodes.pop()
            end = told_end(node.told, pieces, at)
            found = None if end is None else copy_at(node.said, pieces, end)
            if found is None:
                continue
            end, copies[node] = found
            rank = (end, node.session == session, node.is_taken, node.number)
            if best is None or rank > best[0]:
                best = rank, node
            open_nodes += [(child, end) for child in node.children]
        if best is None:
            return Place(None, tuple(pieces), num_quoted=self._num_quoted(pieces))
        told = tuple(pieces[best[0][0] :])
        on_the_way: tuple[tuple[Node, Copy], ...] = tuple((node, copies[node]) for node in best[1].path())
        return Place(best[1], told, on_the_way, self._num_quoted(told))

    def _num_quoted(self, pieces: Sequence[ChatPiece]) -> int:
        return sum(piece.call is not None and piece.call.id in self._replies for piece in pieces)

    def add(self, node: Node) -> None:
        """Record a finished reply."""
        self.nodes.append(node)
        (self.roots if node.parent is None else node.parent.children).append(node)

    def name_calls(self, said: ChatMessage, number: int) -> ChatMessage:
        """Returns the reply `number` with our own id for each call: unique in the episode, and the same in every repetition of it."""
        calls = tuple(
            with_fields(call, id=_made_id(number, place)) for place, call in enumerate(said.tool_calls)
        )
        for call, written in zip(calls, said.tool_calls, strict=True):
            self._replies[call.id] = number
            self.own_ids[call.id] = written.id
        return with_fields(said, tool_calls=calls)

    def note_copies(self, place: Place) -> None:
        """Record how the program changed its copies of the replies."""
        for node, copy in place.copies:
            if node.copy is None or COPIES.index(copy) > COPIES.index(node.copy):
                node.copy = copy

    def note_quotes(self, place: Place) -> None:
        """Record which first replies of conversations are quoted in the new messages."""
        texts = [piece.text for piece in place.told]
        for root in self.roots:
            words = root.said.content.strip()
            if words and any(words in text for text in texts):
                root.is_quoted_later = True

    def is_aside(self, node: Node) -> bool:
        """Whether the program did not use a reply: it has no tools, begins a conversation, and no later prompt contains it.

        If no conversation of a program has tools, the first conversation is the main one, and its reply counts as used.
        """
        if node.parent is not None or node.tools_key != NO_TOOLS:
            return False
        if node.children or node.is_quoted_later:
            return False
        taken = [root for root in self.roots if root.is_taken]
        first = min(taken, key=lambda root: root.number)
        return node is not first or any(root.tools_key != NO_TOOLS for root in taken)

    def threads(self) -> dict[Node, str]:
        """A name for each root's conversation, in the order of the requests."""
        names: dict[Node, str] = {}
        for number, root in enumerate(sorted(self.roots, key=lambda one: one.number), 1):
            names[root] = f"conversation {number}{', subagent' if root.is_subagent else ''}"
        return names


def _made_id(number: int, place: int) -> str:
    return f"call_{hashlib.blake2b(f'{number}.{place}'.encode(), digest_size=10).hexdigest()}"


def note_results(
    node: Node, results: Sequence[ChatPiece] = (), command: re.Pattern[str] | None = None
) -> None:
    """Makes actions from a reply's calls, with their results if they were sent back.

    A reply without calls has an action if the pattern `command`, whose group is a command, occurs once in its text. The result is then the
    program's user message.

    The program ran the calls itself. Only the results that the policy was shown are known and, in one dialect, whether the program marks a
    result as an error; the exit status contains no more than that. With these actions, judges and pages show commands and outputs instead
    of a reply without a command. If two requests contain different results of one call, as a policy could forge, neither counts.
    """
    told_as: Role = "tool" if node.said.tool_calls else "user"
    told = [piece for piece in results if piece.role == told_as]
    if told_as == "user" and told:
        told = [ChatPiece("user", "\n\n".join(piece.text for piece in told))]
    for piece in told:
        seen = _observed(piece)
        node.results[piece.call_id] = seen if node.results.get(piece.call_id, seen) == seen else None
    commands = [(call.id, _command(call.name, call.arguments)) for call in node.said.tool_calls]
    if command is not None and not commands:
        commands = [("", found[1]) for found in command.finditer(node.said.content)]
        commands = commands if len(commands) == 1 else []
    actions = [
        Action(command=words, observation=node.results.get(call_id), tool_call_id=call_id)
        for call_id, words in commands
    ]
    node.turn = with_fields(node.turn, actions=tuple(actions))


def _observed(result: ChatPiece) -> Observation:
    return Observation(exit_code=int(result.is_error), output=result.text, dropped_chars=0, wall_s=0.0)


def _command(name: str, arguments: str) -> str:
    """The command of a call that has one, otherwise the call as the policy wrote it."""
    fields = arguments_object(arguments) or {}
    for key in _COMMANDS:
        command = fields.get(key)
        if isinstance(command, str) and command:
            return command
        if isinstance(command, list) and command:
            return " ".join(str(word) for word in command)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return f"{name} {arguments}"


def turns_of(tree: Tree, *, asides_are_trained: bool = False) -> dict[Node, Turn]:
    """The replies that the program received, in the order in which they were finished. A reply with a successor was received."""
    taken = [node for node in tree.nodes if node.is_taken]
    places = {node: place for place, node in enumerate(taken)}
    threads = tree.threads()
    return {
        node: with_fields(
            node.turn,
            after=FIRST_IN_CONTEXT if node.parent is None else places[node.parent],
            thread=threads[node.root],
            aside=not asides_are_trained and tree.is_aside(node),
        )
        for node in taken
    }
