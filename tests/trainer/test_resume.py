"""Runs that are killed, stopped or cut off from Redis, as processes, and what their resume makes of it."""

import asyncio
import re
import signal
from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import alternating, fleet, task
from infra.redis_server import DURABLE, FORGETFUL, start_in, url_in
from pipeline import census, keys, queue
from pipeline.journal.reading import read
from pipeline.journal.rows import EndRow, EpisodeRow, QuarantineRow, SkippedRow
from pipeline.request import RolloutRequest
from pipeline.taskfile import write_tasks
from tests.trainer.processes import (
    forget_acknowledgements,
    pending_requests,
    sets,
    start,
    steps,
    trained_times,
)
from tests.trainer.processes import recipe as recipe
from trainer.report.summary import summarize
from trainer.rollouts.admission import FREE_FAILURES
from trainer.rollouts.curriculum import TaskOrder

PACE_S = 0.1
"""Between two answers of the fleet: a run of eight a step is killed in the middle, however fast its steps are."""


def has_checkpoint(run: Path) -> bool:
    return (run / "checkpoints" / "latest").is_file()


# Quick: a run that is killed and resumed trains each answer once and loses none.
async def test_a_killed_trainer_resumes_without_losing_or_repeating_anything(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    async with fleet(redis_url, pace_s=PACE_S):
        whole = await start(redis_url, recipe, "--run-dir", recipe.parent / "whole", "--run-id", "whole")
        assert await whole.ended() == 0, whole.output
        run = recipe.parent / "cut"
        cut = await start(redis_url, recipe, "--run-dir", run, "--run-id", "cut")
        await cut.reaches(lambda: len(steps(run)) >= 3 and has_checkpoint(run))
        first = {*steps(run)[0].request_ids}  # of the checkpoint, which is whole and about to be acknowledged
        while first & await pending_requests(redis, "cut"):  # noqa: ASYNC110 - another process acknowledges
            await asyncio.sleep(0.01)
        await cut.kill()
        kept, lost = steps(run)[:2], steps(run)[2]
        unacknowledged = await pending_requests(redis, "cut")
        assert set(lost.request_ids) <= unacknowledged, "no checkpoint holds their step"
        assert unacknowledged.isdisjoint(request_id for row in kept for request_id in row.request_ids)
        resumed = await start(redis_url, recipe, "--run-dir", run, "--resume")
        assert await resumed.ended() == 0, resumed.output
    assert "resumed from step-00000002" in resumed.output
    assert [row.loss for row in steps(run)] == [row.loss for row in steps(recipe.parent / "whole")]
    assert trained_times(run) == {1}
    assert await queue.open_ids(redis, "cut") == []
    report = summarize(run)
    assert (report.lost, report.trained_twice, report.open) == (0, 0, 0)


@pytest.mark.slow
async def test_a_killed_run_with_two_sources_resumes_with_the_groups_that_come_next(
    recipe: Path, redis_url: str
) -> None:
    divide(recipe)
    async with fleet(redis_url, alternating, pace_s=PACE_S):
        whole = await start(redis_url, recipe, "--run-dir", recipe.parent / "whole", "--run-id", "whole-of-two")
        assert await whole.ended() == 0, whole.output
        run = recipe.parent / "cut"
        cut = await start(redis_url, recipe, "--run-dir", run, "--run-id", "cut-of-two")
        await cut.reaches(lambda: len(steps(run)) >= 3 and has_checkpoint(run))
        await cut.kill()
        resumed = await start(redis_url, recipe, "--run-dir", run, "--resume")
        assert await resumed.ended() == 0, resumed.output
    assert [row.loss for row in steps(run)] == [row.loss for row in steps(recipe.parent / "whole")]
    summary = summarize(run)
    assert (summary.lost, summary.trained_twice, summary.open) == (0, 0, 0)
    rows = {row.cursor: row for row in read(run / "journal", EpisodeRow) if row.fate == "trained"}
    assert {(row.source, row.task_id[0], row.group_size) for row in rows.values()} == {
        ("lang", "t", 4),
        ("tools", "u", 2),
    }
    assert {name: one.share for name, one in summary.sources.items()} == {"lang": 2 / 3, "tools": 1 / 3}
    assert "sources: lang " in resumed.output


@pytest.mark.slow
async def test_a_killed_run_with_groups_of_several_sizes_resumes_without_losing_or_repeating_anything(
    recipe: Path, redis_url: str
) -> None:
    run = recipe.parent / "run"
    words = sets("curriculum.max_group_size=12", "curriculum.signal_share=0.8", "rollout.group_size=2")
    async with fleet(redis_url, lambda request: float(request.member == 0), pace_s=PACE_S):
        killed = await start(redis_url, recipe, *words, "--run-dir", run, "--run-id", "sized")
        await killed.reaches(lambda: len(steps(run)) >= 3 and has_checkpoint(run))
        await killed.kill()
        resumed = await start(redis_url, recipe, *words, "--run-dir", run, "--resume")
        assert await resumed.ended() == 0, resumed.output
    summary = summarize(run)
    assert (summary.steps, summary.lost, summary.trained_twice, summary.open) == (4, 0, 0, 0)
    members: dict[int, set[int]] = {}
    for row in read(run / "journal", EpisodeRow):
        if row.fate == "trained":
            members.setdefault(row.cursor, set()).add(row.group_size)
    assert all(len(sizes) == 1 for sizes in members.values())
    assert len({size for sizes in members.values() for size in sizes}) > 1


SOURCES = """
[[sources]]
name = "lang"
tasks = "train.jsonl"
share = 2
[[sources]]
name = "tools"
tasks = "tools.jsonl"
share = 1
group_size = 2
limits.turns = 3
"""


def divide(recipe: Path) -> None:
    """Gives the recipe two sources of tasks."""
    write_tasks(recipe.with_name("tools.jsonl"), [task(f"u{number}") for number in range(3)])
    recipe.write_text(recipe.read_text().replace('train = "train.jsonl"', "") + SOURCES)


@pytest.mark.slow
async def test_what_a_checkpoint_holds_is_acknowledged_on_resume_and_not_trained(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url, pace_s=PACE_S):
        killed = await start(redis_url, recipe, "--run-dir", run, "--run-id", "unsure")
        await killed.reaches(lambda: len(steps(run)) >= 3 and has_checkpoint(run))
        await killed.kill()
        await forget_acknowledgements(redis, "unsure")
        resumed = await start(redis_url, recipe, "--run-dir", run, "--resume")
        assert await resumed.ended() == 0, resumed.output
    assert [row.step for row in steps(run)] == [1, 2, 3, 4]
    assert trained_times(run) == {1}
    assert await queue.open_ids(redis, "unsure") == []
    assert await pending_requests(redis, "unsure") == set()


@pytest.mark.slow
async def test_a_signal_stops_in_good_order_and_a_resume_finishes(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url, lambda request: alternating(request) if request.cursor < 2 else 1.0):
        trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "calm")
        await trainer.reaches(lambda: len(steps(run)) == 1)
        trainer.process.send_signal(signal.SIGTERM)
        assert await trainer.ended() == 0, trainer.output
    assert "calm: stopped" in trainer.output
    assert (
        f"stopped by a signal at step 1 of 4; resume with `python -m trainer.run {run}/recipe.toml"
        in trainer.output
    )
    (end,) = read(run / "journal", EndRow)
    assert (end.reason, end.step) == ("stopped", 1)
    status = await census.run_status(redis, "calm")
    assert status is not None
    assert status.ended.startswith("stopped by a signal at step 1 of 4; resume with `python -m trainer.run ")
    assert (run / "checkpoints/latest").read_text() == "step-00000001"
    counted = (await census.run_census(redis, "calm")).num_open
    assert counted > 0
    assert summarize(run).open == counted, "report and status say the same of a stopped run"
    async with fleet(redis_url):
        resumed = await start(redis_url, recipe, "--run-dir", run, "--resume")
        assert await resumed.ended() == 0, resumed.output
    assert "resumed from step-00000001" in resumed.output
    assert [row.step for row in steps(run)] == [1, 2, 3, 4]
    assert trained_times(run) == {1}
    again = await start(redis_url, recipe, "--run-dir", run, "--resume")
    assert await again.ended() == 0, again.output
    assert "calm: finished" in again.output
    assert [row.reason for row in read(run / "journal", EndRow)] == ["finished"]
    status = await census.run_status(redis, "calm")
    assert status is not None
    assert status.ended == "finished all 4 steps"


