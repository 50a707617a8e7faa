"""Responses: items in, items out, as Codex has them."""

from typing import Any

import pytest

from tests.workers.foreign.program import LS, Json, call, playing

SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}},
    },
}
NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits",
    "format": {"definition": "start: patch"},
}
TOOLS: list[Json] = [SHELL, NAMESPACE, PATCH, {"type": "web_search"}]


def said(text: str) -> Json:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def body(*items: Json, tools: list[Json] = TOOLS, **more: Any) -> Json:
    return {
        "model": "m",
        "instructions": "Be brief.",
        "input": list(items),
        "tools": tools,
        "store": False,
        **more,
    }


def output(item: Json, text: str) -> Json:
    return {"type": item["type"] + "_output", "call_id": item["call_id"], "output": text}


async def test_a_reply_is_the_items_of_its_parts_and_goes_on_where_it_ended() -> None:
    async with playing(
        f"<think>\nwhy\n</think>\n\nI look.\n{call('shell', command=['ls'])}", "done"
    ) as program:
        status, answer = await program.send("responses", body(said("mend it")))
        thought, words, made = answer["output"]
        assert (status, answer["status"]) == (200, "completed")
        assert thought["summary"] == [{"type": "summary_text", "text": "why"}]
        assert words["content"][0]["text"] == "I look."
        assert (made["name"], made["arguments"]) == ("shell", '{"command": ["ls"]}')
        again = body(said("mend it"), thought, words, made, output(made, "a.py"))
        _, answer = await program.send("responses", again)
        assert answer["output"][0]["content"][0]["text"] == "done"
        assert program.afters() == [-1, 0]
        assert program.turns()[0].actions[0].command == "ls"
        assert program.episode.counted().copies == {"same": 1}


async def test_a_stream_ends_with_the_same_items() -> None:
    reply = f"<think>\nwhy\n</think>\n\nI look.\n{call('shell', command=['ls'])}"
    async with playing(reply) as program:
        found = await program.stream("responses", body(said("mend it")))
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        assert (found[0]["type"], found[-1]["type"]) == ("response.created", "response.completed")
        done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
        assert done == found[-1]["response"]["output"]
        assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
        deltas = {event["type"]: event["delta"] for event in found if event["type"].endswith(".delta")}
        begun = [event["item"] for event in found if event["type"] == "response.output_item.added"]
        assert [item["status"] for item in begun] == ["in_progress"] * 3
        assert (begun[0]["summary"], begun[1]["content"], begun[2]["arguments"]) == ([], [], "")
        assert deltas == {
            "response.reasoning_summary_text.delta": "why",
            "response.output_text.delta": "I look.",
            "response.function_call_arguments.delta": '{"command": ["ls"]}',
        }
        assert found[-1]["response"]["usage"]["total_tokens"] > 10


async def test_a_namespace_is_a_part_of_a_name_for_the_policy_only() -> None:
    async with playing(call("agents__spawn", task="x"), call("agents__other"), "done") as program:
        _, answer = await program.send("responses", body(said("go")))
        (made,) = answer["output"]
        assert (made["namespace"], made["name"]) == ("agents", "spawn")
        assert '"agents__spawn"' in program.prompt(0)
        _, answer = await program.send("responses", body(said("go"), made, output(made, "x")))
        (unknown,) = answer["output"]
        assert ("namespace" in unknown, unknown["name"]) == (False, "agents__other")
        assert program.episode.counted().copies == {"same": 1}


async def test_a_tool_that_takes_free_text_is_called_with_it() -> None:
    async with playing(call("apply_patch", input="*** Begin"), "done") as program:
        _, answer = await program.send("responses", body(said("go")))
        (made,) = answer["output"]
        assert (made["type"], made["input"]) == ("custom_tool_call", "*** Begin")
        assert "start: patch" in program.prompt(0)
        await program.send("responses", body(said("go"), made, output(made, "ok")))
        assert program.afters() == [-1, 0]
        assert program.episode.counted().copies == {"same": 1}


@pytest.mark.parametrize("arguments", ['{"input": 5}', '{"input": ', "[]"])
async def test_a_call_without_its_free_text_is_sent_as_it_was_written(arguments: str) -> None:
    written = f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
    async with playing(written) as program:
        _, answer = await program.send("responses", body(said("go")))
        (made,) = answer["output"]
        assert made["type"] == "custom_tool_call"
        assert arguments in made["input"]


@pytest.mark.parametrize("form", [None, 5, {"definition": 5}])
async def test_a_tool_whose_form_is_not_described_is_shown_without_it(form: object) -> None:
    async with playing("done") as program:
        await program.send("responses", body(said("go"), tools=[{**PATCH, "format": form}]))
        assert '"description": "Edits"' in program.prompt(0)


