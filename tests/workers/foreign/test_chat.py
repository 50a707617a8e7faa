"""Chat completions: what a program sends and gets, whole and as a stream."""

import pytest

from pipeline.chat import ChatMessage
from tests.workers.foreign.program import BASH, LS, Json, call, events, playing, result, system, user
from workers.foreign import fields, tools

OPENING = [system("Be brief."), user("mend it")]


async def test_words_thoughts_and_calls_are_told_apart_and_go_on_where_they_ended() -> None:
    async with playing(f"<think>\nwhy\n</think>\n\nI look.\n{LS}", "done") as program:
        first = await program.chat(OPENING)
        assert (first["content"], first["reasoning_content"]) == ("I look.", "why")
        (made,) = first["tool_calls"]
        assert made["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
        second = await program.chat([*OPENING, first, *result(first, "a.py")])
        assert second == {"role": "assistant", "content": "done"}
        assert program.afters() == [-1, 0]
        assert program.turns()[1].told == (ChatMessage("tool", "a.py", tool_call_id=made["id"]),)
        assert 'Runs \\"a command\\"\\nin a shell' in program.prompt(0)
        assert program.prompt(1).endswith(
            "\n<|im_start|>user\n<tool_response>\na.py\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )


async def test_a_stream_holds_the_same_as_the_whole_reply() -> None:
    reply = f"<think>\nwhy\n</think>\n\nI look.\n{LS}\n{call('bash', command='pwd')}"
    body: Json = {"model": "m", "messages": OPENING, "tools": [BASH]}
    async with playing(reply, reply) as program:
        whole = await program.chat(OPENING)
        chunks = await program.stream("chat/completions", {**body, "stream_options": {"include_usage": True}})
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"] == "I look."
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why"
        calls = [one for delta in deltas for one in delta.get("tool_calls", [])]
        assert [one["index"] for one in calls] == [0, 1]
        assert [one["function"] for one in calls] == [one["function"] for one in whole["tool_calls"]]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]][
            -1
        ] == "tool_calls"
        turn = program.turns()[1]
        assert chunks[-1]["usage"] == {
            "prompt_tokens": len(turn.fed) // 4,
            "completion_tokens": len(turn.sampled) // 4,
            "total_tokens": (len(turn.fed) + len(turn.sampled)) // 4,
        }


async def test_a_stream_has_no_usage_that_nobody_asked_for_and_no_parts_that_the_reply_has_not() -> None:
    async with playing("hello", "hello") as program:
        for options in ({}, {"stream_options": {"include_usage": False}}):
            chunks = await program.stream("chat/completions", {"messages": OPENING, **options})
            assert all("usage" not in chunk for chunk in chunks)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert deltas == [{"role": "assistant", "content": ""}, {"content": "hello"}, {}]


async def test_a_stream_of_a_call_alone_has_no_words_and_an_end() -> None:
    body: Json = {"messages": OPENING, "tools": [BASH], "stream": True}
    async with playing(LS, LS) as program:
        async with program.post("chat/completions", body) as response:
            text = (await response.read()).decode()
        first, called, last = [chunk["choices"][0]["delta"] for chunk in events(text)]
        assert (first["content"], list(called), last) == ("", ["tool_calls"], {})
        assert text.endswith("data: [DONE]\n\n")
        whole = await program.chat(OPENING)
        assert whole["content"] is None


async def test_the_name_of_the_model_comes_back_and_is_cut() -> None:
    async with playing("hello") as program:
        _, answer = await program.send("chat/completions", {"messages": OPENING, "model": "m" * 500})
        assert answer["model"] == "m" * 200


async def test_bytes_that_are_no_utf_8_and_long_integers_do_not_disturb() -> None:
    async with playing("done") as program:
        number = b"1" * 4000
        body = b'{"messages": [{"role": "user", "content": "a\xffb"}], "x": ' + number + b"}"
        assert (await program.send("chat/completions", body))[0] == 200
        assert "a\ufffdb" in program.prompt(0)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "reasoning_text"])
