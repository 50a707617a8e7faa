"""Requests of runs whose weights the engines do not serve: they are not played, and lose no try.

Requests outlive their trainer, and the next trainer may bring other weights to the same engines, or another model. What these would
sample for them is no sample of their run, and token ids that a smaller vocabulary lacks end an engine.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
import msgspec
from redis.asyncio import Redis

from pipeline import policy_lease, retry
from pipeline.chat import ChatMessage
from pipeline.errors import EngineError
from pipeline.request import Claim
from pipeline.trajectory import Turn
from pipeline.weights import parse_version_name
from workers.agent.loop import Policy
from workers.claim import Obstacle
from workers.policy.requested import Opener

INFO_TIMEOUT_S = 10.0

ServedRun = Callable[[], Awaitable[str | None]]
"""The run whose weights the engines serve; empty if no run has published them, None if the router does not tell. Raises EngineError if
no engine answers.
"""


class _ModelInfo(msgspec.Struct, frozen=True):
    """What is read of /get_model_info, which a router passes on to one of its engines."""

    weight_version: str | int


async def served_run(router_url: str) -> str | None:
    """By what an engine behind this router says of its weights. Raises EngineError if none says anything."""
    url, timeout = f"{router_url.rstrip('/')}/get_model_info", aiohttp.ClientTimeout(total=INFO_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            data = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineError(f"{url}: {type(error).__name__}: {error}") from error
    if response.status == HTTPStatus.NOT_FOUND:
        return None
    try:
        return parse_version_name(str(msgspec.json.decode(data, type=_ModelInfo).weight_version))[0]
    except msgspec.DecodeError as error:
        raise EngineError(f"{url}: HTTP {response.status}: {error}") from error
    except ValueError:
        return ""


def engines_of_other_runs(redis: Redis, served_run: ServedRun) -> Obstacle:
    """The obstacle to claims that the fleet's engines sample: another run than theirs publishes weights. While none does, as when a
    trainer starts again, what the engines serve decides.
    """

    async def obstacle(claim: Claim) -> str:
        request = claim.request
        if request.endpoint is not None:
            return ""
        publishing = await retry.until_answered(lambda: policy_lease.publishing_run(redis))
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
    """Conversations that end when another run takes the engines over in their middle."""

    engines: Opener
    redis: Redis

    async def open(self, claim: Claim) -> Policy:
        """Raises RequestError."""
        return _PolicyOfItsRun(await self.engines.open(claim), self.redis, claim.request.run_id)


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
        publishing = await retry.until_answered(lambda: policy_lease.publishing_run(self.redis))
        if publishing and publishing != self.run_id:
            raise EngineError(f"run {publishing} has taken the engines over")
