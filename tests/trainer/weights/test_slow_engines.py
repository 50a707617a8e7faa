"""Engines that fail, hang or are slow: nobody waits for them, and they come back."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.conftest import Serving
from tests.trainer.weights.run_of_weights import (
    CONTROL_S,
    FOREVER_S,
    FakeEngine,
    RunOfWeights,
    eventually_routed,
    fake_engine,
)
from trainer.weights import deliveries
from trainer.weights.engines import Engines

LATE_S = 0.5
"""An engine that takes so much longer than the fastest one is late."""


@pytest.fixture
async def engines(serving: Serving) -> AsyncIterator[Engines]:
    async with Engines(serving.router_url, control_s=CONTROL_S) as engines:
        yield engines
        for engine in await engines.routed():
            if engine.url != serving.engine_url:
                await engines.quarantine(engine)
        await eventually_routed(engines, {serving.engine_url})


@pytest.mark.slow
async def test_an_engine_that_hangs_delays_neither_the_others_nor_later_versions_and_comes_back(
    serving: Serving, redis: Redis, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "LATE_S", LATE_S)
    async with (
        fake_engine(engines) as fake,
        RunOfWeights(redis, engines, tmp_path, deadline_s=FOREVER_S) as run,
    ):
        fake.answers.clear()
        for version in (0, 1, 2):
            await run.serve_at_last(version)  # the other engine does
            assert run.reported[-1].engines == (serving.engine_url,)
            assert run.reported[-1].quarantined == (fake.url,)
        await eventually_routed(engines, {serving.engine_url})
        assert fake.asked == ["publishing@0"], "it still hangs in the first"
        fake.answers.set()
        await eventually_routed(engines, {serving.engine_url, fake.url})
        assert fake.asked == ["publishing@0", "publishing@2"], "the newest, not a queue of old ones"
        assert not fake.is_paused


async def test_a_version_is_served_once_the_last_engine_in_routing_has_it(
    serving: Serving, redis: Redis, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "LATE_S", FOREVER_S)
    async with fake_engine(engines) as slow, RunOfWeights(redis, engines, tmp_path) as run:
        assert await run.serve(0)
        slow.answers.clear()
        await run.publish(1)
        while (await engines.served(serving.engine_url)).weight_version != "publishing@1":
            await run.another_look()
        for _ in range(2):  # the second comes after the end of the fast engine's visit
            await run.another_look()
        assert [one.version for one in run.reported] == [0]
        slow.answers.set()
        assert await run.deliveries.settled(1)
        assert [one.version for one in run.reported] == [0, 1]


@pytest.mark.slow
async def test_an_engine_that_does_not_answer_within_its_deadline_is_tried_again(
    serving: Serving, redis: Redis, engines: Engines, tmp_path: Path
) -> None:
    async with fake_engine(engines) as fake, RunOfWeights(redis, engines, tmp_path, deadline_s=2.0) as run:
        fake.answers.clear()
        await run.serve_at_last(0)
        await fake.is_asked(3)
        fake.answers.set()
        await eventually_routed(engines, {serving.engine_url, fake.url})


@pytest.mark.slow
async def test_an_engine_that_fails_is_out_of_routing_until_it_takes_a_version(
    serving: Serving, redis: Redis, engines: Engines, tmp_path: Path
) -> None:
    async with fake_engine(engines) as fake, RunOfWeights(redis, engines, tmp_path) as run:
        fake.refuses = True
        assert await run.serve(0)
        assert (run.reported[0].engines, run.reported[0].quarantined) == ((serving.engine_url,), (fake.url,))
        await eventually_routed(engines, {serving.engine_url})
        fake.refuses = False
        await eventually_routed(engines, {serving.engine_url, fake.url})


@pytest.mark.slow
async def test_an_engine_that_died_is_out_of_routing(
    serving: Serving, redis: Redis, engines: Engines, tmp_path: Path
) -> None:
    async with RunOfWeights(redis, engines, tmp_path) as run:
        async with fake_engine(engines) as dying:
            assert await run.serve(0)
            assert run.reported[-1].engines == tuple(sorted((serving.engine_url, dying.url)))
        await eventually_routed(engines, {serving.engine_url})


@pytest.mark.slow
async def test_engines_load_weights_in_turns_and_one_that_hangs_gives_its_turn_up(
    serving: Serving, redis: Redis, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = FakeEngine(), FakeEngine()
    async with (
        fake_engine(engines, first),
        fake_engine(engines, second),
        RunOfWeights(redis, engines, tmp_path, deadline_s=FOREVER_S, at_once=1) as run,
    ):
        counts: list[int] = []
        for fake in (first, second):
            fake.when_paused = lambda: counts.append(first.is_paused + second.is_paused)
        assert await run.serve(0)
        assert len(run.reported[-1].engines) == 3
        assert counts == [1, 1]
        first.answers.clear()
        second.answers.clear()
        monkeypatch.setattr(deliveries, "LATE_S", LATE_S)
        for version in (1, 2):
            await run.serve_at_last(version)
            assert run.reported[-1].engines == (serving.engine_url,)
