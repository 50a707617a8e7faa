"""Messages: blocks in, blocks out, as Claude Code has them."""

import json
from typing import Any

import pytest

from tests.workers.foreign.program import LS, Json, call, fed, playing

BASH = {
    "name": "bash",
    "description": "Runs a command",
    "input_schema": {"properties": {"command": {"type": "string"}}},
}


KIMI = "moonshotai-Kimi-K2"  # which writes arguments as they are


def kimi(arguments: str) -> str:
    made = f"<|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{made}<|tool_calls_section_end|>"


def body(*messages: Json, **more: Any) -> Json:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    return {
        "model": "m",
        "max_tokens": 300,
        "system": system,
        "messages": list(messages),
        "tools": [BASH],
        **more,
    }


def user(*blocks: Json | str) -> Json:
    return {
        "role": "user",
        "content": [{"type": "text", "text": one} if isinstance(one, str) else one for one in blocks],
    }


def result(block: Json, content: Any, **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": block["id"], "content": content, **more}


def streamed(found: list[Json]) -> list[Json]:
    """The blocks of a stream, put together as a client does."""
    blocks: list[Json] = []
    for event in found:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            written = ""
        elif event["type"] == "content_block_delta":
            kind = event["delta"]["type"]
            if kind == "input_json_delta":
                written += event["delta"]["partial_json"]
                try:
                    blocks[-1]["input"] = json.loads(written)
                except ValueError:
                    blocks[-1]["input"] = {"__unparsedToolInput": written}
            else:
                field = kind.removesuffix("_delta")
                blocks[-1][field] += event["delta"][field]
    return blocks


async def test_thoughts_words_and_calls_are_blocks_and_go_on_where_they_ended() -> None:
    async with playing(f"<think>\nwhy\n</think>\n\nI look.\n{LS}", "done") as program:
        status, answer = await program.send("messages", body(user("mend it")))
        thought, words, made = answer["content"]
        assert (status, answer["stop_reason"]) == (200, "tool_use")
        assert (thought["thinking"], words["text"], made["input"]) == ("why", "I look.", {"command": "ls"})
        assert thought["signature"]
        told = user(result(made, [{"type": "text", "text": "a.py"}], is_error=True))
        again = body(user("mend it"), {"role": "assistant", "content": answer["content"]}, told)
        _, answer = await program.send("messages", again)
        assert answer["content"] == [{"type": "text", "text": "done"}]
        assert answer["stop_reason"] == "end_turn"
        assert program.afters() == [-1, 0]
        seen = program.turns()[0].actions[0].observation
        assert seen is not None
        assert (seen.output, seen.exit_code) == ("a.py", 1)


async def test_a_stream_holds_the_same_as_the_whole_reply() -> None:
    reply = f"<think>\nwhy\n</think>\n\nI look.\n{LS}\n{call('bash', command='pwd')}"
    async with playing(reply, reply) as program:
        _, whole = await program.send("messages", body(user("mend it")))
        found = await program.stream("messages", body(user("mend it")))
        assert [one | {"id": ""} for one in streamed(found)] == [one | {"id": ""} for one in whole["content"]]
        assert (found[0]["type"], found[-1]["type"]) == ("message_start", "message_stop")
        assert found[-2]["delta"]["stop_reason"] == "tool_use"
        assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 0
        assert found[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > 0
        assert found[0]["message"]["usage"]["output_tokens"] == 0


async def test_a_reply_of_words_is_one_block_and_the_name_of_the_model_is_cut() -> None:
    async with playing("done", "done") as program:
        _, whole = await program.send("messages", body(user("u"), model="m" * 500))
        assert whole["content"] == [{"type": "text", "text": "done"}]
        assert whole["model"] == "m" * 200
        assert streamed(await program.stream("messages", body(user("u")))) == whole["content"]


async def test_without_a_system_text_there_is_no_system_message() -> None:
    async with playing("done") as program:
        await program.send("messages", {"messages": [{"role": "user"}], "max_tokens": 9})
        assert program.prompt(0) == "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"


async def test_results_and_texts_of_one_message_are_shown_in_their_order_and_once() -> None:
    async with playing(LS, "done") as program:
        _, answer = await program.send("messages", body(user("u")))
        (made,) = answer["content"]
        told = user("before", result(made, "a.py", is_error=False), "behind")
        await program.send("messages", body(user("u"), {"role": "assistant", "content": [made]}, told))
        assert fed(program.turns()[1], program) == (
            "\n<|im_start|>user\nbefore<|im_end|>\n<|im_start|>user\n<tool_response>\na.py\n</tool_response><|im_end|>\n"
            "<|im_start|>user\nbehind<|im_end|>\n<|im_start|>assistant\n"
        )
        seen = program.turns()[0].actions[0].observation
        assert (seen and seen.exit_code) == 0


async def test_the_blocks_of_a_copy_may_be_parted_or_a_text() -> None:
    async with playing("<think>\nwhy\n</think>\n\nI look.", "done", "on") as program:
        await program.send("messages", body(user("u")))
        thoughts = [{"type": "thinking", "thinking": one} for one in ("wh", "y")]
        blocks = [*thoughts, {"type": "redacted_thinking", "data": ""}]
        blocks += [{"type": "text", "text": one} for one in ("I ", "look.")]
        told = [user("u"), {"role": "assistant", "content": blocks}, user("v")]
        await program.send("messages", body(*told))
        await program.send("messages", body(*told, {"role": "assistant", "content": "done"}, user("w")))
        assert program.afters() == [-1, 0, 1]
        assert program.episode.counted().copies == {"same": 2}


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "assistant", "content": [{"type": "server_tool_use"}]}, "server_tool_use"),
        ({"role": "assistant", "content": 5}, "content is not a string"),
        ({"role": "critic", "content": "x"}, "critic"),
        ({"role": "user", "content": {}}, "content is not a string"),
    ],
)
async def test_messages_of_other_kinds_are_refused_by_name(message: Json, named: str) -> None:
    async with playing("never") as program:
        status, answer = await program.send("messages", body(message))
        assert (status, named in answer["error"]["message"]) == (400, True), answer


