"""Chooses the source of replies in an episode: the endpoint that its request names or the fleet's engines, unless these must not reply.

A worker without engines plays the requests that need none, and returns the others. Requests of runs whose weights the engines do not serve
are not played, and lose no try: requests outlive their trainer, and the next trainer may load other weights into the same engines, or
another model. Tokens sampled by these would not be samples of the run, and token ids that a smaller vocabulary lacks crash an engine.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn, Protocol

import aiohttp
import msgspec
from redis.asyncio import Redis

from pipeline import redis_calls, weights
from pipeline.chat import ChatMessage
from pipeline.errors import EngineError
from pipeline.request import Claim
from pipeline.trajectory import Turn
from pipeline.weights import run_of
from workers.agent.loop import Policy
from workers.claim import Obstacle
from workers.policy.speaker import AnyVoice, Sampled, Sampler, Voice


class Opener(Protocol):
    """Opens conversations with one kind of server, and voices for agent programs."""

    async def open(self, claim: Claim) -> Policy: ...

    async def voice(self, claim: Claim) -> AnyVoice: ...


class EngineOpener(Opener, Protocol):
    """The same for engines, whose voices use tokens."""

    async def voice(self, claim: Claim) -> Voice: ...


@dataclass(frozen=True, slots=True)
class RequestedPolicies:
    """Opens the conversation of a claim with the server that its request names."""

    engines: Opener
    endpoints: Opener

    async def open(self, claim: Claim) -> Policy:
        """The conversation. Raises RequestError."""
        return await self._of(claim).open(claim)

    async def voice(self, claim: Claim) -> AnyVoice:
        """The voice. Raises RequestError."""
        return await self._of(claim).voice(claim)

    def _of(self, claim: Claim) -> Opener:
        return self.endpoints if claim.request.endpoint else self.engines


class NoEngines:
    """Replaces the fleet's engines, and the breaker that watches them, on a worker without engines."""

    paused = ""

    def __init__(self, variable: str = "SWERVE_ROUTER_URL") -> None:
        """`variable` is the environment variable that would name the engines' router."""
        self.set_aside = f"no engines ({variable} is empty): only requests that need none are taken"
        self._refusal = f"this worker has no engines; start one with {variable} for such requests"
        self._turned_away: set[str] = set()

    async def open(self, claim: Claim[Any]) -> NoReturn:
        """Refuses the claim. Raises EngineError."""
        self._turned_away.add(claim.request.id)
        raise EngineError(self._refusal)

    async def voice(self, claim: Claim[Any]) -> NoReturn:
        """Refuses the claim. Raises EngineError."""
        await self.open(claim)

    def room(self, free: int) -> int:
        return free

    def claimed(self, request_id: str) -> None:
        """Does nothing: no state is kept about a claim until it is refused."""

    def succeeded(self, request_id: str) -> None:
        """Does nothing: the server that the request names has replied."""

    async def blamed(self, request_id: str, message: str) -> bool:
        """Returns True for a request that needs engines: another worker may have some, so it loses no try."""
        return request_id in self._turned_away

    def ended(self, request_id: str) -> None:
        self._turned_away.discard(request_id)

    async def watch(self) -> None:
        """Does nothing, because nothing changes while the worker runs."""
        await asyncio.Event().wait()


INFO_TIMEOUT_S = 10.0

ServedRun = Callable[[], Awaitable[str | None]]
"""Returns the run whose weights the engines serve; empty if no run has published them, None if the router does not report it.

Raises EngineError if no engine answers.
"""


class _ModelInfo(msgspec.Struct, frozen=True):
    """The fields of /get_model_info that are read. A router passes the request on to one of its engines."""

    weight_version: str | int


async def served_run(router_url: str) -> str | None:
    """The run whose weights an engine of this router serves, by its own report. Raises EngineError if no engine reports any."""
    url, timeout = f"{router_url.rstrip('/')}/get_model_info", aiohttp.ClientTimeout(total=INFO_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            data = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineError(f"{url}: {type(error).__name__}: {error}") from error
    if response.status == HTTPStatus.NOT_FOUND:
        return None
    try:
        return run_of(str(msgspec.json.decode(data, type=_ModelInfo).weight_version))
    except msgspec.DecodeError as error:
        raise EngineError(f"{url}: HTTP {response.status}: {error}") from error
    except ValueError:
        return ""


def engines_of_other_runs(redis: Redis, served_run: ServedRun) -> Obstacle:
    """The obstacle to claims that need the fleet's engines: another run than the claim's publishes weights. While none does, for example
    while a trainer restarts, the weights that the engines serve decide.
    """

    async def obstacle(claim: Claim) -> str:
        request = claim.request
        if request.endpoint is not None:
            return ""
        publishing = await redis_calls.until_answered(lambda: weights.publishing_run(redis))
        if publishing:
            return "" if publishing == request.run_id else f"run {publishing} has the engines"
        try:
            served = await served_run()
        except EngineError as error:
            return f"no run publishes weights, and no engine says whose it serves: {error}"
        if served is None or served == request.run_id:
            return ""
        return (
            f"the engines serve weights of run {served}" if served else "the engines serve no run's weights"
        )

    return obstacle


@dataclass(frozen=True, slots=True)
class PoliciesOfTheirRun:
    """Opens conversations that end when another run takes over the engines in the middle."""

    engines: EngineOpener
    redis: Redis

    async def open(self, claim: Claim) -> Policy:
        """The conversation. Raises RequestError."""
        return _PolicyOfItsRun(await self.engines.open(claim), self.redis, claim.request.run_id)

    async def voice(self, claim: Claim) -> Voice:
        """The voice. Raises RequestError."""
        voice = await self.engines.voice(claim)
        sampler = _SamplerOfItsRun(voice.speaker.sampler, self.redis, claim.request.run_id)
        return dataclasses.replace(voice, speaker=dataclasses.replace(voice.speaker, sampler=sampler))


@dataclass(frozen=True, slots=True)
class _PolicyOfItsRun:
    policy: Policy
    redis: Redis
    run_id: str

    async def begin(self, opening: Sequence[ChatMessage]) -> Turn | None:
        await self._check()
        return await self.policy.begin(opening)

    async def answer(self, messages: Sequence[ChatMessage], forget_reply: bool = False) -> Turn | None:
        await self._check()
        return await self.policy.answer(messages, forget_reply)

    async def _check(self) -> None:
        await _check_run(self.redis, self.run_id)


@dataclass(frozen=True, slots=True)
class _SamplerOfItsRun:
    sampler: Sampler
    redis: Redis
    run_id: str

    async def sample(
        self, prompt: Sequence[int], *, kept_tokens: int, max_new_tokens: int, turn: int
    ) -> Sampled:
        await _check_run(self.redis, self.run_id)
        return await self.sampler.sample(
            prompt, kept_tokens=kept_tokens, max_new_tokens=max_new_tokens, turn=turn
        )


async def _check_run(redis: Redis, run_id: str) -> None:
    """Raises EngineError if another run publishes weights."""
    publishing = await redis_calls.until_answered(lambda: weights.publishing_run(redis))
    if publishing and publishing != run_id:
        raise EngineError(f"run {publishing} has taken the engines over")
