"""What becomes of a reply on its way: waiting, retries, limits, failures of ours."""

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from pipeline.chat import ChatMessage
from pipeline.errors import EngineError, EngineRefused
from pipeline.trajectory import Turn
from tests.workers.foreign.program import BASH, LS, Json, Program, call, events, playing, result, until, user
from workers.foreign import endpoint, episode
from workers.foreign.conversations import Place, Tree
from workers.foreign.dialect import Asked
from workers.foreign.voices import AgentPrompt, RenderedVoice

ASK: Json = {"model": "m", "messages": [user("mend it")], "tools": [BASH]}
PATHS: dict[str, Json] = {
    "chat/completions": ASK,
    "responses": {"input": "mend it"},
    "messages": {"messages": [user("mend it")], "max_tokens": 100},
}


async def abandoned(program: Program, body: Json, path: str = "chat/completions") -> None:
    """A request whose connection is given up while the policy thinks."""
    before = len(program.sampler.prompts)
    task = asyncio.create_task(program.send(path, body), name="abandoned request")
    await until(lambda: len(program.sampler.prompts) > before)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_begins_at_once_and_is_kept_alive_while_the_policy_thinks(path: str) -> None:
    gate = asyncio.Event()
    async with (
        playing("done", gate=gate, keep_alive_s=0.02) as program,
        program.post(path, {**PATHS[path], "stream": True}) as response,
    ):
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        seen = b""
        while seen.count(b": the reply is under way\n\n") < 4:
            seen += await response.content.readany()
        assert b"data" not in seen
        gate.set()
        assert events((await response.read()).decode())


async def test_a_reply_is_recorded_before_it_is_sent_and_a_turn_once_it_is_taken() -> None:
    gate = asyncio.Event()
    async with playing("done", gate=gate) as program:
        await abandoned(program, ASK)
        gate.set()
        await until(lambda: len(program.episode.tree.nodes) == 1)
        assert program.turns() == ()
        assert program.episode.counted().not_taken == 1


@pytest.mark.parametrize("is_finished", [False, True])
async def test_a_reply_that_was_not_taken_is_given_to_the_same_request_again(is_finished: bool) -> None:
    gate = asyncio.Event()
    async with playing("done", "never", gate=gate) as program:
        await abandoned(program, ASK)
        if is_finished:
            gate.set()
            await until(lambda: len(program.episode.tree.nodes) == 1)
        again = asyncio.create_task(program.send("chat/completions", ASK), name="second try")
        await until(lambda: program.episode.counts.given_again == 1)
        gate.set()
        status, answer = await again
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "done")
        assert program.texts() == ["done"]
        assert len(program.sampler.prompts) == 1