async def test_tools_with_a_type_of_their_own_are_not_shown() -> None:
    async with playing("done") as program:
        tools = [
            {**BASH, "type": "custom", "name": "mine"},
            {"type": "web_search_20250305", "name": "search"},
        ]
        await program.send("messages", body(user("u"), tools=[BASH, *tools]))
        shown = program.prompt(0)
        assert ('"bash"' in shown, '"mine"' in shown, '"search"' in shown) == (True, True, False)
        assert program.episode.counted().tools_left_out == 1


async def test_a_stream_without_words_begins_with_its_call() -> None:
    async with playing(LS) as program:
        (made,) = streamed(await program.stream("messages", body(user("mend it"))))
        assert (made["type"], made["input"]) == ("tool_use", {"command": "ls"})


async def test_a_broken_call_is_raw_in_a_stream_and_text_in_an_object() -> None:
    written = 'I call.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls}\n</tool_call>'
    raw = '{"name": "bash", "arguments": {"command": "ls}'
    async with playing(written, "so", written, "so") as program:
        found = await program.stream("messages", body(user("mend it")))
        words, made = streamed(found)
        assert made["input"] == {"__unparsedToolInput": raw}
        told = user(result(made, "invalid"))
        await program.stream(
            "messages", body(user("mend it"), {"role": "assistant", "content": [words, made]}, told)
        )
        assert program.afters() == [-1, 0]
        assert program.episode.counted().copies == {"healed": 1}
        _, answer = await program.send("messages", body(user("other")))
        assert answer["content"] == [{"type": "text", "text": f"I call.\n{raw}"}]
        assert answer["stop_reason"] == "end_turn"
        again = body(user("other"), {"role": "assistant", "content": answer["content"]}, user("go on"))
        await program.send("messages", again)
        assert program.afters() == [-1, 0, -1, 2]


async def test_arguments_that_are_no_json_are_text_in_an_object() -> None:
    arguments = '{"command": NaN}'
    async with playing(kimi(arguments), template=KIMI) as program:
        _, answer = await program.send("messages", body(user("mend it")))
        assert answer["content"] == [{"type": "text", "text": arguments}]


async def test_a_call_is_sent_however_deep_its_arguments_are() -> None:
    depths = [1, 100, *range(880, 980)]  # Python's own bound on recursion is in this range
    nested = [f'{{"command": {"[" * depth}{"]" * depth}}}' for depth in depths]
    async with playing(*map(kimi, nested), template=KIMI, max_new_tokens=4000, turns=200) as program:
        kinds: list[str] = []
        for _ in depths:
            status, answer = await program.send("messages", body(user("mend it"), max_tokens=4000))
            assert status == 200
            kinds += [block["type"] for block in answer["content"]]
        assert kinds == ["tool_use", "tool_use", *["text"] * 100]


async def test_a_reply_cut_by_its_length_says_so() -> None:
    async with playing("one two three four five") as program:
        _, answer = await program.send("messages", body(user("go"), max_tokens=2))
        assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 2)


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"type": "image", "source": {}}, "image"),
        ({"type": "document"}, "document"),
        ({"type": []}, "type is not a string"),
        ({"type": "tool_result", "is_error": "no"}, "is_error is neither true nor false"),
        ({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}, "image"),
    ],
)
async def test_what_no_template_knows_is_refused_by_name(block: Json, named: str) -> None:
    async with playing("never") as program:
        status, answer = await program.send("messages", body(user(block)))
        assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
        assert named in answer["error"]["message"]


async def test_the_tokens_of_a_prompt_are_counted_without_a_reply() -> None:
    async with playing("done") as program:
        _, counted = await program.send("messages/count_tokens", body(user("go")))
        assert program.sampler.prompts == {}
        _, answer = await program.send("messages", body(user("go")))
        assert counted == {"input_tokens": answer["usage"]["input_tokens"]}


async def test_a_program_finds_the_server_and_its_model() -> None:
    async with playing() as program:
        async with program.session.head(program.url) as response:
            assert response.status == 200
        async with program.session.get(f"{program.url}/v1/models") as response:
            assert [one["id"] for one in (await response.json())["data"]] == ["policy"]
        async with program.session.get(f"{program.url}/v1/models/any") as response:
            assert (await response.json())["id"] == "any"
        async with program.session.get(f"{program.url}/v1/secrets") as response:
            assert response.status == 404
        assert program.episode.counted().requests == 4


async def test_a_later_system_message_and_two_texts_of_the_user_are_shown_in_their_order() -> None:
    async with playing("done") as program:
        told = body(user("one ", "two"), {"role": "system", "content": "mind the gap"}, user("three"))
        await program.send("messages", told)
        shown = program.prompt(0)
        places = [shown.index(words) for words in ("Be brief.", "one two", "mind the gap", "three")]
        assert places == sorted(places)
        assert "<|im_start|>system\nmind the gap<|im_end|>" in shown, "the template takes it"
