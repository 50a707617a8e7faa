"""Reading and asking beside everything else, in a Redis that has no room."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from benchmarks.scripted_fleet import work_off
from pipeline import queue
from tests.trainer.rollouts.test_intake import Side
from tests.trainer.rollouts.test_intake import side as side
from trainer.loop.budget import Room
from trainer.loop.parts import Parts
from trainer.loop.pump import Pump
from trainer.loop.state import Standing
from trainer.recipe import AdmissionRecipe, Recipe
from trainer.rollouts.admission import Admission
from trainer.rollouts.ledger import LedgerState


class Pumping:
    """A pump at work, with all of a run that it touches."""

    def __init__(self, side: Side, bounds: AdmissionRecipe) -> None:
        self.side = side
        self.said: list[str] = []
        rollout = SimpleNamespace(group_size=3, queue_s=None)
        recipe = cast(Recipe, SimpleNamespace(admission=bounds, rollout=rollout, group_deadline_s=1e9))
        parts = SimpleNamespace(
            redis=side.pool,
            admission=Admission(max_lag_versions=4, groups_per_step=1, num_steps=9),
            book=side.book,
            ledger=side.ledger,
            quarantine=side.quarantine,
            intake=side.intake,
            dispatcher=side.dispatcher,
            heldout=SimpleNamespace(outstanding=[]),
            progress=SimpleNamespace(say=self.said.append),
        )
        self.standing = Standing.at(LedgerState(), [])
        self.room = Room(recipe, cast(Parts, parts), self.standing)
        self.pump = Pump(recipe, "run", cast(Parts, parts), self.standing, self.room)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.standing.changed.clear()
            await self.standing.changed.wait()


async def test_a_full_redis_is_told_of_once_and_asked_when_it_has_room_again(side: Side) -> None:
    pumping = Pumping(side, AdmissionRecipe())
    await side.pool.config_set("maxmemory", 1)
    run = asyncio.create_task(pumping.pump.run())
    try:
        await pumping.until(lambda: pumping.room.is_refused)
        assert pumping.room.needs_checkpoint, "which lets Redis forget what it holds"
        await side.pool.config_set("maxmemory", 0)
        await pumping.until(lambda: not pumping.room.is_refused)
        await pumping.until(lambda: side.dispatcher.num_enqueued == 5 * 3)
    finally:
        await side.pool.config_set("maxmemory", 0)
        run.cancel()
    assert [line.split(" (")[0] for line in pumping.said] == ["Redis is full", "Redis has room again"]
    assert len(await queue.open_ids(side.pool, "run")) == 5 * 3


async def test_answers_may_take_half_of_a_redis_with_a_bound(side: Side) -> None:
    pumping = Pumping(side, AdmissionRecipe())
    await side.dispatcher.open_groups(1, version=0)
    await work_off(side.pool)
    run = asyncio.create_task(pumping.pump.run())
    try:
        await pumping.until(lambda: side.intake.num_arrived == 3)
        await pumping.until(lambda: pumping.room.queue_bytes > 0)
        assert not pumping.room.needs_checkpoint
        pumping.room.redis_bytes = 2 * pumping.room.queue_bytes
        assert pumping.room.needs_checkpoint
        assert "of answers wait in Redis" in pumping.room.sentence()
    finally:
        run.cancel()
