"""An agent program of the tests: real HTTP over loopback to a real endpoint, whose policy is scripted and writes real tokens."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from msgspec.structs import replace

from pipeline.chat import recognised
from pipeline.errors import EngineError
from pipeline.message import pack_float32s, pack_int32s, unpack_int32s
from pipeline.request import Limits
from pipeline.tokenizer import TokenizerBundle
from pipeline.trajectory import Turn, VersionSpan, reply_digest
from tests.trainer.trajectories import trajectory
from tests.workers.policy.templates import bundle as plain_bundle
from trainer.batching.samples import samples_of
from workers.agent.loop import Watcher
from workers.foreign.endpoint import KEEP_ALIVE_S, AgentEndpoint
from workers.foreign.episode import AgentEpisode
from workers.foreign.voices import RenderedVoice, ToolRenderers
from workers.policy.render import Renderer
from workers.policy.speaker import Sampled, Speaker

QWEN = "Qwen-Qwen3-0.6B"
BASH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": 'Runs "a command"\nin a shell',
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
Json = dict[str, Any]


def bundle(name: str = QWEN) -> TokenizerBundle:
    found = plain_bundle(name)
    return replace(found, reply_format=recognised(found.chat_template))


_RENDERERS: dict[str, ToolRenderers] = {}


def renderers(name: str = QWEN) -> ToolRenderers:
    if name not in _RENDERERS:
        _RENDERERS[name] = ToolRenderers(Renderer(bundle(name)))
    return _RENDERERS[name]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


LS = call("bash", command="ls")


@dataclass(slots=True)
class ScriptedSampler:
    """Replies as it is told, and notes what it was sent. A reply that is an exception is raised, one that is an event is waited for."""

    renderer: Renderer
    replies: list[Any]
    prompts: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    drawn: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    kept_tokens: dict[int, int] = field(default_factory=dict[int, int])
    most_at_once: int = 0
    at_once: int = 0
    gate: asyncio.Event | None = None

    async def sample(
        self, prompt: Sequence[int], *, kept_tokens: int, max_new_tokens: int, turn: int
    ) -> Sampled:
        assert turn not in self.prompts, "a number of a sampling is used twice"
        self.prompts[turn], self.kept_tokens[turn] = list(prompt), kept_tokens
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
        finally:
            self.at_once -= 1
        if turn >= len(self.replies):
            raise EngineError("the script ends")
        reply = self.replies[turn]
        if isinstance(reply, Exception):
            raise reply
        whole = [*self.renderer.encode_text(reply), self.renderer.end_id]
        ids = whole[:max_new_tokens]
        self.drawn[turn] = ids
        logprobs = [-0.25 - 0.001 * turn] * len(ids)
        digest = reply_digest(pack_int32s(prompt), pack_int32s(ids), pack_float32s(logprobs))
        stop = "stop" if len(ids) == len(whole) else "length"
        return Sampled(ids, logprobs, (VersionSpan(turn, 0, len(ids)),), stop, digest)


@dataclass(slots=True)
class Program:
    """A client of one episode."""

    episode: AgentEpisode
    endpoint: AgentEndpoint
    sampler: ScriptedSampler
    url: str
    session: aiohttp.ClientSession

    @asynccontextmanager
    async def post(
        self, path: str, body: Json | bytes, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        async with self.session.post(f"{self.url}/v1/{path}", data=data, headers=sent) as response:
            yield response

    async def send(self, path: str, body: Json | bytes, **headers: str) -> tuple[int, Json]:
        """Status and object of an answer that is no stream."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.post(path, body, named) as response:
            return response.status, json.loads(await response.read())

    async def stream(self, path: str, body: Json, **headers: str) -> list[Json]:
        """The events of a stream."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.post(path, {**body, "stream": True}, named) as response:
            text = (await response.read()).decode()
            assert response.status == 200, text
        return events(text)

    async def chat(self, messages: Sequence[Json], tools: Sequence[Json] = (BASH,), **more: Any) -> Json:
        """The assistant's message of chat completions, as a client of the dialect puts it together."""
        body = {"model": "m", "messages": list(messages), **more}
        if tools:
            body["tools"] = list(tools)
        status, answer = await self.send("chat/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["message"]

    def turns(self) -> tuple[Turn, ...]:
        return tuple(self.episode.turns())

    def texts(self) -> list[str]:
        return [turn.text for turn in self.turns()]

    def afters(self) -> list[int | None]:
        return [turn.after for turn in self.turns()]

    def prompt(self, turn: int) -> str:
        """What the engine was sent for a sampling, as text."""
        return self.sampler.renderer.decode(self.sampler.prompts[turn])


def events(text: str) -> list[Json]:
    datas = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(data) for data in datas if data != "[DONE]"]