async def test_a_reply_that_was_continued_is_not_given_to_the_same_request_again() -> None:
    gate = asyncio.Event()
    body: Json = {"messages": [user("u")]}
    async with playing("done", "more", "another", gate=gate) as program:
        await abandoned(program, body)
        gate.set()
        await until(lambda: len(program.episode.tree.nodes) == 1)
        await program.chat([user("u"), {"role": "assistant", "content": "done"}, user("on")], tools=())
        _, answer = await program.send("chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == "another"
        assert program.afters() == [-1, 0, -1]


async def test_the_same_request_again_after_its_reply_was_taken_is_another_one() -> None:
    async with playing("one", "two") as program:
        for words in ("one", "two"):
            _, answer = await program.send("chat/completions", ASK)
            assert answer["choices"][0]["message"]["content"] == words
        assert program.afters() == [-1, -1]


async def test_two_equal_requests_at_one_time_get_two_replies_and_go_on_apart() -> None:
    gate = asyncio.Event()
    async with playing(LS, LS, "left", "right", gate=gate) as program:
        asked = [
            asyncio.create_task(program.send("chat/completions", ASK), name=f"subagent {n}") for n in (0, 1)
        ]
        await until(lambda: len(program.sampler.prompts) == 2)
        gate.set()
        first, second = [answer["choices"][0]["message"] for _, answer in await asyncio.gather(*asked)]
        assert first["tool_calls"][0]["id"] != second["tool_calls"][0]["id"]
        await program.chat([user("mend it"), second, *result(second, "b")])
        await program.chat([user("mend it"), first, *result(first, "a")])
        calls = {turn.said.tool_calls[0].id: number for number, turn in enumerate(program.turns()[:2])}
        assert program.afters() == [
            -1,
            -1,
            calls[second["tool_calls"][0]["id"]],
            calls[first["tool_calls"][0]["id"]],
        ]


@pytest.mark.parametrize(
    "header",
    ["session_id", "thread_id", "x_session_id", "x_claude_code_session_id", "x_claude_code_agent_id"],
)
async def test_equal_replies_without_calls_are_told_apart_by_the_session(header: str) -> None:
    body = {"messages": [user("mend it")]}
    async with playing("same", "same", "left", "right") as program:
        for name in ("a", "b"):
            await program.send("chat/completions", body, **{header: name})
        follow = {"messages": [user("mend it"), {"role": "assistant", "content": "same"}, user("on")]}
        for name in ("a", "b"):
            await program.send("chat/completions", follow, **{header: name})
        assert program.afters() == [-1, -1, 0, 1]


@pytest.mark.parametrize(
    "header",
    ["x_openai_subagent", "x_codex_parent_thread_id", "x_parent_session_id", "x_claude_code_agent_id"],
)
async def test_a_subagents_conversation_has_its_name(header: str) -> None:
    async with playing("one") as program:
        await program.send("chat/completions", {"messages": [user("u")]}, **{header: "x"})
        assert [turn.thread for turn in program.turns()] == ["conversation 1, subagent"]


async def test_a_stream_begins_before_the_first_of_its_comments_is_due() -> None:
    gate = asyncio.Event()
    async with (
        playing("done", gate=gate, keep_alive_s=3600) as program,
        program.post("chat/completions", {**ASK, "stream": True}) as response,
    ):
        assert await response.content.readany() == b": the reply is under way\n\n"
        gate.set()
        await response.read()


async def test_a_reply_waits_for_a_request_of_its_own_dialect_and_session() -> None:
    gate = asyncio.Event()
    body: Json = {"messages": [user("u")], "max_tokens": 100}
    async with playing("lost", "two", "three", gate=gate) as program:
        await abandoned(program, body)
        gate.set()
        await until(lambda: len(program.episode.tree.nodes) == 1)
        _, answer = await program.send("messages", body)
        assert answer["content"][0]["text"] == "two"
        _, answer = await program.send("chat/completions", body, session_id="x")
        assert answer["choices"][0]["message"]["content"] == "three"
        _, answer = await program.send("chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == "lost"


async def test_a_reply_is_given_to_one_connection_at_a_time() -> None:
    gate = asyncio.Event()
    async with playing("one", "two", gate=gate) as program:
        await abandoned(program, ASK)
        asked = [asyncio.create_task(program.send("chat/completions", ASK), name="second try")]
        await until(lambda: program.episode.counts.given_again == 1)
        asked += [asyncio.create_task(program.send("chat/completions", ASK), name="another request")]
        await until(lambda: len(program.sampler.prompts) == 2)
        gate.set()
        answers = [answer["choices"][0]["message"]["content"] for _, answer in await asyncio.gather(*asked)]
        assert answers == ["one", "two"]


async def test_a_retry_that_comes_before_its_connection_is_known_to_be_gone_gets_the_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episode, "RETRY_GRACE_S", 1.0)
    gate = asyncio.Event()
    async with playing("done", "never", gate=gate) as program:
        first = asyncio.create_task(program.send("chat/completions", ASK), name="first try")
        await until(lambda: len(program.sampler.prompts) == 1)
        second = asyncio.create_task(program.send("chat/completions", ASK), name="second try")
        await until(lambda: program.episode.counts.requests == 2)
        first.cancel()
        await until(lambda: program.episode.counts.given_again == 1)
        gate.set()
        _, answer = await second
        assert answer["choices"][0]["message"]["content"] == "done"


async def test_the_same_request_over_another_connection_after_its_reply_was_taken_is_another_one() -> None:
    body = json.dumps({"messages": [user("u")]}).encode()
    head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with playing("one", "two") as program:
        for words in (b'"one"', b'"two"'):
            assert words in await wire(program, head + body)
        assert program.texts() == ["one", "two"]


async def test_no_more_than_four_replies_are_sampled_at_once() -> None:
    gate = asyncio.Event()
    async with playing(*["done"] * 9, gate=gate) as program:
        bodies = [{"messages": [user(str(number))]} for number in range(9)]
        asked = [asyncio.create_task(program.send("chat/completions", one), name="request") for one in bodies]
        await until(lambda: len(program.sampler.prompts) == 4)
        await asyncio.sleep(0.05)
        gate.set()
        await asyncio.gather(*asked)
        assert program.sampler.most_at_once == 4
        assert len(program.turns()) == 9


async def test_the_request_behind_the_last_reply_is_refused_and_the_episode_ends() -> None:
    async with playing("one", "two", "never", turns=2) as program:
        for words in ("a", "b"):
            await program.chat([user(words)])
        assert not program.episode.is_over
        status, answer = await program.send("chat/completions", {"messages": [user("c")]})
        assert (status, "limit of replies" in answer["error"]["message"]) == (400, True)
        assert await program.episode.ended() == "turns"
        status, answer = await program.send("messages", {"messages": [user("d")], "max_tokens": 5})
        assert (status, answer["type"]) == (400, "error")
        async with program.session.get(f"{program.url}/v1/models") as response:
            assert response.status == 400
        assert len(program.turns()) == 2


async def test_an_episode_has_a_largest_number_of_replies_whatever_its_limit_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episode, "MOST_NODES", 1)
    async with playing("one", "never") as program:
        await program.chat([user("a")])
        status, _ = await program.send("chat/completions", {"messages": [user("b")]})
        assert (status, await program.episode.ended()) == (400, "turns")