async def test_a_thought_may_come_back_under_several_names(name: str) -> None:
    async with playing("<think>\nwhy\n</think>\n\nI look.", "done") as program:
        first = await program.chat(OPENING)
        back: Json = {"role": "assistant", "content": first["content"], name: first["reasoning_content"]}
        await program.chat([*OPENING, back, user("on")])
        assert program.episode.counted().copies == {"same": 1}


async def test_arguments_may_be_an_object_or_missing_and_a_refusal_is_words() -> None:
    calls = [{"id": "x", "type": "function", "function": {"name": "bash", "arguments": {"command": "pwd"}}}]
    calls += [{"id": "y", "type": "function", "function": {"name": "bash"}}]
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "", "text": "I will not."}]}
    async with playing("done") as program:
        await program.chat([user("u"), {"role": "assistant", "tool_calls": calls}, user("v"), refused])
        assert '{"command": "pwd"}' in program.prompt(0)
        assert "I will not." in program.prompt(0)


async def test_the_newer_limit_of_tokens_goes_before_the_older() -> None:
    async with playing("one two three four five six seven") as program:
        body: Json = {"messages": OPENING, "max_completion_tokens": 2, "max_tokens": 5}
        _, answer = await program.send("chat/completions", body)
        assert answer["usage"]["completion_tokens"] == 2


async def test_tools_that_a_provider_would_run_are_not_shown() -> None:
    async with playing("done") as program:
        await program.chat(OPENING, [BASH, {"type": "web_search_options", "function": {"name": "search"}}])
        assert "search" not in program.prompt(0)
        assert program.episode.counted().tools_left_out == 1


async def test_very_many_tools_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MOST_TOOLS", 2)
    async with playing("done") as program:
        status, answer = await program.send("chat/completions", {"messages": OPENING, "tools": [BASH] * 3})
        assert (status, "more than 2 tools" in answer["error"]["message"]) == (400, True)
        await program.chat(OPENING, [BASH] * 2)


async def test_a_call_that_cannot_be_read_is_sent_as_it_was_written() -> None:
    written = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls}\n</tool_call>'
    async with playing(written, "I see.") as program:
        first = await program.chat(OPENING)
        (made,) = first["tool_calls"]
        assert made["function"]["arguments"] == '{"name": "bash", "arguments": {"command": "ls}'
        assert made["function"]["name"] == "bash"
        await program.chat([*OPENING, first, *result(first, "no such thing")])
        assert program.afters() == [-1, 0]


async def test_a_reply_that_is_cut_by_its_length_says_so() -> None:
    async with playing("one two three four five six seven") as program:
        body: Json = {"messages": OPENING, "max_tokens": 3}
        _, answer = await program.send("chat/completions", body)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 3
        assert program.turns()[0].stop == "length"


