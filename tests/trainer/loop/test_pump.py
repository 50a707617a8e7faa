"""Reading and asking beside everything else, in a Redis that has no room, and in one that has forgotten the run."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.scripted_fleet import played, work_off
from infra.redis_server import FORGETFUL, start_in, url_in
from pipeline import connection, queue, stream
from pipeline.journal.rows import AlarmRow, LagMetrics, SignalMetrics
from pipeline.request import Claim
from pipeline.trajectory import Exhausted
from tests.pipeline.judging import judge_all
from tests.trainer.rollouts.test_intake import side as side
from tests.trainer.trainer_side import TrainerSide
from trainer.loop.alarms import Notices
from trainer.loop.loop import Pump
from trainer.recipe import JudgeRecipe
from trainer.records.journal_writer import Journal


class Pumping:
    """A pump at work, with all of a run that it touches."""

    def __init__(self, side: TrainerSide) -> None:
        run = side.run
        self.said, self.state, self.budget = side.said, run.state, run.budget
        self.pump = Pump(run, side.recovery)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.state.changed.clear()
            await self.state.changed.wait()


async def test_a_full_redis_is_told_of_once_and_asked_when_it_has_room_again(side: TrainerSide) -> None:
    pumping = Pumping(side)
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
    pumping = Pumping(side)
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
    side = TrainerSide(side.pool, side.journal, staleness="controlled")
    await side.streams.recover()
    pumping = Pumping(side)
    run = asyncio.create_task(pumping.pump.run())
    try:
        await pumping.until(lambda: side.dispatcher.num_enqueued == 2 * 3)
        assert pumping.budget.groups() == 0, "a fixed limit would have let 5 groups in"
        assert "more than 1 versions late" in pumping.budget.sentence()
        assert "staleness is controlled: 1 versions ahead, of 1 to 4" in pumping.budget.sentence()
        shares = {"ess_share": 1.0, "masked_share": 0.0, "vetoed_share": 0.0, "behaviour_kl": 0.0}
        signal = SignalMetrics(total=9.0, num_tokens=99.0, **shares)
        seen = LagMetrics(lag=1, num_tokens=999, **shares, signal=signal)
        side.run.staleness.observe(1, (seen,))
        await pumping.until(lambda: side.dispatcher.num_enqueued == 3 * 3)
    finally:
        run.cancel()


async def test_groups_that_a_streaming_step_has_gathered_take_up_room_until_it_trains_them(
    side: TrainerSide,
) -> None:
    budget, state = side.run.budget, side.run.state
    assert budget.groups() == 5
    state.gathered_groups = 2
    assert budget.groups() == 3
    assert "3 more groups" in budget.sentence()
    state.gathered_groups, state.begun_steps = 0, 2
    assert budget.groups() == 3, "steps that have begun count in their place"


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "emptied"])
async def test_a_run_goes_on_with_a_redis_that_has_forgotten_it_and_takes_each_member_in_once(
    tmp_path: Path, is_killed: bool
) -> None:
    server = start_in(tmp_path, FORGETFUL)
    pool = await connection.connect(url_in(tmp_path))
    judge = JudgeRecipe(method="rule", name="tests_run", wait_s=1e9)
    journal = Journal(tmp_path / "journal")
    side = TrainerSide(pool, journal, tasks=("t0", "t1", "t2"), judge=judge)
    pumping = Pumping(side)
    pumping.state.publish(0)
    pumping.state.serve(0)
    await side.streams.open()
    run = asyncio.create_task(pumping.pump.run())

    async def until(holds: Callable[[], bool]) -> None:
        while not holds():
            assert not run.done(), run.exception()
            await asyncio.sleep(0.01)

    try:
        await until(lambda: side.dispatcher.num_enqueued == 5 * 3)
        await work_off(pool, limit=4)  # one group is whole, another has one of its members
        await until(lambda: side.intake.num_arrived == 4)
        if is_killed:
            server.process.kill()
            server.process.wait()
            server = start_in(tmp_path, FORGETFUL)
        else:
            await pool.flushall()
        await until(lambda: "it has forgotten this run; " in "".join(pumping.said))
        async with asyncio.timeout(240):
            while side.book.num_ready < 5 or side.book.num_unjudged:
                await work_off(pool)
                await judge_all(pool, 0.5)
                assert not run.done(), run.exception()
                await asyncio.sleep(0.01)
        assert side.intake.num_arrived == 5 * 3, "each member is taken in once"
        assert side.fates() == ["withdrawn"] * 11, "of the requests that were forgotten"
    finally:
        run.cancel()
        await pool.aclose()
        journal.close()
        server.process.kill()
        server.process.wait()


async def test_the_first_reply_that_holds_no_command_is_shown_once_its_kind_prevails(
    side: TrainerSide,
) -> None:
    notices = Notices(side.books, side.intake, side.run.alarms, say=side.said.append)
    side.intake.first_unusable = ("r-1", "I am\x1b]0;you\x07 the\nmodel " + 400 * "x")
    await notices.give()
    assert side.said == [], "one such reply is nothing to be told of"
    side.run.alarms.recall([AlarmRow(step=0, kind="format_errors_prevail", text="", is_over=False)])
    await notices.give()
    await notices.give()
    (line,) = side.said
    assert line.startswith('the first reply without a command, of r-1: "I am␛]0;you␇ the␊model xxx')
    assert line.endswith('xxx..."; docs/tasks.md says which models to begin with')


async def test_the_first_reply_without_a_command_is_found_in_the_trajectory(side: TrainerSide) -> None:
    await side.streams.open()
    await side.dispatcher.open_groups(1, version=0)
    for number in range(3):
        (claim,) = await queue.take(side.pool, "w", 1)
        assert isinstance(claim, Claim)
        made = played(claim, 0.0)
        replies = tuple(
            replace(turn, text=f"reply {number}.{place}") for place, turn in enumerate(made.turns)
        )
        outcome = Exhausted(limit="format_errors", patch=b"") if number else made.outcome
        await stream.publish(side.pool, replace(made, turns=replies, outcome=outcome))
    await side.streams.read(block_ms=10)
    assert side.intake.first_unusable is not None
    assert side.intake.first_unusable[1] == "reply 1.0"
