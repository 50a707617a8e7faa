"""Whole runs of the trainer as a process, against a real Redis and a real learner; only the fleet is
scripted.
"""

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import alternating, fleet, task
from infra.redis_server import DURABLE, start_in, url_in
from pipeline import census, keys, queue, stream
from pipeline.request import RolloutRequest
from pipeline.taskfile import write_tasks
from trainer.records.journal import (
    EndRow,
    EpisodeRow,
    EvaluationRow,
    PublicationRow,
    QuarantineRow,
    SkippedRow,
    StepRow,
    read,
)
from trainer.records.summary import summarize
from trainer.rollouts.admission import FREE_FAILURES
from trainer.rollouts.dispatch import TaskOrder

RECIPE = """
name = "tiny"
model = "{model}"
num_steps = 4
seed = 3
[tasks]
train = "train.jsonl"
heldout = "heldout.jsonl"
unverified = "allow"  # nothing is graded here
[rollout]
group_size = 4
agent = "agent.yaml"
[rollout.sampling]
max_new_tokens = 16
[rollout.limits]
context_tokens = 128
[admission]
max_lag_versions = 1
sweep_every_s = 0.5
[batch]
groups_per_step = 2
[learner]
lr = 1e-3
dtype = "fp32"
micro_batch_tokens = 128
snapshots_kept = 3
[weights]
engines = "none"
[checkpoint]
every_steps = 2
"""


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "agent.yaml").write_text(Path("trainer/recipes/demo_agent.yaml").read_text())
    write_tasks(tmp_path / "train.jsonl", [task(f"t{i}") for i in range(5)])
    write_tasks(tmp_path / "heldout.jsonl", [task(f"h{i}") for i in range(3)])
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(model=tiny_model))
    return path


