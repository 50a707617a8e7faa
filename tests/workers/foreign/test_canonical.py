"""Pieces compared: what programs change without changing what was said, and what they may not change."""

import pytest

from pipeline.chat import ChatMessage, ToolCall
from workers.foreign.conversations import (
    ChatPiece,
    arranged,
    assistant_pieces,
    copy_at,
    messages_of,
    same_arguments,
    same_piece,
    told_end,
)


def made(identity: str, arguments: str = "{}", name: str = "bash") -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=identity)


def result(identity: str, text: str = "") -> ChatPiece:
    return ChatPiece("tool", text, call_id=identity)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1.0, "b": "\\u00e9"}', '{"a":1,"b":"é"}', True),
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', True),
        ('{"a": true}', '{"a": 1}', False),
        ('{"a": [1, {"b": null}]}', '{"a":[1,{"b":null}]}', True),
        ('{"a": [1]}', '{"a": [1, 1]}', False),
        ('{"a": [true]}', '{"a": [1]}', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ('{"a": ', '{"a": ', True),
        ('{"a": ', '{"a":', False),
        ("[" * 9999, "[" * 9999 + "]", False),
        ('{"a": Infinity}', '{"a":Infinity}', False),
    ],
)
def test_arguments_are_equal_as_json_values(one: str, other: str, same: bool) -> None:
    assert same_arguments(one, other) is same


def test_thoughts_take_no_part_in_what_was_told_either() -> None:
    told = ChatPiece("assistant", "Got it.", thought="hm")
    assert same_piece(told, ChatPiece("assistant", "Got it."))
    assert not same_piece(told, ChatPiece("user", "Got it."))
    assert not same_piece(told, ChatPiece("assistant", "Got it. "))


def test_calls_that_nobody_sampled_are_compared_whole() -> None:
    told = ChatPiece("assistant", call=made("x", '{"a": 1}'))
    assert same_piece(told, ChatPiece("assistant", call=made("x", '{"a":1}')))
    assert not same_piece(told, ChatPiece("assistant", call=made("y", '{"a": 1}')))
    assert not same_piece(told, ChatPiece("assistant", call=made("x", '{"a": 1}', "other")))
    assert not same_piece(told, ChatPiece("assistant"))
    assert not same_piece(result("x", "a.py"), result("y", "a.py"))
    assert told_end([told], [], 0) is None


SAID = ChatMessage("assistant", "I look.", reasoning="why", tool_calls=(made("1", '{"a": 1}'), made("2")))


@pytest.mark.parametrize(
    ("pieces", "copy"),
    [
        (assistant_pieces("I look.", "why", SAID.tool_calls), "same"),
        (assistant_pieces("I look.", "", SAID.tool_calls), "thoughts"),
        (assistant_pieces("I look.", "why", (made("1", '{"a":1}'), made("2"))), "printed"),
        (assistant_pieces("I look.", "", (made("1", '{"a":1}'), made("2"))), "thoughts"),
        (assistant_pieces("", "why", SAID.tool_calls), "healed"),
        (assistant_pieces("I look.", "why", (made("1", "{}"), made("2"))), "healed"),
        (assistant_pieces("I look.", "why", (made("2"),)), "healed"),
        (assistant_pieces("I look.", "why", (made("1", '{"a": 1}', "invalid"), made("2"))), "healed"),
    ],
)
def test_a_call_with_an_id_of_ours_is_the_recorded_reply(pieces: list[ChatPiece], copy: str) -> None:
    assert copy_at(SAID, [ChatPiece("user", "u"), *pieces, result("1")], 1) == (1 + len(pieces), copy)


@pytest.mark.parametrize(
    "behind", [ChatPiece("assistant", "invented"), ChatPiece("assistant", call=made("3"))]
)
def test_what_a_program_invents_behind_a_copy_is_no_part_of_it(behind: ChatPiece) -> None:
    pieces = assistant_pieces("I look.", "why", SAID.tool_calls)
    assert copy_at(SAID, [*pieces, behind], 0) == (len(pieces), "same")


@pytest.mark.parametrize(
    "pieces",
    [
        assistant_pieces("I look.", "why", ()),
        assistant_pieces("I look.", "why", (made("3"),)),
        [ChatPiece("user", "I look."), *assistant_pieces("", "", SAID.tool_calls)],
        [],
    ],
)
def test_words_alone_are_no_copy_of_a_reply_with_calls(pieces: list[ChatPiece]) -> None:
    assert copy_at(SAID, pieces, 0) is None


