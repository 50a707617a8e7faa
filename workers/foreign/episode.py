"""One episode of an agent program: its tree of replies, its limits, and its end.

The code that starts the program holds an `AgentEpisode` and its `AgentEndpoint` (endpoint.py): it passes the endpoint's `protocol_factory`
to the sandbox, waits for the end of the program or for `ended()`, and takes `turns()`. The program never sees engine failures, because each
program would react in its own way: its connection stays open and `ended()` raises. It does see a limit, as a refusal, and then `ended()`
returns.

A reply is recorded before a byte of it is sent. It becomes a turn when the program has received its last byte, or continues it.
"""

import asyncio
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from pipeline.chat import ChatMessage
from pipeline.request import Limits
from pipeline.trajectory import Turn
from workers.agent.loop import Watcher
from workers.foreign.conversations import MOST_NODES, Node, Place, Tree, messages_of, note_results, turns_of
from workers.foreign.dialect import Answer, Asked, Dialect
from workers.foreign.fields import ContextFull, RequestRefused
from workers.foreign.voices import AgentPrompt, AgentVoice, num_chars_of

MOST_SAMPLINGS_AT_ONCE = 4
# Programs make few requests besides those for replies: for models, for numbers of tokens, and repetitions.
REQUESTS_PER_TURN = 4
MORE_REQUESTS = 256
MOST_BYTES = 2 * 2**30  # size of all bodies of an episode together
# A text with more characters than this for each token of the context is refused without counting its tokens.
MOST_CHARS_PER_TOKEN = 64
# The episode ends when this number of requests after the same reply were refused because the context is full.
CONTEXT_REFUSALS = 3
# After a program drops a connection and asks again, its new request may arrive before the old connection is known to be closed.
RETRY_GRACE_S = 0.2

Ending = Literal["turns", "context", "wall_s"]


class EpisodeOver(RequestRefused):
    """A request that comes after the episode's end."""


class RequestAbandoned(Exception):
    """The connection of a request was closed before anything was sampled for it."""


class EpisodeBroken(Exception):
    """A request of an episode that has ended because of a failure in our code. It gets no answer."""


@dataclass(slots=True)
class EpisodeCounts:
    """The events in an episode besides its turns."""

    requests: int = 0  # requests of all kinds
    # Requests answered with a refusal, by its reason.
    refused: Counter[str] = field(default_factory=Counter[str])
    given_again: int = 0  # replies given to a program that asked again for one that it did not get
    not_taken: int = 0  # recorded replies that are not turns
    roots: int = 0
    branches: int = 0  # turns that follow a reply which another turn follows too
    asides: int = 0
    copies: Counter[str] = field(default_factory=Counter[str])  # replies by the fate of their copies
    quoted_calls: int = 0  # calls of ours that were sent as a part of other conversations
    tools_left_out: int = 0  # descriptions of tools that a provider would run, all requests together


@dataclass(slots=True, eq=False)
class Pending:
    """A requested reply, until the program has received it."""

    task: asyncio.Task[Node]
    is_connected: Callable[[], bool]  # whether the connection that waits for the reply is still open

    @property
    def is_open(self) -> bool:
        """Whether there is a reply, or will be one, that the program has not received."""
        task = self.task
        if not task.done():
            return True
        return not task.cancelled() and task.exception() is None and not task.result().is_taken


