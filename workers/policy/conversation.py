"""One episode's token sequence, which consists only of fed and sampled tokens, and the part of it that is in the context: all of it
while it fits, otherwise its opening, its first and its newest units.

A `Speaker` (speaker.py) gets replies to the prompts, and a `_Window` decides which part of the episode is in the context. The engine's
sequence and the next prompt share their first tokens (`kept_tokens`); everything after them is fed, including kept replies after a cut.

Everything works on ids. The kept parts keep their ids, which matters most for sampled replies; only the message with the note about omitted
turns, and a message that has to be shortened, are rendered again. With the policy "head_tail" every prompt leaves room for
`max_new_tokens`, or no request is made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as with_fields

from pipeline.chat import THOUGHT_MARKS, ChatMessage
from pipeline.message import unpack_int32s
from pipeline.request import Context, RolloutRequest
from pipeline.telemetry import span
from pipeline.trajectory import Cut, Turn
from workers.policy.render import Renderer, ThoughtFinder
from workers.policy.speaker import Speaker

MIN_ROOM_TOKENS = 16  # a reply cut shorter than this is useless
_MARKER = "[... {} turn(s) of interaction history omitted due to context window limit ...]"
_SHORTENED = "\n[... {} character(s) omitted due to context window limit ...]\n"
_FRAME_TOKENS = 8  # estimated number of tokens that the chat template adds to the note about omitted turns


@dataclass(frozen=True, slots=True)
class _Unit:
    """A reply of the policy and the messages after it; a cut keeps or omits both."""

    reply: tuple[int, ...]  # the sampled ids, without a thought that was taken out
    told: tuple[ChatMessage, ...]
    fed: tuple[int, ...]  # `told` as ids, between the end of this reply and the opening of the next one
    # The ids before the reply that open the removed thought, and are removed with it
    opening: tuple[int, ...] = ()
    # Tokens of the thought that was taken out of the reply; None: it was not looked for.
    thought_tokens: int | None = None
    dropped_chars: int = 0  # cut out of the middle of `told`

    @property
    def num_tokens(self) -> int:
        return len(self.reply) + len(self.fed)


@dataclass(frozen=True, slots=True)
class _Episode:
    """All messages and replies so far, and the part of them that is in the context."""

    opening: tuple[ChatMessage, ...]
    opening_ids: tuple[int, ...]
    units: tuple[_Unit, ...] = ()
    omitted: range = range(0)  # units that are no longer in the context
    marker: str = ""  # the note in their place
    marked: tuple[int, ...] = ()  # the ids of the messages before them, with the note

    def ids(self) -> list[int]:
        """The prompt of the next reply."""
        ids = list(self.marked if self.omitted and not self.omitted.start else self.opening_ids)
        for number, unit in self._shown():
            if unit.opening and tuple(ids[-len(unit.opening) :]) == unit.opening:
                del ids[-len(unit.opening) :]
            ids += unit.reply
            ids += self.marked if self.omitted and number + 1 == self.omitted.start else unit.fed
        return ids

    @property
    def newest(self) -> tuple[ChatMessage, ...]:
        """The newest messages."""
        return self.units[-1].told if self.units else self.opening

    @property
    def num_newest(self) -> int:
        """The number of tokens of the newest messages."""
        return len(self.units[-1].fed if self.units else self.opening_ids)

    @property
    def num_marker(self) -> int:
        """The number of tokens of the note."""
        if not self.omitted:
            return 0
        before = self.units[self.omitted.start - 1].fed if self.omitted.start else self.opening_ids
        return len(self.marked) - len(before)

    @property
    def num_thoughts(self) -> int:
        """The number of replies that have lost their thoughts."""
        return sum(bool(unit.thought_tokens) for unit in self.units)

    def _shown(self) -> Iterator[tuple[int, _Unit]]:
        return ((n, unit) for n, unit in enumerate(self.units) if n not in self.omitted)


class _Window:
    """Puts an episode into the context: renders new messages, and cuts what does not fit."""

    def __init__(
        self, renderer: Renderer, context: Context, *, context_tokens: int, max_new_tokens: int
    ) -> None:
        self._renderer = renderer
        self._context = context
        reserved = max_new_tokens
        if context.policy == "stop":
            reserved = min(MIN_ROOM_TOKENS, max_new_tokens)
        self._max_prompt_tokens = context_tokens - reserved
        self._thoughts = ThoughtFinder.of(
            renderer.decode,
            THOUGHT_MARKS[renderer.reply_format.thoughts],
            renderer.suffix([ChatMessage("user", "")], last_id=renderer.end_id),
        )

    def opened(self, opening: Sequence[ChatMessage]) -> _Episode:
        """An episode that consists only of the opening."""
        return _Episode(tuple(opening), tuple(self._renderer.first_prompt(opening)))

    def told(self, episode: _Episode, reply: Sequence[int], messages: Sequence[ChatMessage]) -> _Episode:
        """The episode after `reply` and the following `messages`."""
        unit = self._rendered(_Unit(tuple(reply), tuple(messages), ()))
        return replace(episode, units=(*episode.units, unit))

    def told_again(self, episode: _Episode, messages: Sequence[ChatMessage]) -> _Episode:
        """The episode in which `messages` follow the newest messages, without a reply in between."""
        if not episode.units:
            return self.opened((*episode.opening, *messages))
        *before, last = episode.units
        longer = self._rendered(replace(last, told=(*last.told, *messages), dropped_chars=0))
        return replace(episode, units=(*before, longer))

    def fit(self, episode: _Episode) -> _Episode | None:
        """The episode with a prompt that leaves room for a reply; None if no cut can achieve that."""
        if self._context.thinking == "strip":
            episode = self._without_thoughts(episode)
        if self._fits(episode):
            return episode
        if self._context.policy == "stop" or not episode.units:
            return None
        if self._context.thinking == "strip_on_cut":
            episode = self._without_thoughts(episode)
        return self._cut(episode)

    def _fits(self, episode: _Episode) -> bool:
        return len(episode.ids()) <= self._max_prompt_tokens

    def _cut(self, episode: _Episode) -> _Episode | None:
        """Omits units and, if only the newest is left, shortens its messages."""
        last = len(episode.units) - 1
        omitted = self._chosen(episode)
        while True:
            cut = self._marked(episode, omitted)
            if self._fits(cut):
                return cut
            if omitted == range(last):
                return self._shortened(cut)
            # The choice of turns only estimates the length of the note.
            start, stop = omitted.start, omitted.stop
            omitted = range(start, stop + 1) if stop < last else range(start - 1, stop)

    def _chosen(self, episode: _Episode) -> range:
        """The units to omit, so that the others fill `refill_to` of the room. Units omitted before stay omitted.

        The newest unit is kept whatever its size; of the remaining room, the first units get up to `head_share`, and the newest ones the
        rest.
        """
        costs = [unit.num_tokens for unit in episode.units]
        last, before = len(costs) - 1, episode.omitted
        note_tokens = len(self._renderer.encode_text(_MARKER.format(last))) + _FRAME_TOKENS
        room_tokens = self._max_prompt_tokens - len(episode.opening_ids) - note_tokens
        target_tokens = int(self._context.refill_to * room_tokens)
        left_tokens = target_tokens - costs[last]
        head_tokens = min(left_tokens, int(self._context.head_share * target_tokens))
        start, stop = 0, last
        while start < (before.start if before else last) and costs[start] <= head_tokens:
            head_tokens -= costs[start]
            left_tokens -= costs[start]
            start += 1
        while stop > max(start, before.stop) and costs[stop - 1] <= left_tokens:
            left_tokens -= costs[stop - 1]
            stop -= 1
        return range(start, stop)

    def _marked(self, episode: _Episode, omitted: range) -> _Episode:
        """The episode without the units in `omitted`, which the note replaces."""
        if not omitted:
            return replace(episode, omitted=range(0), marker="", marked=())
        marker = _MARKER.format(len(omitted))
        if omitted.start == 0:
            marked = self._renderer.first_prompt(self._with_note(episode.opening, marker))
        else:
            before = episode.units[omitted.start - 1]
            noted = replace(before, told=self._with_note(before.told, marker))
            marked = self._rendered(noted).fed
        return replace(episode, omitted=omitted, marker=marker, marked=tuple(marked))

    def _with_note(self, messages: tuple[ChatMessage, ...], note: str) -> tuple[ChatMessage, ...]:
        if self._context.marker == "message":
            return (*messages, ChatMessage("user", note))
        *before, last = messages
        return (*before, with_fields(last, content=f"{last.content}\n\n{note}"))

    def _shortened(self, episode: _Episode) -> _Episode | None:
        """The episode with as much of the newest messages as fits; None if not even the reply before them fits."""
        *before, last = episode.units
        fitting: _Episode | None = None
        low, high = 0, max(len(message.content) for message in last.told)
        while low <= high:
            limit = (low + high) // 2
            tried = replace(episode, units=(*before, self._shorter(last, limit)))
            if self._fits(tried):
                fitting, low = tried, limit + 1
            else:
                high = limit - 1
        return fitting

    def _shorter(self, unit: _Unit, limit_chars: int) -> _Unit:
        """The unit with at most `limit_chars` characters of each message, besides the note with the number of missing characters."""
        told = tuple(_without_middle(message, limit_chars) for message in unit.told)
        dropped_chars = sum(
            len(whole.content) - limit_chars
            for whole, shown in zip(unit.told, told, strict=True)
            if shown is not whole
        )
        return self._rendered(replace(unit, told=told, dropped_chars=dropped_chars))

    def _rendered(self, unit: _Unit) -> _Unit:
        last_id = unit.reply[-1] if unit.reply else None
        return replace(unit, fed=tuple(self._renderer.suffix(unit.told, last_id=last_id)))

    def _without_thoughts(self, episode: _Episode) -> _Episode:
        """The episode without the thoughts of its replies, which are found by decoding; the kept parts are not tokenised again."""
        units = tuple(
            self._without_thought(unit) if unit.thought_tokens is None else unit for unit in episode.units
        )
        return replace(episode, units=units)

    def _without_thought(self, unit: _Unit) -> _Unit:
        num_tokens = self._thoughts.num_tokens(unit.reply)
        return replace(
            unit,
            reply=unit.reply[num_tokens:],
            thought_tokens=num_tokens,
            opening=self._thoughts.opening if num_tokens else (),
        )


def _without_middle(message: ChatMessage, limit_chars: int) -> ChatMessage:
    """`message` with this many of its characters, or unchanged if the note would make it no shorter."""
    content = message.content
    head, tail = content[: limit_chars - limit_chars // 2], content[len(content) - limit_chars // 2 :]
    shortened = head + _SHORTENED.format(len(content) - limit_chars) + tail
    return with_fields(message, content=shortened) if len(shortened) < len(content) else message


class Conversation:
    """The policy's side of one episode: implements `workers.agent.loop.Policy`."""

    def __init__(self, renderer: Renderer, speaker: Speaker, request: RolloutRequest) -> None:
        self._renderer = renderer
        self._speaker = speaker
        self._window = _Window(
            renderer,
            request.context,
            context_tokens=speaker.context_tokens,
            max_new_tokens=speaker.max_new_tokens,
        )
        self._episode = _Episode((), ())  # the conversation as the policy saw it for its last reply
        self._reply: tuple[int, ...] = ()
        self._held: list[int] = []  # the exact ids that the engine holds after the last turn
        self._num_turns = 0

    async def begin(self, opening: Sequence[ChatMessage]) -> Turn | None:
        """The first reply, after `opening`; None if the context has no room for one."""
        return await self._speak(self._window.opened(opening), len(opening))

    async def answer(self, messages: Sequence[ChatMessage], forget_reply: bool = False) -> Turn | None:
        """The reply after more messages; None if the context has no room for one, and then the conversation is unchanged.

        `forget_reply`: the last reply is removed from the context before the messages are added.
        """
        if forget_reply:
            longer = self._window.told_again(self._episode, messages)
        else:
            longer = self._window.told(self._episode, self._reply, messages)
        return await self._speak(longer, len(messages), forgot_reply=forget_reply)

    async def _speak(self, longer: _Episode, num_told: int, *, forgot_reply: bool = False) -> Turn | None:
        """The reply to `longer`, as far as it fits into the context. Its last `num_told` messages are new."""
        with span("render prompt"):
            episode = self._window.fit(longer)
            if episode is None:
                return None
            prompt = episode.ids()
            kept_tokens = _num_common(self._held, prompt)
        turn = await self._speaker.reply(
            self._renderer, prompt, kept_tokens=kept_tokens, number=self._num_turns
        )
        num_new = episode.num_newest
        if episode.omitted != self._episode.omitted:
            num_new += episode.num_marker
        cut = self._cut_before(episode, kept_tokens, forgot_reply=forgot_reply)
        sampled = unpack_int32s(turn.sampled)
        self._episode, self._reply = episode, tuple(sampled)
        self._held = [*prompt, *sampled]
        self._num_turns += 1
        return with_fields(
            turn,
            told=episode.newest[-num_told:],
            cut=cut,
            repeated_tokens=max(0, len(prompt) - kept_tokens - num_new),
        )

    def _cut_before(self, episode: _Episode, kept_tokens: int, *, forgot_reply: bool) -> Cut | None:
        """The parts that the policy saw, or would have seen, before and that `episode` lacks; None if there are none."""
        dropped_chars = episode.units[-1].dropped_chars if episode.units else 0
        if kept_tokens == len(self._held) and not dropped_chars:
            return None
        return Cut(
            num_omitted=len(episode.omitted),
            marker=episode.marker,
            num_thoughts=episode.num_thoughts - self._episode.num_thoughts,
            dropped_chars=dropped_chars,
            forgot_reply=forgot_reply,
        )


def _num_common(held: list[int], prompt: list[int]) -> int:
    """The number of leading ids that both have in common."""
    if prompt[: len(held)] == held:
        return len(held)
    pairs = enumerate(zip(held, prompt, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(held), len(prompt)))