@asynccontextmanager
async def playing(
    *replies: Any,
    template: str = QWEN,
    keep_alive_s: float = KEEP_ALIVE_S,
    watcher: Watcher | None = None,
    gate: asyncio.Event | None = None,
    max_new_tokens: int = 400,
    trains_asides: bool = False,
    command_pattern: str = "",
    **limits: Any,
) -> AsyncIterator[Program]:
    """A program in an episode whose policy gives these replies, in the order of the requests. Whatever it played is checked at the end."""
    made = renderers(template)
    sampler = ScriptedSampler(Renderer(bundle(template)), list(replies), gate=gate)
    given = Limits(**({"context_tokens": 20_000} | limits))
    speaker = Speaker(sampler, max_new_tokens=max_new_tokens, context_tokens=given.context_tokens)
    episode = AgentEpisode(
        RenderedVoice(speaker, made),
        given,
        watcher=watcher,
        asides_are_trained=trains_asides,
        command_pattern=command_pattern,
    )
    async with (
        AgentEndpoint(episode, keep_alive_s=keep_alive_s) as endpoint,
        aiohttp.ClientSession() as session,
    ):
        server = await asyncio.get_running_loop().create_server(endpoint.protocol_factory, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield Program(episode, endpoint, sampler, url, session)
        finally:
            server.close()
    check_training(episode, sampler)


def check_training(episode: AgentEpisode, sampler: ScriptedSampler) -> None:
    """Every token of a turn that is no aside is in exactly one sample, behind exactly the prompt that the sampler was given.

    `samples_of` itself compares each reply's digest.
    """
    nodes = [node for node in episode.tree.nodes if node.is_taken]
    turns = episode.turns()
    for node, turn in zip(nodes, turns, strict=True):
        assert node.ids() == [*sampler.prompts[node.number], *sampler.drawn[node.number]]
        assert turn.kept_tokens == sampler.kept_tokens[node.number]
    expected = sorted(
        (sampler.prompts[node.number], sampler.drawn[node.number])
        for node, turn in zip(nodes, turns, strict=True)
        if not turn.aside
    )
    vocab_size = bundle().vocab_size
    samples = samples_of(trajectory(*turns), vocab_size=max(vocab_size, 2000), max_tokens=10**7)
    trained: list[tuple[list[int], list[int]]] = []
    for sample in samples:
        tokens = sample.tokens_T.tolist()
        covered = 0
        for reply in sample.replies:
            trained.append((tokens[: reply.start], tokens[reply.start : reply.end]))
            covered += reply.end - reply.start
        assert covered == int(sample.trained_T.sum())
    assert sorted(trained) == expected


def fed(turn: Turn, program: Program) -> str:
    return program.sampler.renderer.decode(unpack_int32s(turn.fed))


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that is about to happen."""
    while not holds():  # noqa: ASYNC110  (nobody tells)
        await asyncio.sleep(0.002)


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def result(message: Json, *texts: str) -> list[Json]:
    """Results of the calls of an assistant's message of chat completions."""
    return [
        {"role": "tool", "tool_call_id": one["id"], "content": text}
        for one, text in zip(message["tool_calls"], texts, strict=True)
    ]
