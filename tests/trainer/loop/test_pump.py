"""Reading and asking beside everything else, in a Redis that has no room."""

import asyncio
from collections.abc import Callable

from benchmarks.scripted_fleet import work_off
from pipeline import queue
from tests.trainer.rollouts.test_intake import side as side
from tests.trainer.trainer_side import TrainerSide
from trainer.learner.config import LagMetrics
from trainer.loop.budget import AdmissionBudget
from trainer.loop.notices import Notices
from trainer.loop.pump import Pump
from trainer.loop.state import RunState
from trainer.recipe import AdmissionRecipe
from trainer.rollouts.admission import Admission
from trainer.rollouts.deadlines import Deadlines
from trainer.rollouts.ledger import LedgerState
from trainer.rollouts.staleness import StalenessController, bounds_of


class Pumping:
    """A pump at work, with all of a run that it touches."""

    def __init__(self, side: TrainerSide, bounds: AdmissionRecipe) -> None:
        self.side = side
        self.said: list[str] = []
        self.state = RunState.resumed(LedgerState(), [])
        self.staleness = StalenessController(bounds_of(bounds))
        self.budget = AdmissionBudget(
            side.pool,
            "run",
            Admission(max_lag_versions=4, groups_per_step=1, num_steps=9),
            self.staleness,
            side.book,
            side.ledger,
            self.state,
            bounds=bounds,
            group_size=3,
        )
        self.pump = Pump(
            self.state,
            self.budget,
            streams=side.streams,
            deadlines=Deadlines(side.pool, side.book, side.closer, deadline_s=1e9, queue_s=None),
            requests=side.requests,
            judging=side.judging,
            recovery=side.recovery,
            notices=Notices(
                side.pool,
                "run",
                side.ledger,
                side.quarantine,
                last_failed=lambda: side.intake.last_failed,
                say=self.said.append,
            ),
            sweep_every_s=1e9,
            say=self.said.append,
        )

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.state.changed.clear()
            await self.state.changed.wait()


async def test_a_full_redis_is_told_of_once_and_asked_when_it_has_room_again(side: TrainerSide) -> None:
    pumping = Pumping(side, AdmissionRecipe())
    await side.pool.config_set("maxmemory", 1)
    run = asyncio.create_task(pumping.pump.run())
    try:
        await pumping.until(lambda: pumping.budget.is_refused)
        assert pumping.budget.needs_checkpoint, "which lets Redis forget what it holds"
        await side.pool.config_set("maxmemory", 0)
        await pumping.until(lambda: not pumping.budget.is_refused)
        await pumping.until(lambda: side.dispatcher.num_enqueued == 5 * 3)
    finally:
        await side.pool.config_set("maxmemory", 0)
        run.cancel()
    assert [line.split(" (")[0] for line in pumping.said] == ["Redis is full", "Redis has room again"]
    assert len(await queue.open_ids(side.pool, "run")) == 5 * 3


async def test_answers_may_take_half_of_a_redis_with_a_bound(side: TrainerSide) -> None:
    pumping = Pumping(side, AdmissionRecipe())
    await side.dispatcher.open_groups(1, version=0)
    await work_off(side.pool)
    run = asyncio.create_task(pumping.pump.run())
    try:
        await pumping.until(lambda: side.intake.num_arrived == 3)
        await pumping.until(lambda: pumping.budget.queue_bytes > 0)
        assert not pumping.budget.needs_checkpoint
        pumping.budget.redis_bytes = 2 * pumping.budget.queue_bytes
        assert pumping.budget.needs_checkpoint
        assert "of trajectories wait in Redis" in pumping.budget.sentence()
    finally:
        run.cancel()


async def test_admission_runs_as_far_ahead_as_the_controller_of_staleness_lets_it(side: TrainerSide) -> None:
    pumping = Pumping(side, AdmissionRecipe(staleness="controlled"))
    run = asyncio.create_task(pumping.pump.run())
    try:
        await pumping.until(lambda: side.dispatcher.num_enqueued == 2 * 3)
        assert pumping.budget.groups() == 0, "a fixed limit would have let 5 groups in"
        assert "more than 1 versions late" in pumping.budget.sentence()
        assert "staleness is controlled: 1 versions ahead, of 1 to 4" in pumping.budget.sentence()
        seen = LagMetrics(
            lag=1, num_tokens=999, ess_share=1.0, masked_share=0.0, vetoed_share=0.0, behaviour_kl=0.0
        )
        pumping.staleness.observe(1, (seen,))
        await pumping.until(lambda: side.dispatcher.num_enqueued == 3 * 3)
    finally:
        run.cancel()