async def test_a_program_may_not_raise_the_recipes_limit() -> None:
    async with playing("one two three four five six seven", max_new_tokens=3) as program:
        _, answer = await program.send(
            "chat/completions", {"messages": OPENING, "max_completion_tokens": 64_000}
        )
        assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input_audio"),
        ({"role": "user", "content": [{"type": "x" * 500}]}, f"type '{'x' * 80}' is"),
        ({"role": "function", "content": "x"}, "function"),
        ({"role": "x" * 500, "content": "x"}, f"role '{'x' * 80}' are"),
        ({"role": "assistant", "function_call": {"name": "x"}}, "function_call is not supported"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls is not a list"),
        ({"role": "assistant", "tool_calls": [{"function": 5}]}, "a call's function is not an object"),
        ({"role": "user", "content": 5}, "content is not a string"),
        ({"role": "user", "content": [{"type": []}]}, "type is not a string"),
        ({"role": "user", "content": [{"type": {}}]}, "type is not a string"),
        ("x", "an entry of messages is not an object"),
    ],
)
async def test_what_no_template_knows_is_refused_by_name(message: object, named: str) -> None:
    async with playing("never") as program:
        status, answer = await program.send("chat/completions", {"messages": [message]})
        assert status == 400
        assert named in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
        assert program.turns() == ()
        assert program.sampler.prompts == {}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", "nested too deeply"),
        (b'{"x": ' + b"[" * 127 + b"]" * 127 + b"}", "no messages"),
        (b'{"x": ' + b"[" * 128 + b"]" * 128 + b"}", "nested too deeply"),
        (b'{"x": ' + b'{"x":' * 128 + b"1" + b"}" * 129, "nested too deeply"),
        (b'{"x": NaN}', "NaN is not a number"),
        (b'{"x": -Infinity}', "-Infinity is not a number"),
        (b'{"x": 1e999}', "1e999 is not a number"),
        (b'{"x": ' + b"1" * 5000 + b"}", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not an object"),
        (b'{"messages": [], "n": 2}', "n is not 1"),
        (b'{"messages": [], "n": 1}', "no messages"),
        (b'{"messages": [], "functions": [{}]}', "functions are not supported"),
        (b'{"messages": [], "stream": "no"}', "stream is neither true nor false"),
        (b'{"messages": [], "stream": null, "functions": []}', "no messages"),
        (b'{"messages": [], "max_tokens": true}', "max_tokens is not a number"),
        (b'{"messages": [], "max_tokens": "5"}', "max_tokens is not a number"),
        (b'{"messages": [], "max_completion_tokens": null, "max_tokens": 0}', "max_tokens is not a number"),
        (b'{"messages": [], "tools": [{"type": "function", "function": 5}]}', "function is not an object"),
        (b'{"messages": []}', "no messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused(body: bytes, named: str) -> None:
    async with playing("never") as program:
        status, answer = await program.send("chat/completions", body)
        assert (status, named in answer["error"]["message"]) == (400, True), answer


async def test_a_body_of_very_many_parts_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fields, "MOST_PARTS", 1000)
    async with playing("never") as program:
        status, answer = await program.send("chat/completions", b"[" + b"[]," * 400 + b"{}]" * 400)
        assert (status, "too many parts" in answer["error"]["message"]) == (400, True), answer


async def test_half_a_surrogate_pair_and_control_tokens_in_texts_are_text() -> None:
    async with playing("done") as program:
        text = '"cut \\ud83d <|im_end|> off"'
        body = f'{{"messages": [{{"role": "user", "content": {text}}}]}}'.encode()
        status, _ = await program.send("chat/completions", body)
        assert status == 200
        ids = program.sampler.prompts[0]
        assert "cut ? <|im_end|> off" in program.prompt(0)
        assert ids.count(program.sampler.renderer.end_id) == 1
        assert program.turns()[0].told == (ChatMessage("user", "cut ? <|im_end|> off"),)


async def test_half_a_surrogate_pair_in_the_schema_of_a_tool_does_not_disturb() -> None:
    tool = '{"type": "function", "function": {"name": "x", "parameters": {"title": "\\ud83d"}}}'
    async with playing("done") as program:
        body = f'{{"messages": [{{"role": "user", "content": "u"}}], "tools": [{tool}]}}'.encode()
        status, _ = await program.send("chat/completions", body)
        assert status == 200
        assert '"title": "?"' in program.prompt(0)


async def test_control_tokens_in_the_description_of_a_tool_are_text() -> None:
    async with playing("done") as program:
        tool = {"type": "function", "function": {"name": "x<|im_end|>", "description": "<|im_start|>"}}
        await program.chat([user("u")], [tool])
        assert program.sampler.prompts[0].count(program.sampler.renderer.end_id) == 2
        assert "<|im_start|>" in program.prompt(0)


async def test_a_text_that_comes_back_as_a_list_and_a_result_with_a_name_are_the_same() -> None:
    async with playing(LS, "done", "on") as program:
        first = await program.chat(OPENING)
        (told,) = result(first, "a.py")
        second = await program.chat([*OPENING, first, told])
        parts = [{"type": "text", "text": "mend "}, {"type": "text", "text": "it", "cache_control": {}}]
        opening = [OPENING[0], {"role": "user", "content": parts}]
        await program.chat([*opening, first, {**told, "name": "bash"}, second, user("on")])
        assert program.afters() == [-1, 0, 1]
