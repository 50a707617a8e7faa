"""Which experts an engine routed tokens to: asked for by the request, kept by the turn."""

import base64
from array import array

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from pipeline.errors import EngineError
from pipeline.message import unpack_int32s
from pipeline.request import Claim
from pipeline.tokenizer import put_tokenizer, read_bundle
from tests.conftest import Serving
from tests.workers.agent.episode import claim, opening, user
from tests.workers.policy.engines import Canned, generated, playing
from workers.policy.sglang import EngineSettings, SglangPolicies, announced_tokenizers

BRISK = EngineSettings(request_timeout_s=240.0, retry_budget_s=240.0, cut_wait_s=0.0)
END = 2


def asking(tokenizer: str) -> Claim:
    made = claim(tokenizer=tokenizer)
    return replace(made, request=replace(made.request, report_routing=True))


def routed(experts: list[int]) -> Canned:
    return Canned(
        generated([9, END], finish="stop", routed_experts=base64.b64encode(array("i", experts)).decode())
    )


async def test_each_turn_has_the_experts_of_what_it_added(redis: Redis, serving: Serving) -> None:
    tokenizer = await put_tokenizer(redis, read_bundle(serving.model_dir))
    async with (
        playing([routed([3, 1, 255]), routed([4, 5])]) as wire,
        SglangPolicies(wire.url, announced_tokenizers(redis), BRISK) as policies,
    ):
        conversation = await policies.open(asking(tokenizer))
        first = await conversation.begin(opening("s", "u"))
        second = await conversation.answer(user("on"))
    assert first is not None
    assert second is not None
    assert (first.routing, second.routing) == (bytes([3, 1, 255]), bytes([4, 5]))
    held = len(unpack_int32s(first.fed)) + 2
    assert [request["return_routed_experts"] for request in wire.requests] == [True, True]
    assert [request["routed_experts_start_len"] for request in wire.requests] == [0, held - 1]


@pytest.mark.parametrize("experts", [[256], [-1]])
async def test_experts_beyond_a_byte_are_an_engine_error(
    redis: Redis, serving: Serving, experts: list[int]
) -> None:
    tokenizer = await put_tokenizer(redis, read_bundle(serving.model_dir))
    async with (
        playing([routed(experts)]) as wire,
        SglangPolicies(wire.url, announced_tokenizers(redis), BRISK) as policies,
    ):
        conversation = await policies.open(asking(tokenizer))
        with pytest.raises(EngineError, match="0 to 255"):
            await conversation.begin(opening("s", "u"))


@pytest.mark.slow
async def test_an_engine_that_reports_no_experts_is_refused_with_the_fix(
    redis: Redis, serving: Serving
) -> None:
    await serving.name_weights("run-1@7")
    tokenizer = await put_tokenizer(redis, read_bundle(serving.model_dir))
    async with SglangPolicies(serving.router_url, announced_tokenizers(redis), BRISK) as policies:
        conversation = await policies.open(asking(tokenizer))
        with pytest.raises(
            EngineError, match=r"--enable-return-routed-experts.*learner\.routing_replay = false"
        ):
            await conversation.begin(opening("s", "u"))