async def test_a_reply_under_way_when_the_limit_is_reached_is_worth_waiting_for() -> None:
    gate = asyncio.Event()
    async with playing("done", turns=1, gate=gate) as program:
        first = asyncio.create_task(program.send("chat/completions", ASK), name="first request")
        await until(lambda: len(program.sampler.prompts) == 1)
        status, _ = await program.send("chat/completions", {"messages": [user("b")]})
        assert (status, first.done()) == (400, False)
        gate.set()
        assert (await first)[0] == 200
        program.episode._reach("wall_s")
        assert program.episode.ending == "turns", "the first limit counts"


async def test_a_failure_behind_a_limit_is_the_limits_refusal(caplog: pytest.LogCaptureFixture) -> None:
    gate = asyncio.Event()
    async with playing(EngineError("gone"), turns=1, gate=gate) as program:
        first = asyncio.create_task(program.send("chat/completions", ASK), name="first request")
        await until(lambda: len(program.sampler.prompts) == 1)
        await program.send("chat/completions", {"messages": [user("b")]})
        gate.set()
        status, answer = await first
        assert (status, "limit of replies" in answer["error"]["message"]) == (400, True)
        assert await program.episode.ended() == "turns"
    assert caplog.messages == []


async def test_whoever_stops_waiting_for_the_end_does_not_end_the_episode() -> None:
    async with playing("done") as program:
        waiting = asyncio.create_task(program.episode.ended(), name="end")
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (await program.chat([user("u")], ()))["content"] == "done"


async def test_full_contexts_behind_different_replies_do_not_add_up() -> None:
    long = user("x " * 2000)
    async with playing("a", "b", context_tokens=600) as program:
        for words in ("u", "v"):
            first = await program.chat([user(words)], ())
            for _ in range(2):
                body = {"messages": [user(words), first, long]}
                assert (await program.send("chat/completions", body))[0] == 400
        assert not program.episode.is_over


async def test_descriptions_of_tools_that_can_never_fit_are_refused_without_being_rendered() -> None:
    tool = {"type": "function", "function": {"name": "x", "description": "x" * 10**5}}
    async with playing("never", context_tokens=600) as program:
        _, answer = await program.send("chat/completions", {"messages": [user("u")], "tools": [tool]})
        assert "many more" in answer["error"]["message"]