class AgentEpisode:
    """The episode. It is made in a running event loop, and closed when the program has ended."""

    def __init__(
        self,
        voice: AgentVoice,
        limits: Limits,
        *,
        watcher: Watcher | None = None,
        asides_are_trained: bool = False,
        command_pattern: str = "",
    ) -> None:
        """`command_pattern` is `Harness.command_pattern`."""
        self.tree = Tree()
        self.counts = EpisodeCounts()
        self.ending: Ending | None = None
        self._voice = voice
        self._limits = limits
        self._watcher = watcher
        self._asides_are_trained = asides_are_trained
        self._command = re.compile(command_pattern, re.DOTALL) if command_pattern else None
        self._slots = asyncio.Semaphore(MOST_SAMPLINGS_AT_ONCE)
        self._pending: defaultdict[bytes, list[Pending]] = defaultdict(list)
        self._num_asked = 0
        self._num_bytes = 0
        self._rendering = asyncio.Lock()  # a flood of requests then occupies one thread at most
        self._context_refusals: Counter[Node | None] = Counter()  # keys are preceding replies
        self.context_is_full = False
        """Whether the newest request for a reply was refused because the context had no room."""
        self._end: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._wall = asyncio.get_running_loop().call_later(limits.wall_s, self._reach, "wall_s")

    async def ended(self) -> Ending:
        """Returns the limit that the program reached, once it has.

        Raises the error that ended the episode: a RolloutError, or a bug in our code.
        """
        return await asyncio.shield(self._end)

    @property
    def is_over(self) -> bool:
        return self._end.done()

    def turns(self) -> list[Turn]:
        """The turns up to now, each with the turn that it follows."""
        return list(turns_of(self.tree, asides_are_trained=self._asides_are_trained).values())

    def counted(self) -> EpisodeCounts:
        """The counts up to now."""
        counts, nodes = self.counts, self.tree.nodes
        taken = [node for node in nodes if node.is_taken]
        counts.not_taken = len(nodes) - len(taken)
        counts.roots = sum(node.parent is None for node in taken)
        followed = Counter(node.parent for node in taken if node.parent is not None)
        counts.branches = sum(number - 1 for number in followed.values())
        counts.asides = sum(self.tree.is_aside(node) for node in taken)
        counts.copies = Counter(node.copy for node in taken if node.copy is not None)
        return counts

    async def close(self) -> None:
        """Ends every sampling. Recorded replies stay."""
        self._wall.cancel()
        for node in self.tree.nodes:
            if node.is_taken:
                self._acted(node)
        # A request whose reply ends without a result gets no answer from here on, and a failure that nobody waited for is not logged.
        self._end.cancel()
        tasks = [one.task for pending in self._pending.values() for one in pending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def count_request(self) -> None:
        """Counts a request of any kind. Raises EpisodeOver and EpisodeBroken."""
        self.counts.requests += 1
        self.check_over()
        if self.counts.requests > REQUESTS_PER_TURN * self._limits.turns + MORE_REQUESTS:
            self._end_at("turns")

    def count_bytes(self, num_bytes: int) -> None:
        """Adds `num_bytes` to the bytes of bodies that the episode has used. Raises EpisodeOver and EpisodeBroken if they are too many."""
        self._num_bytes += num_bytes
        if self._num_bytes > MOST_BYTES:
            self._end_at("turns")

    def refused(self, refused: RequestRefused) -> None:
        """Counts a request that is answered with a refusal, by its reason."""
        self.counts.refused[
            type(refused).__name__ if type(refused) is not RequestRefused else str(refused)[:200]
        ] += 1

    def broken(self, error: BaseException) -> None:
        """Ends the episode after a failure of our own code; no later request gets an answer."""
        if not self._end.done():
            self._end.set_exception(error)

    async def prompt_tokens(self, asked: Asked, session: str) -> int:
        """The length of the prompt that a request would have."""
        place = self.tree.place(asked.pieces, asked.tools.key, session)
        return (await self._rendered(asked, place)).num_tokens

    async def ask(
        self,
        asked: Asked,
        dialect: Dialect,
        body: bytes,
        *,
        session: tuple[str, bool],
        is_connected: Callable[[], bool],
    ) -> Pending:
        """Begins the reply to a request. Raises RequestRefused, EpisodeOver and EpisodeBroken.

        A request that comes again gets the reply of the first one if that is unfinished or undelivered and the first connection is closed.
        Otherwise it counts as a new request: programs send equal requests in parallel conversations, and when they try again.
        """
        key = hashlib.blake2b(b"\0".join([dialect.path.encode(), session[0].encode(), body])).digest()
        if self._open(key):
            found = self._undelivered(key)
            if found is None:
                await asyncio.sleep(RETRY_GRACE_S)
                found = self._undelivered(key)
            if found is not None:
                found.is_connected = is_connected
                self.counts.given_again += 1
                return found
        place = self.tree.place(asked.pieces, asked.tools.key, session[0])
        try:
            prompt = await self._rendered(asked, place)
        except ContextFull:
            self._refuse_context(place.parent)
            raise
        self.check_over()
        if not is_connected():
            raise RequestAbandoned
        if self._num_asked >= min(self._limits.turns, MOST_NODES):
            self._end_at("turns")
        return self._begin(asked, dialect, place, prompt, key, session, is_connected)

    def _begin(
        self,
        asked: Asked,
        dialect: Dialect,
        place: Place,
        prompt: AgentPrompt,
        key: bytes,
        session: tuple[str, bool],
        is_connected: Callable[[], bool],
    ) -> Pending:
        """Begins to sample. There is no `await` between here and the moment when the reply is registered as pending."""
        number = self._num_asked
        self._num_asked += 1
        self.counts.tools_left_out += asked.tools.num_left_out
        self._note(place)
        sampling = self._sample(asked, dialect, place, prompt, number, session)
        task = asyncio.create_task(sampling, name=f"reply {number} of an agent program")
        task.add_done_callback(self._sampled)
        pending = Pending(task, is_connected)
        self._pending[key].append(pending)
        return pending

    def _open(self, key: bytes) -> list[Pending]:
        """The replies to this request that the program has not received."""
        self._pending[key] = [one for one in self._pending[key] if one.is_open]
        return self._pending[key]

    def _undelivered(self, key: bytes) -> Pending | None:
        """The oldest such reply whose connection is closed."""
        return next((one for one in self._open(key) if not one.is_connected()), None)

    def delivered(self, pending: Pending) -> None:
        """Records that the program has received the last byte of a reply."""
        self._take(pending.task.result())

    def answer(self, node: Node) -> Answer:
        turn = node.turn
        prompt_tokens, sampled_tokens = turn.kept_tokens + len(turn.fed) // 4, len(turn.sampled) // 4
        if turn.usage is not None:  # the server's own count, where ids are not known
            prompt_tokens, sampled_tokens = turn.usage.prompt_tokens, turn.usage.completion_tokens
        return Answer(node.number, node.said, turn.stop, prompt_tokens, sampled_tokens)

    def _note(self, place: Place) -> None:
        """Records what a request that will get a reply shows about earlier replies."""
        self.counts.quoted_calls += place.num_quoted
        for node, _ in place.copies:
            self._take(node)
        self.tree.note_copies(place)
        self.tree.note_quotes(place)
        if place.parent is not None:
            note_results(place.parent, place.told, self._command)
            self._acted(place.parent)
        if self._watcher is not None:
            self._watcher.told(messages_of(place.told))

    def _take(self, node: Node) -> None:
        """Makes a reply a turn, because the program has received it."""
        if node.is_taken:
            return
        node.is_taken = True
        if self._watcher is not None:
            self._watcher.replied(self._turn(node))
        if not node.turn.actions:
            self._acted(node)

    def _acted(self, node: Node) -> None:
        """Reports a turn's actions to the watcher once: when the results of its calls arrive, or when there will be none."""
        if node.is_acted or self._watcher is None:
            return
        node.is_acted = True
        self._watcher.acted(self._turn(node))

    def _turn(self, node: Node) -> Turn:
        return turns_of(self.tree, asides_are_trained=self._asides_are_trained)[node]

    async def _rendered(self, asked: Asked, place: Place) -> AgentPrompt:
        """The prompt. Raises RequestRefused and ContextFull."""
        num_chars = asked.tools.num_chars + sum(num_chars_of(piece) for piece in place.told)
        if num_chars > MOST_CHARS_PER_TOKEN * self._voice.context_tokens:
            raise ContextFull(None, self._voice.context_tokens)
        async with self._rendering:
            return await asyncio.to_thread(self._voice.prompt, asked, place, self.tree)

    async def _sample(
        self,
        asked: Asked,
        dialect: Dialect,
        place: Place,
        prompt: AgentPrompt,
        number: int,
        session: tuple[str, bool],
    ) -> Node:
        """Samples a reply and records it. Raises ContextFull if only a server can tell that the context is full."""
        async with self._slots:
            try:
                turn = await prompt.reply(number)
            except ContextFull:
                self._refuse_context(place.parent)
                raise
        self._context_refusals.pop(place.parent, None)
        self.context_is_full = False
        said = self.tree.name_calls(dialect.sendable(turn.said, asked), number)
        reply = None if said == ChatMessage("assistant", turn.text) else said
        turn = replace(turn, told=messages_of(place.told), reply=reply)
        node = Node(number, place.parent, asked.tools.key, place.told, said, turn, *session)
        note_results(node, (), self._command)
        self.tree.add(node)
        return node

    def _sampled(self, task: asyncio.Task[Node]) -> None:
        """Handles the end of a sampling. Any failure is ours, and the program does not see it, but a full context is not a failure."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, RequestRefused):
            self.broken(error)

    def _refuse_context(self, parent: Node | None) -> None:
        self.context_is_full = True
        self._context_refusals[parent] += 1
        if self._context_refusals[parent] >= CONTEXT_REFUSALS:
            self._reach("context")

    def check_over(self) -> None:
        """Raises EpisodeOver and EpisodeBroken."""
        if self.ending is not None:
            raise EpisodeOver(_SENTENCES[self.ending])
        if self._end.done():
            raise EpisodeBroken

    def _end_at(self, limit: Ending) -> None:
        """Ends the episode at `limit` and raises EpisodeOver; raises EpisodeBroken if the episode ended otherwise before."""
        self._reach(limit)
        self.check_over()

    def _reach(self, limit: Ending) -> None:
        """Records that the episode ends at `limit`.

        Only the wall time ends current samplings, because other limits allow a reply to finish.
        """
        if self._end.done():
            return
        self.ending = limit
        self._end.set_result(limit)
        if limit == "wall_s":
            for pending in self._pending.values():
                for one in pending:
                    one.task.cancel()


_SENTENCES: dict[Ending, str] = {
    "turns": "the episode is over: its limit of replies is reached",
    "context": "the episode is over: the context was full again and again",
    "wall_s": "the episode is over: its time is up",
}