@pytest.mark.slow
async def test_a_redis_that_goes_away_for_a_while_costs_no_trajectory(recipe: Path, tmp_path: Path) -> None:
    run, directory = recipe.parent / "run", tmp_path / "redis"
    directory.mkdir()
    server = start_in(directory, DURABLE)
    try:
        trainer = await start(
            url_in(directory), recipe, "--run-dir", run, "--run-id", "outage", *sets("num_steps=3")
        )
        async with fleet(
            url_in(directory), lambda request: alternating(request) if request.cursor < 2 else 1.0
        ):
            await trainer.reaches(lambda: len(steps(run)) == 1)
        server.process.kill()
        server.process.wait()
        await trainer.reaches(lambda: "Redis does not answer" in trainer.output)
        server = start_in(directory, DURABLE)
        async with fleet(url_in(directory)):
            assert await trainer.ended() == 0, trainer.output
    finally:
        server.process.kill()
        server.process.wait()
    assert "Redis answers again" in trainer.output
    assert [row.step for row in steps(run)] == [1, 2, 3]
    report = summarize(run)
    assert (report.lost, report.trained_twice, report.open) == (0, 0, 0)


def is_two_faced(task_id: str) -> bool:
    """The first two tasks that the recipe's order plays."""
    order = TaskOrder([f"t{i}" for i in range(5)], seed=3)
    return task_id in (order[0], order[1])