async def test_one_prompt_is_rendered_at_a_time_and_none_is_sampled_behind_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once, most_at_once = 0, 0
    render = RenderedVoice.prompt

    def slow(voice: RenderedVoice, asked: Asked, place: Place, tree: Tree) -> AgentPrompt:
        nonlocal at_once, most_at_once
        at_once += 1
        most_at_once = max(at_once, most_at_once)
        while not program.episode.is_over:
            time.sleep(0.002)
        at_once -= 1
        return render(voice, asked, place, tree)

    monkeypatch.setattr(RenderedVoice, "prompt", slow)
    async with playing("never", "never") as program:
        bodies = [{"messages": [user(words)]} for words in ("a", "b")]
        asked = [asyncio.create_task(program.send("chat/completions", one), name="request") for one in bodies]
        await until(lambda: at_once == 1)
        program.episode._reach("wall_s")
        assert [(await one)[0] for one in asked] == [400, 400]
        assert (most_at_once, program.sampler.prompts) == (1, {})


async def test_a_reply_that_is_its_own_text_is_kept_once() -> None:
    async with playing("done", f"words{LS}") as program:
        await program.chat([user("u")])
        await program.chat([user("v")])
        assert [turn.reply is None for turn in program.turns()] == [True, False]


async def test_the_end_of_an_episode_ends_what_is_under_way_and_leaves_nothing_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with playing("never", gate=asyncio.Event()) as program:
        waiting = asyncio.create_task(program.send("chat/completions", ASK), name="request")
        await until(lambda: program.sampler.at_once == 1)
        await program.episode.close()
        assert program.sampler.at_once == 0
    await asyncio.gather(waiting, return_exceptions=True)
    assert caplog.messages == []


async def failed() -> weakref.ref[episode.AgentEpisode]:
    """An episode that failed while nobody waited for its end."""
    async with playing(EngineError("gone")) as program:
        waiting = asyncio.create_task(program.send("chat/completions", ASK), name="request")
        await until(lambda: program.episode.is_over)
    await asyncio.gather(waiting, return_exceptions=True)
    return weakref.ref(program.episode)


@pytest.mark.slow
async def test_an_episode_that_is_closed_is_kept_by_nobody_and_its_failure_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = await failed()
    await until(lambda: gc.collect() >= 0 and held() is None)
    assert caplog.messages == []


CONTEXT_WORDS = {
    "chat/completions": "maximum context length is 600 tokens",
    "responses": "maximum context length is 600 tokens",
    "messages": "prompt is too long",
}


@pytest.mark.parametrize("path", PATHS)
async def test_a_full_context_is_refused_in_the_words_of_the_dialect_so_that_a_program_may_compact(
    path: str,
) -> None:
    long = {name: value for name, value in PATHS[path].items() if name != "tools"}
    long |= {"input": "x " * 2000} if path == "responses" else {"messages": [user("x " * 2000)]}
    short = {name: value for name, value in PATHS[path].items() if name != "tools"}
    async with playing("short", "short", context_tokens=600) as program:
        for _ in range(2):
            for _ in range(2):
                status, answer = await program.send(path, long)
                assert (status, CONTEXT_WORDS[path] in answer["error"]["message"]) == (400, True), answer
                assert program.episode.context_is_full
            status, _ = await program.send(path, short)
            assert (status, program.episode.context_is_full) == (200, False)
        for _ in range(3):
            status, _ = await program.send(path, long)
        assert await program.episode.ended() == "context"


@pytest.mark.parametrize("path", PATHS)
async def test_a_text_that_can_never_fit_is_refused_without_being_rendered(path: str) -> None:
    async with playing("never", context_tokens=600) as program:
        long = {"input": "x" * 10**5} if path == "responses" else {"messages": [user("x" * 10**5)]}
        status, answer = await program.send(path, long)
        assert (status, "many more" in answer["error"]["message"]) == (400, True)
        if path != "messages":
            assert answer["error"]["code"] == "context_length_exceeded"


async def test_a_reply_that_fills_the_context_says_that_it_is_cut() -> None:
    async with playing("word " * 300, context_tokens=600, max_new_tokens=590) as program:
        _, answer = await program.send("chat/completions", {"messages": [user("hi " * 150)]})
        assert answer["choices"][0]["finish_reason"] == "length"
        assert program.turns()[0].stop == "context"