class Trainer:
    """`python -m trainer.run` as a child, with everything it prints."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def output(self) -> str:
        return self.log.read_text()

    async def ended(self) -> int:
        return await self.process.wait()

    async def reaches(self, happened: Callable[[], bool]) -> None:
        while not happened():
            assert self.process.returncode is None, self.output
            await asyncio.sleep(0.02)

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


async def start(redis_url: str, *arguments: str | Path, module: str = "trainer.run") -> Trainer:
    log = Path(str(arguments[0])).with_name(f"trainer-{os.urandom(3).hex()}.log")
    with log.open("w") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *map(str, arguments),
            env={**os.environ, "SWERVE_REDIS_URL": redis_url, "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=out,
        )
    return Trainer(process, log)


def steps(run: Path) -> list[StepRow]:
    return list(read(run / "journal", StepRow))


async def test_a_run_takes_its_steps_and_accounts_for_every_request(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"

    def verdict(request: RolloutRequest) -> float | None:
        if request.task.id == "t0":
            return 1.0  # never any signal
        if request.task.id == "t1" and request.member == 3:
            return None
        return alternating(request)

    wishes = ("evaluation.episodes=2", "evaluation.greedy_episodes=3")
    async with fleet(redis_url, verdict) as answered:
        trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "whole", *sets(*wishes))
        assert await trainer.ended() == 0, trainer.output
    rows = steps(run)
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert sum(row.groups_dropped_zero_variance for row in rows) >= 1
    assert all(row.num_gap_tokens == row.num_trained_tokens for row in rows)
    assert max(row.lag_max for row in rows) <= 1
    episodes = list(read(run / "journal", EpisodeRow))
    assert Counter(row.request_id for row in episodes) == Counter(set(answered))
    assert {"trained", "zero_variance", "failed", "evaluated"} == {row.fate for row in episodes}
    assert [row.version for row in read(run / "journal", PublicationRow)] == [0, 1, 2, 3, 4]
    assert len(list(read(run / "journal", EndRow))) == 1
    assert await queue.open_ids(redis, "whole") == []
    assert (await redis.xpending(keys.stream("whole"), stream.GROUP))["pending"] == 0
    report = summarize(run)
    assert (report.lost, report.trained_twice, report.open, report.trained_over_sampled) == (0, 0, 0, 1.0)
    assert (run / "curve.png").stat().st_size > 10_000
    evaluations = list(read(run / "journal", EvaluationRow))
    assert [(row.name, row.version, row.greedy, row.num_episodes) for row in evaluations] == [
        ("heldout_before", 0, False, 2),
        ("heldout_before", 0, True, 3),
        ("heldout_after", 4, False, 2),
        ("heldout_after", 4, True, 3),
    ]
    second = list(read(run / "journal", PublicationRow))[1]
    assert evaluations[1].at <= second.at, "no new weights while the old ones are judged"


async def test_a_rollout_is_one_trace_from_its_request_to_the_step_that_trained_it(
    recipe: Path, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, file = recipe.parent / "run", recipe.parent / "spans.jsonl"
    monkeypatch.setenv("SWERVE_TRACE_FILE", str(file))
    async with fleet(redis_url):
        trainer = await start(redis_url, recipe, "--run-dir", run, *sets("num_steps=1"))
        assert await trainer.ended() == 0, trainer.output
    spans = [json.loads(line) for line in file.read_text().splitlines()]
    asked = {s["attributes"]["swerve.request"]: s for s in spans if s["name"] == "enqueue"}
    trained = {s["attributes"]["swerve.request"]: s for s in spans if s["name"] == "train"}
    assert set(trained) == {request_id for row in steps(run) for request_id in row.request_ids}
    for request_id, one in trained.items():
        assert one["trace_id"] == asked[request_id]["trace_id"]
        assert one["parent_id"] == asked[request_id]["span_id"], "the scripted fleet has no span between"
    assert len({one["trace_id"] for one in asked.values()}) == len(asked)


@pytest.mark.slow
async def test_a_killed_trainer_resumes_without_losing_or_repeating_anything(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    async with fleet(redis_url):
        whole = await start(redis_url, recipe, "--run-dir", recipe.parent / "whole", "--run-id", "whole")
        assert await whole.ended() == 0, whole.output
        run = recipe.parent / "cut"
        cut = await start(redis_url, recipe, "--run-dir", run, "--run-id", "cut")
        await cut.reaches(lambda: len(steps(run)) == 3)
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
async def test_what_a_checkpoint_holds_is_acknowledged_on_resume_and_not_trained(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url):
        killed = await start(redis_url, recipe, "--run-dir", run, "--run-id", "unsure")
        await killed.reaches(lambda: len(steps(run)) == 3)
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


async def test_a_run_that_can_learn_nothing_more_ends_and_says_so(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url, lambda request: 1.0):
        trainer = await start(
            redis_url,
            recipe,
            "--run-dir",
            run,
            "--run-id",
            "flat",
            *sets("batch.max_groups_without_signal=6", "evaluation.after=false"),
        )
        assert await trainer.ended() == 1, trainer.output
    assert "flat: nothing to learn" in trainer.output
    assert (run / "curve.png").is_file(), trainer.output
    assert await queue.open_ids(redis, "flat") == []
    assert summarize(run).lost == 0
    said = await census.run_status(redis, "flat")
    assert said is not None
    assert said.groups_without_signal >= said.max_groups_without_signal == 6
    assert "nothing more to learn" in said.ended


@pytest.mark.slow
async def test_answers_that_come_to_nothing_leave_a_full_backlog_without_a_step(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    wishes = ("admission.max_queue_bytes=1", "evaluation.after=false")
    async with fleet(redis_url, lambda request: 1.0):
        trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "narrow", *sets(*wishes))
        await trainer.reaches(lambda: (run / "checkpoints/latest").is_file())
        trainer.process.send_signal(signal.SIGTERM)
        assert await trainer.ended() == 0, trainer.output
    assert steps(run) == [], "no step brought that checkpoint about"
    # Not of all: some may have come after that checkpoint.
    oldest = (await stream.newest_heads(redis, "narrow", 1000))[-1].head.request_id
    assert oldest not in await pending_requests(redis, "narrow")
    report = summarize(run)
    assert (report.lost, report.trained_twice) == (0, 0)


def is_two_faced(task_id: str) -> bool:
    """The first two tasks that the recipe's order plays."""
    order = TaskOrder([task(f"t{i}") for i in range(5)], seed=3)
    return task_id in (order[0].id, order[1].id)


def two_faced(request: RolloutRequest) -> bytes:
    """One patch for all rollouts of a task, whatever they are worth, or none."""
    return b"the same" if is_two_faced(request.task.id) else b""


