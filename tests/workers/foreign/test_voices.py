"""A program plays with whoever takes messages: a server of somebody else's, or a file of replies. Its turns have no ids."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from pipeline.chat import ChatMessage, ToolCall
from pipeline.errors import EngineError
from pipeline.request import Endpoint, Limits
from pipeline.trajectory import Usage
from tests.workers.agent.episode import claim
from tests.workers.foreign.program import BASH, Json, result, system, user
from tests.workers.policy.engines import Canned, Wire, completed
from tests.workers.policy.engines import playing as serving
from workers.foreign.endpoint import AgentEndpoint
from workers.foreign.episode import AgentEpisode
from workers.foreign.voices import agent_voice
from workers.policy.endpoint import EndpointPolicies, EndpointSettings
from workers.policy.replies import GivenReply, RepliesPolicies
from workers.policy.speaker import AnyVoice

CALL = {"id": "theirs", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
TOO_LONG = Canned({"error": {"message": "maximum context length is 10 tokens"}}, status=400)
IMPATIENT = EndpointSettings(retry_budget_s=0.0, first_reply_s=0.0)


@dataclass(slots=True)
class Client:
    """The program's side."""

    episode: AgentEpisode
    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Json) -> tuple[int, str]:
        async with self.session.post(f"{self.url}/v1/{path}", data=json.dumps(body)) as response:
            return response.status, await response.text()

    async def chat(self, messages: Sequence[Json], tools: Sequence[Json] = (BASH,), **more: Any) -> Json:
        status, text = await self.post(
            "chat/completions", {"model": "m", "messages": list(messages), "tools": list(tools), **more}
        )
        assert status == 200, text
        return json.loads(text)


@asynccontextmanager
async def program_with(voice: AnyVoice, **limits: Any) -> AsyncIterator[Client]:
    given = Limits(**limits)
    episode = AgentEpisode(agent_voice(voice, given.context_tokens), given)
    async with AgentEndpoint(episode) as endpoint, aiohttp.ClientSession() as session:
        server = await asyncio.get_running_loop().create_server(endpoint.protocol_factory, "127.0.0.1", 0)
        try:
            yield Client(episode, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", session)
        finally:
            server.close()


@asynccontextmanager
async def program_of(
    answers: Sequence[Canned], options: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Client, Wire]]:
    async with serving(answers) as wire, EndpointPolicies(IMPATIENT) as policies:
        claimed = claim(agent="")
        endpoint = Endpoint(api_base=f"{wire.url}/v1", model="some-model", options=options or {})
        voice = await policies.voice(
            replace(claimed, request=replace(claimed.request, endpoint=endpoint, agent_config=""))
        )
        async with program_with(voice) as client:
            yield client, wire


async def test_a_server_gets_the_conversation_and_the_tools_of_the_program_and_its_own_ids_of_calls() -> None:
    answers = [
        Canned(completed("let me see", tool_calls=[CALL], reasoning_content="hm")),
        Canned(completed("done")),
    ]
    async with program_of(answers) as (client, wire):
        opening = [system("s"), user("u")]
        first = (await client.chat(opening))["choices"][0]["message"]
        assert first["tool_calls"][0]["id"] != "theirs", "the program has ids that are unique in the episode"
        await client.chat([*opening, first, *result(first, "a file")])
        looked, said = client.episode.turns()
    assert wire.requests[0] == {"model": "some-model", "messages": opening, "tools": [BASH]}
    assert wire.requests[1]["messages"][2:] == [
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [CALL],
        },
        {"role": "tool", "content": "a file", "tool_call_id": "theirs"},
    ]
    assert (looked.fed, looked.sampled, looked.versions) == (b"", b"", ())
    assert (looked.after, said.after, said.text) == (-1, 0, "done")
    assert looked.actions[0].observation is not None
    assert looked.actions[0].observation.output == "a file"


async def test_the_program_is_told_the_numbers_of_tokens_that_the_server_counts() -> None:
    async with program_of([Canned(completed("one"))]) as (client, _):
        answer = await client.chat([user("u")])
        (turn,) = client.episode.turns()
    assert turn.usage == Usage(prompt_tokens=7, completion_tokens=3)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (7, 3)


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, {}),
        ({"max_tokens": 90, "seed": 7}, {"max_tokens": 50, "seed": 7}),
        ({"max_tokens": 9}, {"max_tokens": 9}),
        ({"max_completion_tokens": 90}, {"max_completion_tokens": 50}),
    ],
)
async def test_a_programs_limit_of_tokens_tightens_one_that_the_options_name_and_adds_none(
    options: dict[str, Any], sent: dict[str, Any]
) -> None:
    async with program_of([Canned(completed("one"))], options) as (client, wire):
        await client.chat([user("u")], max_tokens=50, temperature=0.3)
    assert {
        name: value for name, value in wire.requests[0].items() if name not in ("model", "messages", "tools")
    } == sent