async def test_the_wall_time_ends_what_is_under_way() -> None:
    async with playing("never", "never", gate=asyncio.Event(), keep_alive_s=0.05) as program:
        whole = asyncio.create_task(program.send("chat/completions", {"messages": [user("a")]}), name="whole")
        streamed = asyncio.create_task(
            program.stream("messages", {"messages": [user("b")], "max_tokens": 9}), name="streamed"
        )
        await until(lambda: len(program.sampler.prompts) == 2)
        program.episode._reach("wall_s")
        (last,) = await streamed
        status, _ = await whole
        assert (last["type"], status) == ("error", 400)
        assert await program.episode.ended() == "wall_s"
        status, _ = await program.send("chat/completions", {"messages": [user("c")]})
        assert status == 400


@pytest.mark.parametrize("error", [EngineError("gone"), EngineRefused("no"), ZeroDivisionError("ours")])
async def test_a_failure_of_ours_never_reaches_the_program(error: Exception) -> None:
    async with playing(error, "never") as program:
        waiting = asyncio.create_task(program.send("chat/completions", ASK), name="request")
        with pytest.raises(type(error)):
            await program.episode.ended()
        later = asyncio.create_task(program.send("chat/completions", ASK), name="later request")
        streaming = asyncio.create_task(program.stream("chat/completions", ASK), name="later stream")
        done, _ = await asyncio.wait({waiting, later, streaming}, timeout=0.3)
        assert done == set()
    for task in (waiting, later, streaming):
        with pytest.raises(aiohttp.ClientError):
            await task
    assert program.turns() == ()


async def test_a_bug_in_reading_a_request_is_no_answer_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(body: bytes) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(endpoint, "read_json", broken)
    async with playing() as program:
        waiting = asyncio.create_task(program.send("chat/completions", ASK), name="request")
        with pytest.raises(ZeroDivisionError):
            await program.episode.ended()
    with pytest.raises(aiohttp.ClientError):
        await waiting


async def test_a_request_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_BODY_BYTES", 2000)
    async with playing("done") as program:
        status, answer = await program.send("chat/completions", b" " * 3000)
        assert (status, "longer than" in answer["error"]["message"]) == (400, True)
        assert await program.chat([user("u")], ()) == {"role": "assistant", "content": "done"}


async def test_too_many_long_requests_at_one_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_READ_BYTES", 1000)
    async with playing("one", "two") as program:
        for _ in range(2):
            host, port = program.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(HEAD + b"Content-Length: 2000\r\n\r\n" + b" " * 900)
            await until(lambda: program.endpoint._read_bytes == 900)
            status, answer = await program.send("chat/completions", {"messages": [user("x" * 200)]})
            assert (status, "at one time" in answer["error"]["message"]) == (400, True)
            writer.transport.abort()
            await until(lambda: program.endpoint._read_bytes == 0)
            assert (await program.send("chat/completions", {"messages": [user("x" * 200)]}))[0] == 200


async def test_endless_requests_end_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode, "MORE_REQUESTS", 1)
    async with playing(turns=1) as program:
        for _ in range(5):
            async with program.session.get(f"{program.url}/v1/models") as response:
                assert response.status == 200
        async with program.session.get(f"{program.url}/v1/models") as response:
            assert response.status == 400
        assert await program.episode.ended() == "turns"


async def test_endless_bodies_end_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode, "MOST_BYTES", 1000)
    async with playing() as program:
        status, _ = await program.send("messages/count_tokens", {"messages": [user("x" * 2000)]})
        assert status == 400
        assert await program.episode.ended() == "turns"


PATTERN = r"```bash\s*\n(.*?)\n```"


