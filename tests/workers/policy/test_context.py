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

from pipeline.agent.upstream import BASH_TOOL
from pipeline.chat import THOUGHT_MARKS, ChatMessage
from pipeline.message import pack_float32s, pack_int32s, unpack_int32s
from pipeline.request import Context
from pipeline.trajectory import Cut, Turn, VersionSpan, reply_digest
from tests.workers.agent.episode import claim, opening, user
from tests.workers.policy.templates import ENDS, bundle, renderer
from trainer.batching.samples import branches
from workers.policy.conversation import Conversation
from workers.policy.render import Renderer
from workers.policy.speaker import Sampled, Speaker

MARKER = re.compile(
    r"\[\.\.\. (\d+) turn\(s\) of interaction history omitted due to context window limit \.\.\.\]"
)
QWEN = "Qwen-Qwen2.5-7B-Instruct"
CALLED = ("hermes", "qwen3_coder", "llama3", "kimi_k2", "seed")  # forms of tool calls


@dataclass(slots=True)
class Player:
    """Samples the given replies, and notes each prompt. A reply that is longer than allowed is cut off."""

    replies: Sequence[Sequence[int]]
    prompts: list[list[int]] = field(default_factory=list[list[int]])

    async def sample(
        self, prompt: Sequence[int], *, kept_tokens: int, max_new_tokens: int, turn: int
    ) -> Sampled:
        ids = list(self.replies[turn])[:max_new_tokens]
        self.prompts.append(list(prompt))
        stop = "stop" if len(ids) == len(self.replies[turn]) else "length"
        logprobs = [-0.5] * len(ids)
        digest = reply_digest(pack_int32s(prompt), pack_int32s(ids), pack_float32s(logprobs))
        return Sampled(ids, logprobs, (VersionSpan(1, 0, len(ids)),), stop, digest)


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
    speaker = Speaker(player, max_new_tokens=max_new_tokens, context_tokens=context_tokens)
    conversation = Conversation(template, speaker, request)

    async def turns() -> list[Turn | None]:
        said = [await conversation.begin(opening("be brief", "mend it"))]
        for number, text in enumerate(observations[: len(replies) - 1]):
            if said[-1] is None:
                break
            forgets = number < len(forget) and forget[number]
            told = results(text) if template.has_tools else user(text)
            said.append(await conversation.answer(told, forget_reply=forgets))
        return said

    said = asyncio.run(turns())
    return Played([turn for turn in said if turn is not None], player.prompts, said[-1] is None)


def results(text: str) -> list[ChatMessage]:
    """Of two tool calls."""
    return [ChatMessage("tool", f"{text}{call}", tool_call_id=call) for call in ("a", "b")]


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


@pytest.mark.slow_but_for("Qwen-Qwen3-0.6B")
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


def shown(template: Renderer, turn: Turn, played: Played) -> str:
    return template.decode(played.prompts[played.turns.index(turn)])


@pytest.mark.parametrize("name", ENDS)
def test_a_cut_keeps_the_first_and_newest_turns_with_their_own_ids_and_says_what_is_missing(
    name: str,
) -> None:
    template = renderer(name)
    replies = [f"reply {number} " + "dam " * 10 for number in range(9)]
    played = play(
        template, replies, [f"seen {n} " + "mice " * 10 for n in range(9)], context_tokens=500, head_share=0.4
    )
    cuts = [number for number, turn in enumerate(played.turns) if turn.cut]
    assert cuts, "the episode must not fit"
    first = played.turns[cuts[0]]
    assert first.cut is not None
    text = template.decode(played.prompts[cuts[0]])
    there = [number for number in range(cuts[0]) if f"reply {number} " in text]
    assert there[0] == 0
    assert there[-1] == cuts[0] - 1
    assert len(there) == cuts[0] - first.cut.num_omitted
    assert first.cut.marker == MARKER.search(text)[0]
    gap = next(number for number in range(cuts[0]) if number not in there)
    assert text.index(f"seen {gap - 1} ") < text.index(first.cut.marker) < text.index(f"reply {there[gap]} ")
    for number in there:
        assert contains(played.prompts[cuts[0]], list(unpack_int32s(played.turns[number].sampled)))
    assert cuts[1:2] != [cuts[0] + 1], "a cut leaves room for more than one turn"


@pytest.mark.parametrize("name", [name for name in ENDS if bundle(name).reply_format.tool_calls in CALLED])
@pytest.mark.parametrize("thinking", ["keep", "strip"])
def test_results_of_tool_calls_are_cut_with_the_reply_that_asked_for_them(name: str, thinking: str) -> None:
    template = Renderer(bundle(name), (BASH_TOOL,))
    opening_tokens = len(template.first_prompt(opening("be brief", "mend it")))
    context_tokens = opening_tokens + 400
    replies = [f"<think>hm</think>reply {number} dam" for number in range(9)]
    seen = [f"seen {number} " + "mice " * 5 for number in range(9)]
    played = play(template, replies, seen, context_tokens=context_tokens, thinking=thinking)
    assert all(len(prompt) <= context_tokens - 40 for prompt in played.prompts)
    assert held_by(played.turns) == played.prompts
    check_branches(played, context_tokens, every_step=False)
    cut_at = max(number for number, turn in enumerate(played.turns) if turn.cut)
    cut = played.turns[cut_at].cut
    assert cut is not None
    text = template.decode(played.prompts[cut_at])
    there = [number for number in range(cut_at) if f"reply {number} " in text]
    assert 0 < len(there) == cut_at - cut.num_omitted < cut_at
    for number in range(cut_at):
        assert text.count(f"seen {number} ") == 2 * (number in there)
    assert text.count(cut.marker) == 1


