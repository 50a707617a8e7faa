"""A judge whose engines are out claims nothing, spends no try, and goes on by itself when they are back."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from arq.connections import ArqRedis

from pipeline import deadletters, keys, queue, request_store, stream
from pipeline.judge import Judge, JudgeRequest
from pipeline.kinds import JUDGE
from pipeline.tokenizer import put_tokenizer, read_bundle
from tests.workers.judge.rollouts import judging_enqueued, published
from tests.workers.judge.servers import serving_judge
from workers.breaker import Breaker
from workers.judge.__main__ import judge_claimer
from workers.judge.engines import JudgeEngines, http_session
from workers.judge.prompts import JudgeTokenizers
from workers.judge.votes import EngineVoters, VoteJudge
from workers.policy.requested import NoEngines
from workers.policy.sglang import announced_tokenizers
from workers.process import Taker

PATIENCE_S = 240.0


async def until(holds: Callable[[], Awaitable[object]]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not await holds():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def taking(claimer: Any) -> AsyncIterator[None]:
    """A judge without the process."""
    taker = Taker(claimer, slots=4)
    tasks = [asyncio.create_task(taker.async_run()), asyncio.create_task(claimer.breakers.watch())]
    try:
        yield
    finally:
        taker.stop()
        await tasks[0]
        await taker.drain(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def asked(pool: ArqRedis, model: Path, number: int) -> list[JudgeRequest]:
    bundle = read_bundle(model)
    judge = Judge(method="votes", tokenizer=await put_tokenizer(pool, bundle), num_votes=1)
    rollouts = [await published(pool) for _ in range(number)]
    return [await judging_enqueued(pool, made.claim.request.id, judge) for made in rollouts]


async def test_engines_that_go_out_cost_no_request_a_try(
    pool: ArqRedis, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.judge.engines.RETRY_BUDGET_S", 0.0)

    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        if not server.ready:
            return 503, {"error": "out"}
        return 200, {"text": "\\boxed{+1}", "meta_info": {}}

    async with serving_judge(reply) as server, http_session() as session:
        engines = JudgeEngines(session, server.url)
        gates = {"engine": Breaker("engine", engines.check)}
        claimer = judge_claimer(
            pool,
            "host/1",
            {
                "votes": VoteJudge(
                    EngineVoters(engines, JudgeTokenizers(announced_tokenizers(pool))), asyncio.Semaphore(8)
                )
            },
            gates,
        )
        server.ready = False
        requests = await asked(pool, tiny_model, 3)

        async def paused() -> bool:
            return "engine is out" in claimer.breakers.paused and not claimer.running

        async def all_judged() -> bool:
            marks = [keys.published(request.id, JUDGE) for request in requests]
            return await pool.exists(*marks) == len(marks)

        async with taking(claimer):
            await until(paused)
            assert not await all_judged()
            server.ready = True
            await until(all_judged)
    for request in requests:
        assert await deadletters.failures(pool, request.id, JUDGE) == ()
        found = await stream.read_body(pool, request.id, JUDGE)
        assert found is not None
        assert found.scores == {0: 1.0, 2: 1.0, 3: 1.0}


async def test_a_judge_without_engines_returns_what_needs_them_uncounted(
    pool: ArqRedis, tiny_model: Path
) -> None:
    absent = NoEngines("SWERVE_JUDGE_ROUTER_URL")
    claimer = judge_claimer(
        pool, "host/1", {"votes": VoteJudge(absent, asyncio.Semaphore(8))}, {"engine": absent}
    )
    (request,) = await asked(pool, tiny_model, 1)

    async def returned() -> bool:
        return "returned" in [event.what for event in await request_store.events(pool, request.id, JUDGE)]

    async with taking(claimer):
        await until(returned)
    assert await deadletters.failures(pool, request.id, JUDGE) == ()
    assert await queue.open_ids(pool, request.run_id, JUDGE) == [request.id]
