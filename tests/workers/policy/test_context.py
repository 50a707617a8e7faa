"""A context that is full: what is cut, what stays, and what is trained of it, under the chat templates of ten model families."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.message import unpack_int32s
from pipeline.request import Context
from pipeline.trajectory import Turn, VersionSpan
from tests.workers.agent.episode import claim, opening, user
from tests.workers.policy.templates import ENDS, renderer
from trainer.batching.samples import branches
from workers.policy.conversation import Conversation, Sampled
from workers.policy.render import Renderer

MARKER = re.compile(
    r"\[\.\.\. (\d+) turn\(s\) of interaction history omitted due to context window limit \.\.\.\]"
)
QWEN = "Qwen-Qwen2.5-7B-Instruct"


@dataclass(slots=True)
class Player:
    """Samples the given replies, and notes each prompt. A reply that is longer than allowed is cut off."""

    replies: Sequence[Sequence[int]]
    prompts: list[list[int]] = field(default_factory=list[list[int]])

    async def sample(self, prompt: Sequence[int], *, max_new_tokens: int, turn: int) -> Sampled:
        ids = list(self.replies[turn])[:max_new_tokens]
        self.prompts.append(list(prompt))
        stop = "stop" if len(ids) == len(self.replies[turn]) else "length"
        return Sampled(ids, [-0.5] * len(ids), (VersionSpan(1, 0, len(ids)),), stop)


@dataclass(slots=True)
class Played:
    """What came of an episode: its turns, the prompts, whether it ended for want of room."""

    turns: list[Turn]
    prompts: list[list[int]]
    ended: bool


def play(
    template: Renderer,
    replies: Sequence[str],
    observations: Sequence[str],
    *,
    context_tokens: int,
    max_new_tokens: int = 40,
    forget: Sequence[bool] = (),
    **context: Any,
) -> Played:
    """An episode in which each reply ends its turn, and observation k follows reply k."""
    request = claim(context_tokens=context_tokens, sampling={"max_new_tokens": max_new_tokens}).request
    request = replace(request, context=Context(**({"policy": "head_tail"} | context)))
    player = Player([[*template.encode_text(reply), template.end_id] for reply in replies])
    conversation = Conversation(template, player, request)

    async def turns() -> list[Turn | None]:
        said = [await conversation.begin(opening("be brief", "mend it"))]
        for number, text in enumerate(observations[: len(replies) - 1]):
            if said[-1] is None:
                break
            forgets = number < len(forget) and forget[number]
            said.append(await conversation.answer(user(text), forget_reply=forgets))
        return said

    said = asyncio.run(turns())
    return Played([turn for turn in said if turn is not None], player.prompts, said[-1] is None)


def held_by(turns: Sequence[Turn]) -> list[list[int]]:
    """The prompts as the turns alone tell them."""
    prompts: list[list[int]] = []
    held: list[int] = []
    for turn in turns:
        held = [*held[: turn.kept_tokens], *unpack_int32s(turn.fed)]
        prompts.append(held)
        held = [*held, *unpack_int32s(turn.sampled)]
    return prompts


def contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    return any(list(ids[place : place + len(part)]) == list(part) for place in range(len(ids)))


def check_branches(played: Played, context_tokens: int, *, every_step: bool) -> None:
    """Each sampled token is trained in exactly one branch, after exactly what the engine held before it."""
    made = list(branches(tuple(played.turns), every_step=every_step))
    sampled = [list(unpack_int32s(turn.sampled)) for turn in played.turns]
    contexts = [
        (prompt + ids[:place], token)
        for prompt, ids in zip(played.prompts, sampled, strict=True)
        for place, token in enumerate(ids)
    ]
    trained = [
        (branch.tokens[:place], branch.tokens[place])
        for branch in made
        for place, is_trained in enumerate(branch.trained)
        if is_trained
    ]
    assert trained == contexts
    assert max(len(branch.tokens) for branch in made) <= context_tokens
    if every_step:
        assert len(made) == len(played.turns)


@st.composite
def episodes(draw: st.DrawFn) -> dict[str, Any]:
    """Replies that no other contains, some with thoughts; observations of all lengths."""
    num_turns = draw(st.integers(2, 9))
    words = st.lists(st.sampled_from(["dam", "seat ", "mice\n", "é", "<|im_end|>", "x"]), max_size=18)
    replies = []
    for number in range(num_turns):
        thought = f"<think>{number}\nwell\n</think>\n\n" if draw(st.booleans()) else ""
        replies.append(f"{thought}({number}){''.join(draw(words))}")
    observations = [
        f"<{number}>" + "".join(draw(words)) * draw(st.sampled_from([1, 1, 2, 8, 60])) + "<>"
        for number in range(num_turns)
    ]
    return {
        "replies": replies,
        "observations": observations,
        "context_tokens": draw(st.integers(240, 700)),
        "max_new_tokens": draw(st.integers(9, 60)),
        "head_share": draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        "refill_to": draw(st.sampled_from([0.3, 0.7, 1.0])),
        "marker": draw(st.sampled_from(["append", "message"])),
        "thinking": draw(st.sampled_from(["keep", "keep", "strip_on_cut", "strip"])),
        "every_step": draw(st.booleans()),
    }


@pytest.mark.parametrize("name", ENDS)
@settings(max_examples=60)
@given(episode=episodes())
def test_whatever_is_cut_every_prompt_fits_and_every_token_is_trained_once_in_what_was_seen(
    name: str, episode: dict[str, Any]
) -> None:
    template = renderer(name)
    played = play(template, **episode)
    budget = episode["context_tokens"] - episode["max_new_tokens"]
    assert all(len(prompt) <= budget for prompt in played.prompts)
    assert held_by(played.turns) == played.prompts
    if played.turns:
        check_branches(played, episode["context_tokens"], every_step=episode["every_step"])
    for number, (turn, prompt) in enumerate(zip(played.turns, played.prompts, strict=True)):
        text = template.decode(prompt)
        replies = [list(unpack_int32s(one.sampled)) for one in played.turns[:number]]
        if episode["thinking"] == "keep":
            shown = "".join("01"[contains(prompt, reply)] for reply in replies)
            omitted = shown.count("0")
            assert re.fullmatch("(1*0*1+)?", shown), "only the middle is omitted, never the last reply"
            assert [int(found) for found in MARKER.findall(text)] == [omitted] * bool(omitted)
        assert turn.told[-1].content.strip() in text, "the newest message stands as `told` says"
        assert 0 <= turn.repeated_tokens <= len(turn.fed) // 4


@pytest.mark.parametrize("name", ENDS)
def test_an_episode_that_fits_is_never_cut(name: str) -> None:
    played = play(renderer(name), [f"reply {n}" for n in range(6)], ["seen"] * 6, context_tokens=4000)
    assert [turn.cut for turn in played.turns] == [None] * 6
    assert len(list(branches(tuple(played.turns)))) == 1
    assert not any(turn.repeated_tokens for turn in played.turns)
