"""One episode's token sequence, which consists only of fed and sampled tokens.

A `Speaker` (speaker.py) gets replies to the prompts, and a `Window` (context.py) decides which part of the episode is in the context. The
engine's sequence and the next prompt share their first tokens (`kept_tokens`); everything after them is fed, including kept replies after a
cut.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from pipeline.chat import ChatMessage
from pipeline.message import unpack_int32s
from pipeline.request import RolloutRequest
from pipeline.telemetry import span
from pipeline.trajectory import Cut, Turn
from workers.policy.context import Episode, Window
from workers.policy.render import Renderer
from workers.policy.speaker import Speaker


class Conversation:
    """The policy's side of one episode: implements `workers.agent.loop.Policy`."""

    def __init__(self, renderer: Renderer, speaker: Speaker, request: RolloutRequest) -> None:
        self._renderer = renderer
        self._speaker = speaker
        self._window = Window(
            renderer,
            request.context,
            context_tokens=speaker.context_tokens,
            max_new_tokens=speaker.max_new_tokens,
        )
        self._episode = Episode((), ())  # the conversation as the policy saw it for its last reply
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

    async def _speak(self, longer: Episode, num_told: int, *, forgot_reply: bool = False) -> Turn | None:
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
        return replace(
            turn,
            told=episode.newest[-num_told:],
            cut=cut,
            repeated_tokens=max(0, len(prompt) - kept_tokens - num_new),
        )

    def _cut_before(self, episode: Episode, kept_tokens: int, *, forgot_reply: bool) -> Cut | None:
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