def two_faced(request: RolloutRequest) -> bytes:
    """One patch for all rollouts of a task, whatever they are worth, or none."""
    return b"the same" if is_two_faced(request.task.id) else b""


@pytest.mark.slow
async def test_a_task_that_is_judged_two_ways_is_played_no_more_not_even_after_a_resume(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url, alternating, two_faced, pace_s=PACE_S) as answered:
        cut = await start(redis_url, recipe, "--run-dir", run, "--run-id", "flaky", *sets("num_steps=6"))
        await cut.reaches(lambda: len(steps(run)) >= 3 and has_checkpoint(run))
        await cut.kill()
        resumed = await start(redis_url, recipe, "--run-dir", run, "--resume", *sets("num_steps=6"))
        assert await resumed.ended() == 0, resumed.output
    barred = {row.task_id: row.reason for row in read(run / "journal", QuarantineRow)}
    assert len(barred) == 2
    assert all(is_two_faced(task_id) for task_id in barred)
    assert "the same patch was worth 0 in" in next(iter(barred.values()))
    assert f"{min(barred)} is in quarantine and not played any more" in cut.output
    episodes = {row.request_id: row for row in read(run / "journal", EpisodeRow)}
    theirs = [row for row in episodes.values() if row.task_id in barred]
    assert {row.fate for row in theirs} <= {"quarantined", "withdrawn", "late"}
    assert {row.cursor for row in theirs} == {0, 1}, "asked for once, before anything was known"
    assert len({one for one in answered if episodes[one].task_id in barred}) <= 8
    assert {row.task_id for row in read(run / "journal", SkippedRow)} == set(barred)
    report = summarize(run)
    assert (report.lost, report.trained_twice, report.open) == (0, 0, 0)
    assert report.quarantined == barred
    assert await queue.open_ids(redis, "flaky") == []


@pytest.mark.slow
async def test_a_run_that_keeps_failing_gives_up_where_a_resume_can_go_on(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url, lambda request: None):
        limit = sets("batch.max_failed_groups=5")
        trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "outage", *limit)
        assert await trainer.ended() == 1, trainer.output
    told = re.findall(
        r"(\d+) groups in a row failed, the last at sandbox: the container vanished", trainer.output
    )
    assert int(told[-1]) >= 5, trainer.output
    assert "outage: failing" in trainer.output
    most_open = 2 * 2
    assert await redis.hlen(keys.dead("outage")) <= (FREE_FAILURES + most_open) * 4
    async with fleet(redis_url):
        resumed = await start(redis_url, recipe, "--run-dir", run, "--resume", *limit)
        assert await resumed.ended() == 0, resumed.output
    assert [row.step for row in steps(run)] == [1, 2, 3, 4]
    assert summarize(run).lost == 0


@pytest.mark.slow
async def test_a_redis_that_comes_back_empty_costs_no_step_and_nothing_is_trained_twice(
    recipe: Path, tmp_path: Path
) -> None:
    run, directory = recipe.parent / "run", tmp_path / "redis"
    directory.mkdir()
    server = start_in(directory, FORGETFUL)
    try:
        trainer = await start(
            url_in(directory), recipe, "--run-dir", run, "--run-id", "empty", *sets("num_steps=4")
        )
        async with fleet(
            url_in(directory), lambda request: alternating(request) if request.cursor < 2 else 1.0
        ):
            await trainer.reaches(lambda: len(steps(run)) == 1)
        server.process.kill()
        server.process.wait()
        server = start_in(directory, FORGETFUL)
        async with fleet(url_in(directory)):
            assert await trainer.ended() == 0, trainer.output
        async with Redis.from_url(url_in(directory)) as client:
            assert await queue.open_ids(client, "empty") == []
            assert await pending_requests(client, "empty") == set()
    finally:
        server.process.kill()
        server.process.wait()
    assert "Redis keeps no append-only file" in trainer.output
    assert "it has forgotten this run" in trainer.output
    assert [row.step for row in steps(run)] == [1, 2, 3, 4]
    assert trained_times(run) == {1}
    report = summarize(run)
    assert (report.lost, report.trained_twice, report.open) == (0, 0, 0)
