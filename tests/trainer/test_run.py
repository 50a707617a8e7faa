"""Whole runs of the trainer as a process, against a real Redis and a real learner; only the fleet is scripted."""

import json
import signal
from collections import Counter
from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import alternating, fleet
from pipeline import census, keys, queue, stream, telemetry
from pipeline.journal.reading import read
from pipeline.journal.rows import (
    DeliveryRow,
    EndRow,
    EpisodeRow,
    EvaluationRow,
    PublicationRow,
    StalenessRow,
    StartRow,
)
from pipeline.request import RolloutRequest
from pipeline.where.findings import where
from tests.trainer.processes import pending_requests, sets, start, steps
from tests.trainer.processes import recipe as recipe
from trainer.report.summary import summarize


# Quick: a whole run takes its steps and accounts for every request.
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

    wishes = ("evaluation.episodes=2", "evaluation.greedy_episodes=3", "audit.share=1.0")
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
    deliveries = list(read(run / "journal", DeliveryRow))
    assert [deliveries[0].version, deliveries[-1].version] == [0, 4]
    assert evaluations[1].at <= deliveries[1].at, "engines get no new weights while the old ones are judged"
    for row in rows:
        parts = (row.wait_s, row.forward_s, row.backward_s, row.optimizer_s, row.audit_s, row.export_s)
        beside = (row.engines_s, row.checkpoint_s, row.evaluation_s, row.other_s)
        assert row.wall_s == pytest.approx(sum(parts) + sum(beside), abs=1e-9)
        assert min(row.forward_s, row.backward_s, row.optimizer_s, row.audit_s, row.export_s) > 0
        assert row.other_s >= 0
    between_s = rows[-1].at - rows[0].at
    assert sum(row.wall_s for row in rows[1:]) == pytest.approx(between_s, rel=0.01, abs=0.05)


@pytest.mark.slow
async def test_the_trainers_time_is_accounted_for_from_the_start_of_a_run_to_its_end(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url, alternating):
        wishes = sets("evaluation.episodes=2", "num_steps=2")
        trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "timed", *wishes)
        assert await trainer.ended() == 0, trainer.output
    spent = where(run).trainer
    assert (sum(spent.parts_s.values()), spent.unknown) == (spent.wall_s, ())
    (begun,), (end,) = read(run / "journal", StartRow), read(run / "journal", EndRow)
    began_at = begun.at - sum(begun.seconds.values())
    assert spent.wall_s == pytest.approx(end.at - began_at, rel=0.01, abs=0.05)
    assert spent.parts_s["evaluation"] >= end.seconds["evaluation"] > 0
    assert spent.share("not in the journal") < 0.01


@pytest.mark.slow
async def test_a_run_that_accumulates_groups_as_they_come_in_accounts_for_every_request(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    wishes = ("batch.streaming=true", "num_steps=3", "admission.max_lag_versions=0")
    async with fleet(redis_url) as answered:
        trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "streams", *sets(*wishes))
        assert await trainer.ended() == 0, trainer.output
    assert [(row.step, row.num_groups, row.lag_max) for row in steps(run)] == [
        (1, 2, 0),
        (2, 2, 0),
        (3, 2, 0),
    ]
    episodes = list(read(run / "journal", EpisodeRow))
    assert Counter(row.request_id for row in episodes) == Counter(set(answered))
    report = summarize(run)
    assert (report.lost, report.trained_twice, report.open) == (0, 0, 0)


@pytest.mark.slow
async def test_a_run_with_controlled_staleness_runs_further_ahead_once_its_tokens_prove_useful(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    control = "control={least_versions=0, min_ess_share=0.01, max_masked_share=0.99, max_behaviour_kl=99}"
    wishes = (f"admission={{max_lag_versions=1, staleness='controlled', {control}}}", "num_steps=6")
    async with fleet(redis_url):
        trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "ahead", *sets(*wishes))
        assert await trainer.ended() == 0, trainer.output
    rows, (change,) = steps(run), read(run / "journal", StalenessRow)
    assert (change.before, change.ahead_versions) == (0, 1)
    assert [row.ahead_versions for row in rows] == [int(row.step > change.step) for row in rows]
    assert max(row.lag_max for row in rows if row.step <= change.step) == 0
    assert all(sum(one.num_tokens for one in row.by_lag) == row.num_trained_tokens for row in rows)
    assert f"admission may run 1 versions ahead, no longer 0: {change.reason}" in trainer.output
    assert summarize(run).staleness.changes == (change,)


@pytest.mark.slow
async def test_a_rollout_is_one_trace_from_its_request_to_the_step_that_trained_it(
    recipe: Path, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, file = recipe.parent / "run", recipe.parent / "spans.jsonl"
    monkeypatch.setenv("SWERVE_TRACE_FILE", str(file))
    async with fleet(redis_url):
        named = ("--run-dir", run, "--run-id", "traced")
        trainer = await start(redis_url, recipe, *named, *sets("num_steps=1"))
        assert await trainer.ended() == 0, trainer.output
    (step,) = steps(run)
    spans = [json.loads(line) for line in file.read_text().splitlines()]
    trained = {span["trace_id"]: span for span in spans if span["name"] == "trained"}
    of_step = telemetry.parts(telemetry.step("traced", 1))[0]
    expected = {telemetry.parts(telemetry.rollout(one))[0]: one for one in step.request_ids}
    assert set(trained) == set(expected), "each rollout that the step trained, and no other"
    assert all([link["trace_id"] for link in span["links"]] == [of_step] for span in trained.values())
    enqueued = {
        span["trace_id"]: span["attributes"]["swerve.request"] for span in spans if span["name"] == "enqueue"
    }
    assert expected.items() <= enqueued.items()
    assert len(enqueued) == len({row.request_id for row in read(run / "journal", EpisodeRow)})
    (linking,) = [span for span in spans if span["name"] == "step"]
    assert {link["trace_id"] for link in linking["links"]} == set(expected)


@pytest.mark.slow
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
async def test_dropped_groups_leave_a_full_backlog_without_a_step(
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


@pytest.mark.slow
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
        (["--set", "learner.lrr=1"], "learner.lrr is not a key of a recipe; did you mean learner.lr?"),
        (["--resume"], "--resume needs --run-dir"),
        (["--resume", "--run-dir", "absent"], "absent: there is no such directory"),
        (["--set", "tasks.train=absent.jsonl"], "tasks.train"),
        (["--set", "tasks.unverified=refuse"], "5 of the 5 tasks in"),
        (["--set", "tasks.unverified=refuse", "--dry-run"], "python -m workers.verify"),
        (["--set", "tasks.heldout=train.jsonl"], "tasks.heldout shares 5 tasks with tasks.train"),
        (["--set", "rollout.limits.context_tokens=9000", "--set", "learner.micro_batch_tokens=9000"], "8192"),
        (["--set", "evaluation.episodes=4"], "tasks.heldout holds 3 tasks"),
        (["--set", "alarms.webhook_env=SWERVE_NO_URL"], "environment variable SWERVE_NO_URL is not set"),
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
