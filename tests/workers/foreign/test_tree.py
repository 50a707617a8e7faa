"""Replies found again where several would do, what is an aside, and what becomes of calls."""

import asyncio

import pytest

from pipeline.chat import ChatMessage, ToolCall
from pipeline.trajectory import Turn
from tests.workers.foreign.program import BASH, LS, Json, Program, playing, result, until, user
from workers.foreign.conversations import ChatPiece, Node, Tree, note_results


def recorded(number: int, said: ChatMessage, parent: Node | None = None) -> Node:
    turn = Turn(
        kept_tokens=0, fed=b"", sampled=b"", logprobs=b"", versions=(), stop="stop", text=said.content
    )
    return Node(number, parent, b"", (ChatPiece("user", "u"),), said, turn, is_taken=True)


def finished_in_reverse() -> tuple[Tree, list[Node]]:
    """Two equal conversations, the first of which got its reply last."""
    tree = Tree()
    nodes = [recorded(number, ChatMessage("assistant", "same")) for number in (0, 1)]
    for node in nodes[::-1]:
        tree.add(node)
    return tree, nodes


def test_of_equal_replies_that_of_the_newest_request_goes_on() -> None:
    tree, (_, newest) = finished_in_reverse()
    place = tree.place([ChatPiece("user", "u"), ChatPiece("assistant", "same")], b"")
    assert place.parent is newest


def test_conversations_are_numbered_as_they_were_asked_for_and_the_first_is_the_work() -> None:
    tree, (first, second) = finished_in_reverse()
    assert tree.threads() == {first: "conversation 1", second: "conversation 2"}
    assert (tree.is_aside(first), tree.is_aside(second)) == (False, True)


async def test_of_equal_replies_one_that_the_program_took_goes_on() -> None:
    gate = asyncio.Event()
    body: Json = {"messages": [user("u")]}
    async with playing("same", "same", "more", gate=gate) as program:
        first = asyncio.create_task(program.send("chat/completions", body), name="first request")
        await until(lambda: len(program.sampler.prompts) == 1)
        second = asyncio.create_task(program.send("chat/completions", body), name="second request")
        await until(lambda: len(program.sampler.prompts) == 2)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        gate.set()
        await first
        await until(lambda: len(program.episode.tree.nodes) == 2)
        await program.chat([user("u"), {"role": "assistant", "content": "same"}, user("on")], tools=())
        assert program.afters() == [-1, 0]


def asides(program: Program) -> list[bool]:
    return [turn.aside for turn in program.turns()]


async def test_a_reply_that_a_prompt_contains_stays_used_whatever_later_prompts_contain() -> None:
    async with playing("Title", LS, "done") as program:
        title = await program.chat([user("Name it.")], tools=())
        told = [user(f"mend it: {title['content']}")]
        first = await program.chat(told)
        await program.chat([*told, first, *result(first, "a.py")])
        assert asides(program) == [False, False, False]


async def test_an_empty_reply_is_contained_in_no_prompt() -> None:
    async with playing("", LS) as program:
        await program.chat([user("Name it.")], tools=())
        await program.chat([user("mend it")])
        assert asides(program) == [True, False]


async def test_a_conversation_of_several_replies_is_no_aside() -> None:
    async with playing(LS, "a", "b") as program:
        await program.chat([user("mend it")])
        first = await program.chat([user("x")], tools=())
        await program.chat([user("x"), first, user("y")], tools=())
        assert asides(program) == [False, False, False]


async def test_a_reply_that_nobody_took_is_not_a_programs_work() -> None:
    gate = asyncio.Event()
    async with playing("never taken", "the work", gate=gate) as program:
        lost = asyncio.create_task(
            program.send("chat/completions", {"messages": [user("u")]}), name="lost request"
        )
        await until(lambda: len(program.sampler.prompts) == 1)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        gate.set()
        await until(lambda: len(program.episode.tree.nodes) == 1)
        await program.chat([user("another")], tools=())
        assert asides(program) == [False]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ('{"command": "ls"}', "ls"),
        ('{"cmd": "ls"}', "ls"),
        ('{"script": "ls"}', "ls"),
        ('{"command": ["ls", "-a", 1]}', "ls -a 1"),
        ('{"command": "", "script": "ls"}', "ls"),
        ('{"command": [], "script": "ls"}', "ls"),
        ('{"command": 5}', 'bash {"command": 5}'),
        ('{"command": ', 'bash {"command": '),
        ("[]", "bash []"),
    ],
)
def test_the_command_of_a_call_is_what_its_tool_calls_so(arguments: str, command: str) -> None:
    call = ToolCall(name="bash", arguments=arguments, id="1")
    node = recorded(0, ChatMessage("assistant", "", tool_calls=(call,)))
    note_results(node)
    assert [(action.command, action.observation) for action in node.turn.actions] == [(command, None)]


def test_words_behind_a_reply_are_no_result() -> None:
    call = ToolCall(name="bash", arguments="{}")
    node = recorded(0, ChatMessage("assistant", "", tool_calls=(call,)))
    note_results(node, [ChatPiece("user", "u"), ChatPiece("assistant", "x")])
    assert node.turn.actions[0].observation is None


async def test_calls_that_the_program_made_are_no_quotations() -> None:
    invented = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    told: list[Json] = [user("u"), {"role": "assistant", "tool_calls": [invented]}, user("on")]
    async with playing(LS, "done") as program:
        first = await program.chat(told)
        again = {"role": "assistant", "tool_calls": [{**invented, "id": "y"}]}
        await program.chat([*told, first, *result(first, "a.py"), again, user("on")], tools=(BASH,))
        assert program.afters() == [-1, 0]
        assert program.episode.counted().quoted_calls == 0


async def test_a_call_of_ours_behind_the_place_of_a_request_is_counted_as_a_quotation() -> None:
    async with playing(LS, LS, "done") as program:
        left = await program.chat([user("left")])
        right = await program.chat([user("right")])
        told = [user("right"), right, *result(right, "x"), user("they said"), left, *result(left, "y")]
        await program.chat(told)
        assert program.afters() == [-1, -1, 1]
        assert program.episode.counted().quoted_calls == 1
