"""An episode that somebody watches: its worker shows the turns that have ended, and writes nothing where nobody watches."""

import asyncio

from arq.connections import ArqRedis

from pipeline import watching
from pipeline.request import Claim, EpisodeStatus
from pipeline.trajectory import Trajectory, Turn
from pipeline.watching import MAX_CHARS, MAX_TURNS, WatchedTurns
from tests.pipeline import samples
from tests.workers.claiming.worker import enqueued, published, until, worker


async def test_turns_of_a_watched_episode_are_shown_without_their_tokens_as_they_end(pool: ArqRedis) -> None:
    played: list[Turn] = [samples.turn(text=f"turn {number}") for number in range(3)]
    go_on = asyncio.Event()

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        for turn in played:
            status.turns.append(turn)
            await asyncio.sleep(0)
        await go_on.wait()
        return samples.trajectory(claim)

    async def shown() -> WatchedTurns | None:
        await watching.watch(pool, request_id)
        return await watching.shown(pool, request_id)

    request_id = await enqueued(pool)
    async with worker(pool, stage):
        await until(shown)
        found = await watching.shown(pool, request_id)
        assert found is not None
        assert [turn.text for turn in found.turns] == ["turn 0", "turn 1", "turn 2"]
        assert (found.attempt, found.first) == (1, 0)
        assert found.turns[0].actions == played[0].actions
        assert {turn.sampled for turn in found.turns} == {b""}
        go_on.set()
        await until(lambda: published(pool, request_id))


async def test_an_episode_that_nobody_watches_writes_nothing(pool: ArqRedis) -> None:
    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        status.turns.append(samples.turn())
        status.phase = "agent"
        await go_on.wait()
        return samples.trajectory(claim)

    go_on, request_id = asyncio.Event(), await enqueued(pool)
    async with worker(pool, stage):

        async def is_renewed() -> bool:
            lease = await pool.get(f"swerve:lease:{request_id}")
            return lease is not None and b"agent" in lease

        await until(is_renewed)
        assert await watching.shown(pool, request_id) is None
        go_on.set()
        await until(lambda: published(pool, request_id))


async def test_what_is_shown_of_a_long_episode_has_a_bound(pool: ArqRedis) -> None:
    turns = [samples.turn(text="x" * 3 * MAX_CHARS, actions=(samples.action("a", "y" * 3 * MAX_CHARS),))]
    await watching.show(pool, "long", 2, turns * (MAX_TURNS + 7))
    found = await watching.shown(pool, "long")
    assert found is not None
    assert (found.first, len(found.turns)) == (7, MAX_TURNS)
    observation = found.turns[0].actions[0].observation
    assert observation is not None
    assert len(found.turns[0].text) == len(observation.output) == MAX_CHARS
    assert observation.dropped_chars == 2 * MAX_CHARS
