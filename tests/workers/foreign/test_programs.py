"""What each agent program does to the conversation that it sends back, as recorded of the real ones: its replies are found all the same.

At the end of each of these episodes, every token is in exactly one sample, behind the prompt that the sampler was given (`playing`).
"""

import asyncio
import json

from tests.workers.foreign.program import (
    BASH,
    LS,
    Json,
    call,
    events,
    fed,
    playing,
    result,
    system,
    until,
    user,
)

OPENING = [system("You are an agent."), user("mend it")]
THOUGHTFUL = f"<think>\n  because  \n</think>\n\n I look.\t\n{LS}"


def printed_again(message: Json, **changes: str) -> Json:
    """The message whose calls' arguments were parsed and printed, compact, as JavaScript does."""
    calls = [
        {
            **one,
            "function": {
                **one["function"],
                **changes,
                "arguments": changes.get("arguments")
                or json.dumps(json.loads(one["function"]["arguments"]), separators=(",", ":")),
            },
        }
        for one in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


async def test_opencodes_title_is_an_aside_and_its_printed_and_renamed_calls_are_the_recorded_ones() -> None:
    title = [system("You make titles."), user("Generate a title"), user("mend it")]
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": }}\n</tool_call>'
    gate = asyncio.Event()
    async with playing("Mending it", THOUGHTFUL, broken, call("nonsense"), "done", gate=gate) as program:
        naming = asyncio.create_task(program.chat(title, tools=()), name="title")
        await until(lambda: len(program.sampler.prompts) == 1)
        looking = asyncio.create_task(program.chat(OPENING), name="main")
        await until(lambda: len(program.sampler.prompts) == 2)
        gate.set()
        await naming
        first = printed_again(await looking)
        told = [*OPENING, first, *result(first, "a.py")]
        second = await program.chat(told)
        second = printed_again(second, name="invalid", arguments='{"tool":"bash","error":"JSON"}')
        told += [second, *result(second, "invalid arguments")]
        third = await program.chat(told)
        third = printed_again(third, name="invalid", arguments='{"tool":"nonsense","error":"unknown"}')
        told += [third, *result(third, "unknown tool")]
        await program.chat(told)
        turns = program.turns()
        asides = [turn.text for turn in turns if turn.aside]
        assert asides == ["Mending it"]
        main = [number for number, turn in enumerate(turns) if not turn.aside]
        assert [turns[number].after for number in main] == [-1, *main[:-1]]
        assert program.episode.counted().copies == {"printed": 1, "healed": 2}
        assert '"name": "invalid"' not in program.prompt(4)


async def test_opencodes_summary_is_a_reply_elsewhere_and_text_where_it_is_quoted() -> None:
    async with playing(LS, "We did much.", "on") as program:
        first = await program.chat(OPENING)
        summary = await program.chat([system("Summarise."), user("bash ls -> a.py")], tools=())
        new = [OPENING[0], user("What did we do so far?"), summary, user("Continue.")]
        await program.chat(new)
        assert first["tool_calls"]
        assert program.afters() == [-1, -1, -1]
        assert [turn.aside for turn in program.turns()] == [False, False, False]
        assert "We did much." in program.prompt(2)


async def test_qwens_lists_trimmed_thoughts_and_invented_opening_are_seen_through() -> None:
    def listed(text: str) -> Json:
        return {"role": "user", "content": [{"type": "text", "text": text}]}

    opening = [
        system("s"),
        listed("This is the context."),
        {"role": "assistant", "content": "Got it. Thanks!"},
        listed("mend it"),
    ]
    async with playing(THOUGHTFUL, "done") as program:
        first = await program.chat(opening)
        trimmed = {**printed_again(first), "reasoning_content": first["reasoning_content"].strip()[:4]}
        told = [
            {**one, "content": [{"type": "text", "text": one["content"]}]} for one in result(first, "a.py")
        ]
        await program.chat([*opening, trimmed, *told])
        assert program.afters() == [-1, 0]
        assert program.episode.counted().copies == {"thoughts": 1}
        assert "Got it. Thanks!" in program.prompt(0)
        assert fed(program.turns()[1], program).count("a.py") == 1


async def test_qwen_drops_a_reply_and_asks_again_with_a_larger_limit() -> None:
    async with playing("", "one two three four", LS, "done", max_new_tokens=300) as program:
        await program.chat(OPENING, max_tokens=8000)
        await program.chat(OPENING, max_tokens=3)
        third = await program.chat(OPENING, max_tokens=64_000)
        await program.chat([*OPENING, third, *result(third, "a.py")])
        assert program.afters() == [-1, -1, -1, 2]
        assert [turn.stop for turn in program.turns()] == ["stop", "length", "stop", "stop"]


async def test_an_empty_reply_that_is_kept_is_followed() -> None:
    async with playing("", "<think>\nhm\n</think>\n\n", "done") as program:
        first = await program.chat(OPENING)
        told = [*OPENING, first, user("go on")]
        second = await program.chat(told)
        await program.chat([*told, second, user("and on")])
        assert program.afters() == [-1, 0, 1]


def blocks(*messages: Json, marked: int) -> list[Json]:
    """Messages of Claude Code: the newest but `marked` block has the mark of the cache."""
    made = json.loads(json.dumps(messages))
    made[marked]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return made


async def test_claudes_moving_marks_later_system_and_added_text_are_seen_through() -> None:
    tool = {"name": "bash", "input_schema": {"type": "object"}}

    def told(*texts: str) -> Json:
        return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}

    later: Json = {"role": "system", "content": "Mind the rules."}
    base: Json = {"max_tokens": 900, "tools": [tool], "system": [{"type": "text", "text": "You are Claude."}]}
    two = f"{call('bash', command='ls')}\n{call('bash', command='pwd')}"
    async with playing(two, "", "again", "done") as program:
        opening = [told("mend it"), later]
        _, first = await program.send(
            "messages", {**base, "messages": [*blocks(opening[0], marked=0), later]}
        )
        said = {"role": "assistant", "content": first["content"]}
        results = [
            {"type": "tool_result", "tool_use_id": one["id"], "content": [{"type": "text", "text": text}]}
            for one, text in zip(first["content"], ("a.py", "/src"), strict=True)
        ]
        # The second ran faster.
        answers: Json = {
            "role": "user",
            "content": [{**results[1], "cache_control": {"type": "ephemeral"}}, results[0]],
        }
        await program.send("messages", {**base, "messages": [*opening, said, answers]})
        # An empty reply is dropped, and the message before it is longer.
        longer: Json = {
            "role": "user",
            "content": [results[1], results[0], {"type": "text", "text": "[continue]"}],
        }
        _, third = await program.send("messages", {**base, "messages": [*opening, said, longer]})
        said_again = {"role": "assistant", "content": third["content"]}
        last = [*opening, said, longer, said_again, told("thanks")]
        await program.send("messages", {**base, "messages": last})
        assert program.afters() == [-1, 0, 0, 2]
        shown = program.prompt(1)
        assert shown.index("a.py") < shown.index("/src"), "results are in the order of the calls"
        assert program.episode.counted().branches == 1