class Notes:
    """What a watcher was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def told(self, messages: Sequence[ChatMessage]) -> None:
        self.seen.append(("told", [message.content for message in messages]))

    def replied(self, turn: Turn) -> None:
        self.seen.append(("replied", turn.text))

    def acted(self, turn: Turn) -> None:
        self.seen.append(
            ("acted", [action.observation and action.observation.output for action in turn.actions])
        )


async def test_whoever_watches_sees_what_was_told_replied_and_come_of_calls() -> None:
    notes = Notes()
    last = call("bash", command="exit")
    async with playing(LS, "words", last, watcher=notes) as program:
        first = await program.chat([user("u")])
        second = await program.chat([user("u"), first, *result(first, "a.py")])
        await program.chat([user("u"), first, *result(first, "a.py"), second, user("on")])
    assert notes.seen == [
        ("told", ["u"]),
        ("replied", LS),
        ("acted", ["a.py"]),
        ("told", ["a.py"]),
        ("replied", "words"),
        ("acted", []),
        ("told", ["on"]),
        ("replied", last),
        ("acted", [None]),
    ]


async def test_whoever_watches_is_not_shown_a_reply_that_nobody_took() -> None:
    notes, gate = Notes(), asyncio.Event()
    async with playing(LS, watcher=notes, gate=gate) as program:
        await abandoned(program, ASK)
        gate.set()
        await until(lambda: len(program.episode.tree.nodes) == 1)
    assert notes.seen == [("told", ["mend it"])]


async def test_a_command_that_a_program_reads_from_text_is_an_action_and_what_it_says_next_its_result() -> (
    None
):
    notes = Notes()
    replies = [f"I {word}.\n```bash\n{word}\n```" for word in ("look", "edit", "end")]
    asked = [user("u")]
    async with playing(
        replies[0], "no command", replies[1] * 2, *replies[1:], watcher=notes, command_pattern=PATTERN
    ) as program:
        for told in ([user("a.py")], [user("one!")], [user("one!")], [user("done"), user("hurry")], []):
            asked += [await program.chat(asked, tools=()), *told]
        turns = program.turns()
    assert [[action.command for action in turn.actions] for turn in turns] == [
        ["look"],
        [],
        [],
        ["edit"],
        ["end"],
    ]
    seen = [action.observation and action.observation.output for turn in turns for action in turn.actions]
    assert seen == ["a.py", "done\n\nhurry", None]
    assert [what for kind, what in notes.seen if kind == "acted"] == [
        ["a.py"],
        [],
        [],
        ["done\n\nhurry"],
        [None],
    ]


async def test_two_results_of_one_command_in_text_are_none() -> None:
    async with playing("```bash\nls\n```", "one", "two", command_pattern=PATTERN) as program:
        asked = [user("u")]
        asked.append(await program.chat(asked, tools=()))
        for told in ("a.py", "b.py"):
            await program.chat([*asked, user(told)], tools=())
        assert [action.observation for action in program.turns()[0].actions] == [None]


class HeldTransport(asyncio.Transport):
    """A connection over something that is no socket, and that takes bytes only when it is told to."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._buffer = bytearray()
        self._high = 2**16
        self._closing = False
        self.taken = b""
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        held = len(self._buffer)
        self._buffer += data
        if held <= self._high < len(self._buffer):
            self._protocol.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 2**16 if high is None else high

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def take(self) -> None:
        """All that was written is on its way."""
        held = len(self._buffer)
        self.taken += self._buffer
        self._buffer.clear()
        if held > self._high:
            self._protocol.resume_writing()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


async def wire(program: Program, sent: bytes) -> bytes:
    """The beginning of the answer to bytes that are no client's."""
    host, port = program.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    answer = await reader.read(4096)
    writer.transport.abort()
    return answer


async def test_an_idle_connection_is_closed_after_a_day_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoint.IDLE_S == 86_400
    monkeypatch.setattr(endpoint, "IDLE_S", 0.01)
    async with playing() as program:
        host, port = program.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.timeout(50)  # the server would wait for a minute
async def test_half_a_request_does_not_hold_up_the_end_and_leaves_nothing_behind() -> None:
    async with playing() as program:
        host, port = program.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(HEAD + b"Content-Length: 50\r\n\r\n{")
        await until(lambda: program.episode.counts.requests == 1)
    writer.close()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_a_request_without_an_answer_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "CLOSE_S", 10.0**6)
    async with playing(ZeroDivisionError("ours")) as program:
        waiting = asyncio.create_task(program.send("chat/completions", ASK), name="request")
        with pytest.raises(ZeroDivisionError):
            await program.episode.ended()
    with pytest.raises(aiohttp.ClientError):
        await waiting


async def test_a_request_without_an_answer_does_not_get_an_empty_one_at_the_end() -> None:
    body = json.dumps(ASK).encode()
    async with playing(ZeroDivisionError("ours")) as program:
        sent = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        waiting = asyncio.create_task(wire(program, sent), name="request")
        await until(lambda: program.episode.is_over)
        program.endpoint._closed.set()
        assert await waiting == b""


