"""The tree of an episode: each reply with the reply that it follows, found from the conversations that the program sends.

A program sends its whole conversation with each request. The policy's own replies are recognised by their position in the conversation,
never by their text alone: a request continues the deepest recorded reply for which it begins with all messages and replies from the root to
that reply. The messages after that reply are new input. Any other request starts a branch or a new root: a title, a subagent, a summary, an
edit, a second try. The sampled ids stay in the context, whatever the program changed in its copy.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pipeline.chat import ChatMessage, Role
from pipeline.message import unpack_int32s
from pipeline.trajectory import FIRST_IN_CONTEXT, Action, Observation, Turn
from workers.foreign.canonical import COPIES, ChatPiece, Copy, arranged, copy_at, told_end
from workers.foreign.tools import NO_TOOLS, arguments_object

MOST_NODES = 1024
_COMMANDS = ("command", "cmd", "script")  # names under which programs' tools take a command


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
        calls = tuple(replace(call, id=_made_id(number, place)) for place, call in enumerate(said.tool_calls))
        for call, written in zip(calls, said.tool_calls, strict=True):
            self._replies[call.id] = number
            self.own_ids[call.id] = written.id
        return replace(said, tool_calls=calls)

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
    node.turn = replace(node.turn, actions=tuple(actions))


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
        node: replace(
            node.turn,
            after=FIRST_IN_CONTEXT if node.parent is None else places[node.parent],
            thread=threads[node.root],
            aside=not asides_are_trained and tree.is_aside(node),
        )
        for node in taken
    }