async def test_what_is_null_is_not_there_and_without_instructions_there_is_no_system_message() -> None:
    async with playing("done") as program:
        asked = {"input": "hi", "previous_response_id": None, "background": None, "model": "m" * 500}
        _, answer = await program.send("responses", asked)
        assert answer["model"] == "m" * 200
        assert program.prompt(0) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_texts_of_every_kind_and_messages_of_every_role_are_shown() -> None:
    kinds = ["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    parts = [{"type": kind, "text": kind.upper()} for kind in kinds]
    items: list[Json] = [{"role": "system", "content": "RULE"}, {"role": "developer", "content": "MORE"}]
    items += [said("go"), {"role": "user", "content": parts}, said("u")]
    async with playing("done") as program:
        await program.send("responses", body(*items))
        shown = program.prompt(0)
        assert "RULE" in shown
        assert "MORE" in shown
        assert "".join(kind.upper() for kind in kinds) in shown


async def test_a_thought_is_of_the_item_behind_it_and_else_a_reply_of_its_own() -> None:
    def thought(text: str, **more: Any) -> Json:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], **more}

    words = {"role": "assistant", "content": "I look."}
    async with playing("<think>\nwhy\n</think>\n\nI look.", "<think>\nhm", "done", "on") as program:
        await program.send("responses", body(said("u")))
        parted = [thought("wh"), thought("no", content=[{"type": "reasoning_text", "text": "y"}])]
        told = [said("u"), *parted, words, said("v")]
        _, answer = await program.send("responses", body(*told))
        assert [item["type"] for item in answer["output"]] == ["reasoning"]
        told += [*answer["output"], said("w")]
        await program.send("responses", body(*told))
        assert program.afters() == [-1, 0, 1]
        assert program.episode.counted().copies == {"same": 2}
        await program.send("responses", body(*told[:-1]))
        assert program.afters() == [-1, 0, 1, 1]


async def test_a_thought_that_nobody_sampled_is_shown_once() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "HM"}]}
    called = {"type": "function_call", "call_id": "x", "name": "shell", "arguments": "{}"}
    async with playing("done") as program:
        asked = body(said("u"), thought, {"role": "assistant", "content": "a"}, called, output(called, "o"))
        await program.send("responses", asked)
        assert program.prompt(0).count("HM") == 1


async def test_a_tool_that_the_provider_would_run_is_not_shown_to_the_policy() -> None:
    async with playing("done") as program:
        await program.send("responses", body(said("go")))
        assert "web_search" not in program.prompt(0)
        assert program.episode.counted().tools_left_out == 1


async def test_a_call_that_cannot_be_read_is_sent_as_it_was_written() -> None:
    async with playing('<tool_call>\n{"name": "shell", "arguments": {]\n</tool_call>') as program:
        _, answer = await program.send("responses", body(said("go")))
        assert answer["output"][0]["arguments"] == '{"name": "shell", "arguments": {]'


async def test_a_reply_cut_by_its_length_is_incomplete_and_one_without_anything_is_a_message() -> None:
    async with playing("one two three four five", "") as program:
        found = await program.stream("responses", body(said("go"), max_output_tokens=2))
        assert found[-1]["type"] == "response.incomplete"
        assert found[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        _, answer = await program.send("responses", body(said("go")))
        (message,) = answer["output"]
        assert message["content"][0]["text"] == ""


async def test_a_plain_text_is_the_users() -> None:
    async with playing("hello") as program:
        await program.send("responses", {"input": "hi"})
        assert "<|im_start|>user\nhi<|im_end|>" in program.prompt(0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"input": [{"type": "x", "role": "user"}]}, "type 'x'"),
        ({"input": [{"role": "critic"}]}, "type 'critic'"),
        ({"input": [{"role": "x" * 500}]}, f"type '{'x' * 80}' is"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "web_search_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": [{"type": []}]}, "type is not a string"),
        ({"input": [{"type": "reasoning", "summary": [{"type": {}}]}]}, "type is not a string"),
        ({"tools": [{"type": "function", "name": ""}]}, "a tool has no name"),
    ],
)
async def test_what_no_template_knows_is_refused_by_name(change: Json, named: str) -> None:
    async with playing("never") as program:
        status, answer = await program.send("responses", body(said("go")) | change)
        assert (status, named in answer["error"]["message"]) == (400, True), answer


async def test_the_tokens_of_a_prompt_are_counted_without_a_reply() -> None:
    async with playing(LS) as program:
        _, counted = await program.send("responses/input_tokens", body(said("go")))
        assert program.sampler.prompts == {}
        _, answer = await program.send("responses", body(said("go")))
        assert counted["input_tokens"] == answer["usage"]["input_tokens"] == len(program.sampler.prompts[0])