def test_a_reply_of_words_is_known_by_all_of_its_words() -> None:
    said = ChatMessage("assistant", "done", reasoning="why")
    assert copy_at(said, assistant_pieces("done", "why", ()), 0) == (1, "same")
    assert copy_at(said, assistant_pieces("done", "", ()), 0) == (1, "thoughts")
    assert copy_at(said, assistant_pieces("done ", "why", ()), 0) is None
    assert copy_at(said, assistant_pieces("done", "why", (made("x"),), message=3), 0) is None
    assert copy_at(said, [ChatPiece("user", "done")], 0) is None


def test_an_empty_reply_is_known_only_by_an_empty_message() -> None:
    said = ChatMessage("assistant", "")
    assert copy_at(said, assistant_pieces("", "", ()), 0) == (1, "same")
    assert copy_at(said, [ChatPiece("user", "u")], 0) is None
    assert copy_at(said, assistant_pieces("", "", (made("1"),)), 0) is None


def test_calls_that_came_back_one_by_one_are_together_again() -> None:
    first, second = made("1"), made("2")
    split = [
        *assistant_pieces("I look.", "", (first,), message=1),
        result("1", "a"),
        *assistant_pieces("I look.", "", (second,), message=3),
        result("2", "b"),
        ChatPiece("user", "u"),
    ]
    together = [
        *assistant_pieces("I look.", "", (first,), message=1),
        *assistant_pieces("", "", (second,), message=3),
    ]
    assert arranged(split, {"1": 0, "2": 0}) == [
        *together,
        result("1", "a"),
        result("2", "b"),
        ChatPiece("user", "u"),
    ]
    assert arranged(split, {"1": 0, "2": 1}) == split
    assert arranged(split, {}) == split


def test_calls_are_put_together_in_their_order_and_nothing_between_them_is_lost() -> None:
    parted = assistant_pieces("", "", [made(one) for one in "123"], message=4)
    assert arranged(parted, {"1": 0, "2": 0, "3": 0}) == parted
    calls = [ChatPiece("assistant", call=made(one)) for one in "123"]
    results = [result(one, one) for one in "123"]
    one_by_one = [piece for pair in zip(calls, results, strict=True) for piece in pair]
    assert arranged(one_by_one, {"1": 0, "2": 0, "3": 0}) == [*calls, *results]
    invented = ChatPiece("assistant", call=made("x"))
    assert arranged([calls[0], invented, calls[1]], {"1": 0, "2": 0}) == [*calls[:2], invented]


def test_a_call_behind_a_message_of_the_user_is_a_quotation() -> None:
    quoted = [
        ChatPiece("assistant", call=made("1"), message=0),
        ChatPiece("user", "u"),
        ChatPiece("assistant", call=made("2"), message=2),
    ]
    assert arranged(quoted, {"1": 0, "2": 0}) == quoted


def test_results_are_in_the_order_of_their_calls_and_others_behind_them() -> None:
    calls = [ChatPiece("assistant", call=made(one)) for one in "12"]
    results = [result("x"), result("2"), result("1")]
    in_order = [result("1"), result("2"), result("x")]
    assert arranged([*calls, *results], {}) == [*calls, *in_order]
    told = ChatPiece("user", "u")
    assert arranged([*calls, told, *results, told], {}) == [*calls, told, *in_order, told]
    assert arranged([*calls, *results, *calls[::-1], *results], {}) == [
        *calls,
        *in_order,
        *calls[::-1],
        result("2"),
        result("1"),
        result("x"),
    ]
    assert arranged([ChatPiece("user"), *results], {}) == [ChatPiece("user"), *results]
    words = ChatPiece("assistant", "I called.")
    assert arranged([*calls, words, *results], {}) == [*calls, words, *in_order]


def test_pieces_of_one_message_are_one_and_items_are_joined_as_a_reply_has_them() -> None:
    calls = (made("1"), made("2"))
    parted = assistant_pieces("I look.", "why", calls, message=4)
    whole = ChatMessage("assistant", "I look.", reasoning="why", tool_calls=calls)
    assert messages_of(parted) == (whole,)
    assert messages_of(assistant_pieces("I look.", "why", calls)) == (whole,)
    assert messages_of([ChatPiece("assistant", "a"), ChatPiece("assistant", "b")]) == (
        ChatMessage("assistant", "a"),
        ChatMessage("assistant", "b"),
    )
    assert len(messages_of([*assistant_pieces("a", "", (), message=0), *parted])) == 2
    assert len(messages_of([ChatPiece("user", "u", message=4), *parted])) == 2
    assert len(messages_of([ChatPiece("user", "u"), *assistant_pieces("", "", calls)])) == 2
    called = ChatPiece("assistant", call=calls[0], message=5)
    assert len(messages_of([*assistant_pieces("a", "", (), message=4), called])) == 2
    thoughtful = ChatPiece("assistant", thought="new", call=calls[0])
    assert len(messages_of([ChatPiece("assistant", "a"), thoughtful])) == 2