@pytest.mark.slow
async def test_a_task_that_is_judged_two_ways_is_played_no_more_not_even_after_a_resume(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url, alternating, two_faced) as answered:
        cut = await start(redis_url, recipe, "--run-dir", run, "--run-id", "flaky", *sets("num_steps=6"))
        await cut.reaches(lambda: len(steps(run)) == 3)
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


async def test_a_run_whose_every_task_is_in_quarantine_ends_and_says_so(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url, alternating, lambda request: b"the same"):
        trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "mad")
        assert await trainer.ended() == 1, trainer.output
    assert "every training task is in quarantine" in trainer.output
    assert "mad: nothing to learn" in trainer.output
    assert summarize(run).lost == 0


@pytest.mark.slow
async def test_an_outage_is_met_with_patience_and_ends_where_a_resume_can_go_on(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url, lambda request: None):
        limit = sets("batch.max_failed_groups=5")
        trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "outage", *limit)
        assert await trainer.ended() == 1, trainer.output
    told = re.findall(
        r"(\d) groups in a row failed, the last at sandbox: the container vanished", trainer.output
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


async def test_a_dry_run_prints_the_plan_and_touches_nothing(recipe: Path) -> None:
    before = sorted(recipe.parent.iterdir())
    trainer = await start("redis://nowhere.invalid:1", recipe, "--dry-run")
    assert await trainer.ended() == 0, trainer.output
    assert "4 steps x 2 groups x 4 rollouts = 32 trained rollouts" in trainer.output
    assert "at most 4 groups (16 rollouts) open" in trainer.output
    assert 'pause = "retract"' in trainer.output, "defaults are spelled out"
    assert sorted(recipe.parent.iterdir()) == sorted([*before, trainer.log])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "learner.lrr=1"], "Object contains unknown field `lrr` - at `$.learner`"),
        (["--resume"], "--resume needs --run-dir"),
        (["--resume", "--run-dir", "absent"], "absent holds no run to resume"),
        (["--set", "tasks.train=absent.jsonl"], "tasks.train"),
        (["--set", "tasks.unverified=refuse"], "5 of the 5 tasks in"),
        (["--set", "tasks.unverified=refuse", "--dry-run"], "python -m workers.verify"),
        (["--set", "tasks.heldout=train.jsonl"], "tasks.heldout shares 5 tasks with tasks.train"),
        (["--set", "rollout.limits.context_tokens=9000", "--set", "learner.micro_batch_tokens=9000"], "8192"),
        (["--set", "evaluation.episodes=4"], "tasks.heldout holds 3 tasks"),
    ],
)
async def test_misuse_is_refused_before_anything_is_touched(
    recipe: Path, arguments: list[str], complaint: str
) -> None:
    run = recipe.parent / "run"
    where = [] if "--run-dir" in arguments or "--resume" in arguments else ["--run-dir", run]
    trainer = await start("redis://nowhere.invalid:1", recipe, *arguments, *where)
    assert await trainer.ended() == 2
    assert complaint in trainer.output
    assert "Traceback" not in trainer.output
    assert not run.exists()


def sets(*wishes: str) -> list[str]:
    return [word for wish in wishes for word in ("--set", wish)]


def trained_times(run: Path) -> set[int]:
    return set(Counter(request_id for row in steps(run) for request_id in row.request_ids).values())


async def pending_requests(redis: Redis, run_id: str) -> set[str]:
    """Request ids delivered to the trainer and not acknowledged."""
    rows = await redis.xpending_range(keys.stream(run_id), stream.GROUP, "-", "+", 1000)
    unacknowledged = {row["message_id"].decode() for row in rows}
    heads = await stream.newest_heads(redis, run_id, 1000)
    return {delivery.head.request_id for delivery in heads if delivery.entry_id in unacknowledged}


async def forget_acknowledgements(redis: Redis, run_id: str) -> None:
    """As if the trainer had died between checkpoint and acknowledgement."""
    for delivery in await stream.newest_heads(redis, run_id, 1000):
        entry = [delivery.entry_id]
        await redis.xclaim(
            keys.stream(run_id), stream.GROUP, stream.CONSUMER, 0, entry, force=True, justid=True
        )
        await redis.zadd(keys.open_requests(run_id), {delivery.head.request_id: delivery.head.enqueued_at})