async def test_codex_shows_a_cut_text_as_an_assistants_and_compacts_without_its_tools() -> None:
    shell = {"type": "function", "name": "shell", "parameters": {"type": "object"}}

    def item(text: str, role: str = "user") -> Json:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    opening = [item("rules", "developer"), item("more rules", "developer"), item("mend it")]
    cut = item("I was about", "assistant")
    asked: Json = {"instructions": "You are Codex.", "tools": [shell], "store": False}
    reply = f"<think>\nwhy\n</think>\n\n{call('shell', command=['ls'])}"
    async with playing(reply, "All is done.", "A summary.", "on") as program:
        _, first = await program.send("responses", {**asked, "input": [*opening, cut]})
        items = [
            {name: value for name, value in one.items() if name not in ("id", "status")}
            for one in first["output"]
        ]
        out = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "a.py"}
        history = [*opening, cut, *items, out]
        _, second = await program.send("responses", {**asked, "input": history})
        history += second["output"]
        assert program.afters() == [-1, 0]
        compaction = {**asked, "tools": [], "input": [*history, item("Summarise.")]}
        _, summary = await program.send("responses", compaction)
        assert program.afters() == [-1, 0, -1]
        assert program.episode.counted().quoted_calls == 1
        text = summary["output"][0]["content"][0]["text"]
        await program.send("responses", {**asked, "input": [*opening, item(f"So far: {text}")]})
        turns = program.turns()
        assert program.afters() == [-1, 0, -1, -1]
        assert [turn.aside for turn in turns] == [False] * 4
        assert "I was about" in program.prompt(0)


async def test_codexs_subagent_is_a_conversation_of_its_own() -> None:
    ask: Json = {"input": [{"role": "user", "content": "look"}], "tools": [{"type": "function", "name": "x"}]}
    async with playing(call("x"), "done") as program:
        await program.send("responses", ask, thread_id="1", session_id="s")
        await program.send("responses", ask, thread_id="2", session_id="s", x_openai_subagent="explore")
        assert [turn.thread for turn in program.turns()] == ["conversation 1", "conversation 2, subagent"]


async def test_geminis_empty_arguments_and_pis_repaired_ones_leave_the_recorded_reply() -> None:
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"\n</tool_call>'
    async with playing(broken, broken, "done") as program:
        told = list(OPENING)
        for arguments in ("{}", '{"command":"ls"}'):
            message = await program.chat(told)
            message = printed_again(message, arguments=arguments)
            message.pop("reasoning_content", None)
            told += [message, *result(message, "out")]
        await program.chat(told)
        assert program.afters() == [-1, 0, 1]
        assert program.episode.counted().copies == {"healed": 2}
        assert program.prompt(2).count('{"name": "bash", "arguments": {"command": "ls"\n') == 2


