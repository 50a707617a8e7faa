"""An episode whose run loses the engines asks them for nothing more."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from pipeline import weights
from pipeline.errors import EngineError
from pipeline.tokenizer import put_tokenizer, read_bundle
from pipeline.weights import PolicyHolder
from tests.conftest import Serving
from tests.workers.agent.episode import claim, opening, user
from tests.workers.policy.engines import Wire, tapped
from workers.policy.requested import PoliciesOfTheirRun
from workers.policy.sglang import SglangPolicies, announced_tokenizers


@pytest.fixture
async def wire(serving: Serving) -> AsyncIterator[Wire]:
    await serving.name_weights("run-1@7")
    async with tapped(serving.router_url) as wire:
        yield wire


@pytest.mark.slow
async def test_no_turn_is_sampled_once_another_run_has_the_engines(
    serving: Serving, wire: Wire, redis: Redis
) -> None:
    mine = claim(tokenizer=await put_tokenizer(redis, read_bundle(serving.model_dir)))
    holder, other = PolicyHolder(mine.request.run_id), PolicyHolder("other")
    async with SglangPolicies(wire.url, announced_tokenizers(redis)) as engines:
        policy = await PoliciesOfTheirRun(engines, redis).open(mine)
        assert await policy.begin(opening("be brief", "count")) is not None
        assert await weights.acquire(redis, holder) is None
        assert await policy.answer(user("go on")) is not None
        await weights.release(redis, holder)
        assert await weights.acquire(redis, other) is None
        num_asked = len(wire.requests)
        with pytest.raises(EngineError, match="run other has taken the engines over"):
            await policy.answer(user("go on"))
    assert len(wire.requests) == num_asked