def test_with_no_room_for_the_first_turns_the_task_bears_the_note() -> None:
    template = renderer(QWEN)
    played = play(template, ["go"] * 6, ["mice " * 60] * 6, context_tokens=360, head_share=0.0)
    last = played.turns[-1]
    assert last.cut is not None
    assert f"mend it\n\n{last.cut.marker}<|im_end|>" in shown(template, last, played)


def test_the_note_may_be_a_message_of_its_own() -> None:
    template = renderer(QWEN)
    played = play(template, ["go"] * 6, ["mice " * 60] * 6, context_tokens=360, marker="message")
    last = played.turns[-1]
    assert last.cut is not None
    assert f"<|im_start|>user\n{last.cut.marker}<|im_end|>" in shown(template, last, played)


def test_a_message_that_does_not_fit_alone_loses_its_middle() -> None:
    template = renderer(QWEN)
    long = "begin " + "mice " * 900 + " end"
    played = play(template, ["go", "on"], [long], context_tokens=400)
    told = played.turns[1].told[0].content
    assert told.startswith("begin ")
    assert told.endswith(" end")
    missing = re.search(
        r"\n\[\.\.\. (\d+) character\(s\) omitted due to context window limit \.\.\.\]\n", told
    )
    assert missing is not None
    assert len(told) - len(missing[0]) + int(missing[1]) == len(long)
    assert played.turns[1].cut == Cut(dropped_chars=int(missing[1]))
    assert 400 - 40 - len(played.prompts[1]) < 10, "as much of it is shown as fits"


def test_an_opening_or_a_reply_that_leaves_no_room_ends_the_episode() -> None:
    template = renderer(QWEN)
    assert play(template, ["go"], [], context_tokens=60) == Played([], [], ended=True)
    played = play(template, ["dam " * 90, "on"], ["seen"], context_tokens=300, max_new_tokens=200)
    assert (len(played.turns), played.ended) == (1, True)


def test_with_the_policy_stop_nothing_is_cut_and_the_last_reply_gets_what_room_is_left() -> None:
    template = renderer(QWEN)
    played = play(
        template, ["dam " * 75] * 9, ["mice"] * 9, context_tokens=400, max_new_tokens=300, policy="stop"
    )
    assert played.ended
    assert not any(turn.cut for turn in played.turns)
    assert played.turns[-1].stop == "context"
    assert len(played.prompts[-1]) + len(played.turns[-1].sampled) // 4 == 400
    assert len(list(branches(tuple(played.turns)))) == 1


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("thinking", ["keep", "strip_on_cut", "strip"])
def test_earlier_thoughts_stay_or_go_as_the_request_says(name: str, thinking: str) -> None:
    template = renderer(name)
    begin, end = THOUGHT_MARKS[template.reply_format.thoughts]
    opened = template.opens_thought(template.suffix([], last_id=template.end_id))
    said = f"I wonder\n{end}\n\n" if opened else f"{begin}\nI wonder\n{end}\n\n"
    replies = [f"{said}dam {number} " + "seat " * 8 for number in range(8)]
    played = play(
        template, replies, ["mice " * 8] * 8, context_tokens=420, max_new_tokens=60, thinking=thinking
    )
    check_branches(played, 420, every_step=False)
    for number, turn in enumerate(played.turns):
        text = template.decode(played.prompts[number])
        thoughts, words = text.count("I wonder"), len(re.findall(r"dam \d", text))
        if thinking == "keep":
            assert thoughts == words
        if thinking == "strip" or (thinking == "strip_on_cut" and turn.cut):
            assert thoughts == 0
            assert text.count(begin) == opened, "only the thought of the reply to come is open"
            assert end not in text
        if turn.cut and number and thinking != "keep":
            assert turn.cut.num_thoughts > 0
    assert any(turn.cut for turn in played.turns)


def test_a_forgotten_reply_leaves_the_context_with_what_follows_put_in_its_place() -> None:
    template = renderer(QWEN)
    forget = [False, True, True]
    played = play(
        template, ["one", "two", "three", "four"], ["a", "b", "c"], context_tokens=900, forget=forget
    )
    end, user_turn = "<|im_end|>\n", "<|im_start|>user\n"
    assert template.decode(played.prompts[3]).endswith(
        f"one{end}{user_turn}a{end}{user_turn}b{end}{user_turn}c{end}<|im_start|>assistant\n"
    )
    assert [turn.cut and turn.cut.forgot_reply for turn in played.turns] == [None, None, True, True]
    assert [turn.told[0].content for turn in played.turns[1:]] == ["a", "b", "c"]
    check_branches(played, 900, every_step=False)
    first = play(template, ["one", "two"], ["a"], context_tokens=900, forget=[True])
    assert template.decode(first.prompts[1]).endswith(
        f"{user_turn}mend it{end}{user_turn}a{end}<|im_start|>assistant\n"
    )


def test_tokens_that_are_computed_again_are_counted() -> None:
    template = renderer(QWEN)
    replies = [f"reply {number} " + "dam " * 10 for number in range(9)]
    played = play(template, replies, ["mice " * 10] * 9, context_tokens=400)
    for before, turn, prompt in zip(played.turns, played.turns[1:], played.prompts[1:], strict=False):
        if turn.cut is None:
            assert turn.repeated_tokens == 0
            continue
        assert turn.cut.num_omitted > (before.cut.num_omitted if before.cut else 0)
        told = template.suffix(user("mice " * 10), last_id=template.end_id)
        behind_marker = prompt[turn.kept_tokens :]
        assert 0 < turn.repeated_tokens <= len(behind_marker) - len(told)