async def test_openhands_splits_refused_calls_each_in_front_of_its_result() -> None:
    two = f"<think>\nwhy\n</think>\n\nI look.\n{call('bash', command='ls')}\n{call('bash', command='pwd')}"
    async with playing(two, "done", "more") as program:
        first = await program.chat(OPENING)
        calls = first["tool_calls"]
        parts: list[Json] = []
        for number, one in enumerate(calls):
            parts.append(
                {
                    "role": "assistant",
                    "content": "I look." if number == 0 else "",
                    "tool_calls": [one],
                    "provider_specific_fields": None,
                }
            )
            answer = {"role": "tool", "tool_call_id": one["id"], "name": "bash"}
            parts.append({**answer, "content": [{"type": "text", "text": f"refused {number}"}]})
        second = await program.chat([*OPENING, *parts])
        await program.chat([*OPENING, *parts, second, user("go on")])
        assert program.afters() == [-1, 0, 1]
        suffix = fed(program.turns()[1], program)
        assert suffix.index("refused 0") < suffix.index("refused 1")
        assert "assistant" not in suffix.removesuffix("<|im_start|>assistant\n")


async def test_mini_drops_a_format_error_and_says_so() -> None:
    async with playing("no call here", LS, "done") as program:
        await program.chat(OPENING)
        told = [*OPENING, user("Format error: exactly one call, please.")]
        second = await program.chat(told)
        told += [{**second, "extra": {"cost": 0}}, *result(second, "a.py")]
        await program.chat(told)
        assert program.afters() == [-1, -1, 1]


async def test_aiders_work_is_trained_and_its_commit_message_is_not() -> None:
    examples = [user("Change x"), {"role": "assistant", "content": "Ok."}, user("mend it")]
    async with playing("<<<<<<< SEARCH", "fix: mend it", "another edit") as program:
        first = await program.chat(examples, tools=())
        await program.chat([system("Write a commit message."), user("diff")], tools=())
        await program.chat([*examples, first, user("not good")], tools=())
        assert program.afters() == [-1, -1, 0]
        assert [turn.aside for turn in program.turns()] == [False, True, False]


async def test_the_only_reply_of_a_program_without_tools_is_its_work() -> None:
    async with playing("the edit", "fix: it") as program:
        await program.chat([user("mend it")], tools=())
        await program.chat([user("Write a commit message.")], tools=())
        assert [turn.aside for turn in program.turns()] == [False, True]


async def test_asides_may_be_trained() -> None:
    async with playing("Title", LS, trains_asides=True) as program:
        await program.chat([user("Make a title.")], tools=())
        await program.chat(OPENING)
        assert [turn.aside for turn in program.turns()] == [False, False]


async def test_an_edited_message_is_a_branch_and_both_ends_are_trained() -> None:
    async with playing(LS, "left", "right") as program:
        first = await program.chat(OPENING)
        await program.chat([*OPENING, first, *result(first, "a.py")])
        await program.chat([*OPENING, first, *result(first, "b.py")])
        assert program.afters() == [-1, 0, 0]
        counted = program.episode.counted()
        assert (counted.roots, counted.branches, counted.asides, counted.not_taken) == (1, 1, 0, 0)
        assert program.turns()[0].actions[0].observation is None, (
            "two results of one call: neither is believed"
        )


async def test_a_conversation_whose_tools_change_begins_anew() -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {}}}
    async with playing(LS, "done") as program:
        first = await program.chat(OPENING)
        await program.chat([*OPENING, first, *result(first, "a.py")], tools=(BASH, other))
        assert program.afters() == [-1, -1]
        assert '"name": "bash", "arguments": {"command": "ls"}' in program.prompt(1)


async def test_results_of_calls_are_shown_and_recorded_by_what_the_program_calls_them() -> None:
    async with playing(call("read_file", path="a.py"), "done") as program:
        first = await program.chat(OPENING)
        await program.chat([*OPENING, first, *result(first, "x = 1")])
        (action,) = program.turns()[0].actions
        assert action.command == 'read_file {"path": "a.py"}'
        assert action.observation is not None
        assert action.observation.output == "x = 1"


async def test_a_policy_that_calls_the_port_itself_gets_replies_that_count_and_nothing_else() -> None:
    async with playing(LS, "forged", "done", turns=3) as program:
        first = await program.chat(OPENING)
        forged = [*OPENING, first, *result(first, "all tests passed")]
        assert (await program.chat(forged))["content"] == "forged"
        assert (await program.chat([*OPENING, first, *result(first, "1 failed")]))["content"] == "done"
        assert program.afters() == [-1, 0, 0]
        status, _ = await program.send("chat/completions", {"messages": [user("more")]})
        assert status == 400


async def test_a_stream_of_the_same_request_is_another_request() -> None:
    body: Json = {"messages": [user("u")]}
    async with playing("one", "two") as program:
        await program.send("chat/completions", body)
        async with program.post("chat/completions", {**body, "stream": True}) as response:
            assert events((await response.read()).decode())
        assert program.texts() == ["one", "two"]