async def test_refusals_are_counted_by_their_reason() -> None:
    async with playing("one", turns=1, context_tokens=600) as program:
        await program.send("messages", {"messages": [{"role": "x" * 500}]})
        await program.send("chat/completions", {"messages": [user("x " * 2000)]})
        await program.stream("chat/completions", {"messages": [user("u")]})
        await program.send("chat/completions", {"messages": [user("v")]})
        counted = program.episode.counted().refused
        assert counted == {
            f"messages of the role '{'x' * 80}' are not supported": 1,
            "ContextFull": 1,
            "EpisodeOver": 1,
        }


async def test_a_header_may_be_any_bytes() -> None:
    body = json.dumps({"messages": [user("u")]}).encode()
    async with playing("done") as program:
        head = HEAD + b"Session-Id: \xff\xfe\r\nContent-Length: %d\r\n\r\n" % len(body)
        assert (await wire(program, head + body)).startswith(b"HTTP/1.1 200")
        assert len(program.turns()) == 1


async def test_a_body_that_is_not_in_its_encoding_is_refused() -> None:
    async with playing("never") as program:
        head = HEAD + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\n"
        assert (await wire(program, head + b"gzip?")).startswith(b"HTTP/1.1 400")
        assert not program.episode.is_over


async def relayed(program: Program, *, streams: bool = False) -> tuple[HeldTransport, asyncio.Protocol]:
    """A request over such a connection, when its reply is recorded and not yet taken."""
    protocol = program.endpoint.protocol_factory()
    transport = HeldTransport(protocol)
    body = json.dumps({"messages": [user("u")], "stream": streams}).encode()
    sampling = program.sampler.gate = asyncio.Event()
    protocol.data_received(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    while streams and b"under way" not in transport.taken:
        await asyncio.sleep(0.002)
        transport.take()
    sampling.set()
    await until(lambda: b"done" in bytes(transport._buffer) or b"done" in transport.taken)
    return transport, protocol


async def test_a_request_whose_connection_is_gone_is_not_sampled(caplog: pytest.LogCaptureFixture) -> None:
    async with playing("done") as program:
        protocol = program.endpoint.protocol_factory()
        transport = HeldTransport(protocol)
        body = json.dumps({"messages": [user("lost")]}).encode()
        protocol.data_received(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        transport.close()
        await until(lambda: program.episode.counts.requests == 1)
        assert (await program.chat([user("u")], tools=()))["content"] == "done"
        assert "lost" not in program.prompt(0)
    assert caplog.messages == []


@pytest.mark.parametrize("streams", [False, True])
async def test_a_reply_is_a_turn_when_the_last_of_its_bytes_is_taken(streams: bool) -> None:
    async with playing("done") as program:
        transport, _ = await relayed(program, streams=streams)
        await asyncio.sleep(0.02)
        assert program.turns() == ()
        transport.take()
        await until(lambda: len(program.turns()) == 1)
        transport.close()
        assert b'"content":"done"' in transport.taken.replace(b": ", b":")


async def test_a_reply_whose_connection_is_closing_is_not_taken() -> None:
    async with playing("done") as program:
        transport, protocol = await relayed(program)
        transport._closing = True
        transport.take()
        await asyncio.sleep(0.02)
        assert program.turns() == ()
        protocol.connection_lost(None)


async def test_a_reply_whose_connection_goes_before_it_is_taken_is_given_over_the_next() -> None:
    async with playing("done") as program:
        lost, _ = await relayed(program)
        lost.close()
        await asyncio.sleep(0.02)
        assert program.turns() == ()
        transport, _ = await relayed(program)
        transport.take()
        await until(lambda: len(program.turns()) == 1)
        transport.close()
        assert program.episode.counts.given_again == 1


async def test_a_program_that_continues_a_reply_has_taken_it() -> None:
    """Its connection may have gone after the last byte and before we knew that it was taken."""
    async with playing("done", "more") as program:
        lost, _ = await relayed(program)
        lost.close()
        await asyncio.sleep(0.02)
        await program.chat([user("u"), {"role": "assistant", "content": "done"}, user("on")], tools=())
        assert program.afters() == [-1, 0]