@pytest.mark.parametrize("streams", [False, True])
async def test_a_conversation_that_is_too_long_for_the_server_is_refused_and_the_third_time_ends_the_episode(
    streams: bool,
) -> None:
    async with program_of([Canned(completed("one")), TOO_LONG]) as (client, _):
        first = (await client.chat([user("u")]))["choices"][0]["message"]
        body = {
            "model": "m",
            "messages": [user("u"), first, user("more")],
            "tools": [BASH],
            "stream": streams,
        }
        for number in range(3):
            assert not client.episode.is_over, number
            status, text = await client.post("chat/completions", body)
            assert status == (200 if streams else 400)
            assert "maximum context length" in text
            assert client.episode.context_is_full
        assert await client.episode.ended() == "context"
        assert len(client.episode.turns()) == 1
        assert client.episode.counted().refused == {"ContextFull": 3}


async def test_a_program_that_compacts_after_a_refusal_goes_on() -> None:
    async with program_of([TOO_LONG, Canned(completed("short"))]) as (client, _):
        status, _ = await client.post(
            "chat/completions", {"model": "m", "messages": [user("long")], "tools": [BASH]}
        )
        assert status == 400
        await client.chat([user("summary")])
        assert not client.episode.context_is_full
        assert [turn.text for turn in client.episode.turns()] == ["short"]


async def test_a_server_that_is_broken_is_an_engine_failure_and_the_program_is_not_told() -> None:
    async with program_of([Canned("oops", status=500)]) as (client, _):
        waiting = asyncio.create_task(
            client.post("chat/completions", {"model": "m", "messages": [user("u")]})
        )
        with pytest.raises(EngineError, match="HTTP 500"):
            await client.episode.ended()
        assert not waiting.done()
        waiting.cancel()


async def test_given_replies_answer_requests_of_any_conversation_in_their_order_and_then_end() -> None:
    calls = (ToolCall(name="bash", arguments='{"command": "ls"}', id=""),)
    replies = [
        GivenReply(ChatMessage("assistant", "<think>hm</think>a title")),
        GivenReply(ChatMessage("assistant", "", tool_calls=calls)),
    ]
    voice = await RepliesPolicies(replies).voice(claim(agent=""))
    async with program_with(voice) as client:
        title = (await client.chat([user("name it")], tools=()))["choices"][0]["message"]
        work = (await client.chat([user("do it")]))["choices"][0]["message"]
        named, called = client.episode.turns()
        waiting = asyncio.create_task(client.chat([user("do it"), work, *result(work, "x")]))
        with pytest.raises(EngineError, match="the given replies end after 2"):
            await client.episode.ended()
        waiting.cancel()
    assert (title["content"], title["reasoning_content"]) == ("a title", "hm")
    assert work["tool_calls"][0]["function"]["arguments"] == '{"command": "ls"}'
    assert (named.aside, called.aside) == (True, False)


async def test_a_prompt_is_counted_by_its_letters_where_no_tokenizer_is_known() -> None:
    voice = await RepliesPolicies([]).voice(claim(agent=""))
    tool = {"name": "bash", "description": "x" * 800}
    called = {"type": "tool_use", "id": "1", "name": "b" * 40, "input": {"x": "y" * 400}}
    thought = {"type": "thinking", "thinking": "z" * 80}
    messages = [user("u" * 4000), {"role": "assistant", "content": [thought, called]}]
    async with program_with(voice) as client:
        counted = list[int]()
        for told, tools in ((messages[:1], []), (messages, []), (messages[:1], [tool])):
            status, text = await client.post("messages/count_tokens", {"messages": told, "tools": tools})
            assert status == 200
            counted.append(json.loads(text)["input_tokens"])
    words, calls, described = counted
    assert (words, calls) == (1000, 1000 + (80 + 40 + len(json.dumps({"x": "y" * 400}))) // 4)
    assert 1200 < described < 1300


async def test_a_limit_of_turns_holds_whoever_replies() -> None:
    voice = await RepliesPolicies([GivenReply(ChatMessage("assistant", "x"))] * 3).voice(claim(agent=""))
    async with program_with(voice, turns=1) as client:
        await client.chat([user("u")])
        status, _ = await client.post("chat/completions", {"model": "m", "messages": [user("more")]})
        assert status == 400
        assert await client.episode.ended() == "turns"
