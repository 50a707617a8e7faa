"""What sampled tokens are part of: found from the reply's parts, by decoding."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from pipeline.chat import ChatMessage, ToolCall
from pipeline.message import pack_float32s, pack_int32s
from pipeline.trajectory import Action, Turn, VersionSpan
from tests.trainer.trajectories import trajectory
from trainer.batching.batch import Sample
from trainer.batching.samples import KINDS, parts_of, samples_of, token_kinds

STOP = 0
CALL = ToolCall(name="bash", arguments='{"command": "ls"}')


def decode(ids: Sequence[int]) -> str:
    """Ids are code points, and those above 1000 two characters at once."""
    return "".join(chr(one // 1000) + chr(one % 1000) if one >= 1000 else chr(one) for one in ids)


def reply(text: str, *, ids: Sequence[int] = (), stop: str = "stop", **fields: object) -> Turn:
    sampled = [*(ids or map(ord, text)), *([STOP] if stop == "stop" else [])]
    turn = Turn(
        kept_tokens=0,
        fed=pack_int32s([1, 2]),
        sampled=pack_int32s(sampled),
        logprobs=pack_float32s([-0.5] * len(sampled)),
        versions=(VersionSpan(0, 0, len(sampled)),),
        stop="stop",
        text=text,
    )
    return replace(turn, stop=stop, **fields)


def sample_of(turn: Turn) -> Sample:
    (made,) = samples_of(trajectory(turn), vocab_size=10**6, max_tokens=1000)
    return made


def spelled(turn: Turn) -> str:
    """The kinds of the sampled tokens by their first letters."""
    sample = sample_of(turn)
    kinds = [KINDS[kind] for kind in token_kinds(sample, decode)]
    assert kinds[:2] == ["fed", "fed"]
    return "".join(kind[0] for kind in kinds[2:])


def test_a_command_in_text_is_a_call_and_the_stop_token_the_end() -> None:
    turn = reply("look\n```\nls -l\n```", actions=(Action(command="ls -l"),))
    assert spelled(turn) == "t" * 9 + "c" * 5 + "t" * 4 + "e"


@pytest.mark.parametrize("opened", ["<think>\n", ""])
def test_thoughts_count_with_their_marks(opened: str) -> None:
    said = ChatMessage("assistant", "done", reasoning="hm")
    turn = reply(f"{opened}hm\n</think>\n\ndone", reply=said)
    text = "\n\ndone"
    assert [(part.kind, part.end) for part in parts_of(turn)] == [
        ("thought", len(turn.text) - len(text)),
        ("text", len(turn.text)),
    ]


def test_tool_calls_are_what_is_neither_thought_nor_content() -> None:
    call = '<tool_call>\n{"name": "bash"}\n</tool_call>'
    said = ChatMessage("assistant", "first\nlast", reasoning="hm", tool_calls=(CALL, CALL))
    turn = reply(f"<think>hm</think>first\n{call}\nlast\n{call}", reply=said)
    kinds = [(part.kind, turn.text[before : part.end]) for before, part in parts_with_begin(turn)]
    assert kinds == [
        ("thought", "<think>hm</think>"),
        ("text", "first"),
        ("call", f"\n{call}\n"),
        ("text", "last"),
        ("call", f"\n{call}"),
    ]


def parts_with_begin(turn: Turn) -> list[tuple[int, object]]:
    parts = parts_of(turn)
    return list(zip([0, *(part.end for part in parts)], parts, strict=False))


def test_a_reply_that_is_nothing_but_a_call_has_no_other_part() -> None:
    turn = reply("<tool_call>{}</tool_call>", reply=ChatMessage("assistant", "", tool_calls=(CALL,)))
    assert [part.kind for part in parts_of(turn)] == ["call"]


def test_a_token_across_two_parts_counts_with_the_first() -> None:
    ids = [ord("a"), ord("b") * 1000 + ord("l"), ord("s")]
    assert spelled(reply("abls", ids=ids, actions=(Action(command="ls"),))) == "ttce"


def test_a_reply_that_was_cut_off_has_no_end() -> None:
    assert spelled(reply("abc", stop="length")) == "ttt"


def test_a_thought_that_never_ended_is_all_thought() -> None:
    said = ChatMessage("assistant", "", reasoning="on and on")
    assert spelled(reply("<think>on and on", stop="length", reply=said)) == "t" * 16
    (part,) = parts_of(reply("<think>on and on", stop="length", reply=said))
    assert part.kind == "thought"
