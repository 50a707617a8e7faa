"""What `status` says of runs and workers, and when it calls them unwell."""

import json
import time

import pytest
from arq.connections import ArqRedis

from pipeline import census, keys, queue
from pipeline.queue import Lease
from tests.pipeline import samples
from tests.pipeline.cli.situations import (
    RunCommand,
    answered,
    arrived,
    dead_lettered,
    known_run,
    silent,
    taken,
    trainer_lives,
    worker_lives,
)


async def test_status_names_the_tasks_in_quarantine(pool: ArqRedis, run: RunCommand) -> None:
    status = census.RunStatus(run_id=samples.RUN, phase="waiting", quarantined=("fleet:a", "fleet:b"))
    await census.beat_run(pool, status)
    _, out, _ = await run("status")
    assert "quarantine 2 tasks: fleet:a, fleet:b" in out


async def test_status_says_that_a_restart_of_this_redis_would_lose_work_and_is_well_all_the_same(
    pool: ArqRedis, run: RunCommand
) -> None:
    await worker_lives(pool)
    status, out, _ = await run("status")
    assert "Redis keeps no append-only file: when it restarts" in out
    assert (status, out.rstrip().split("\n")[-1]) == (0, "well")
    await pool.config_set("appendonly", "yes")
    try:
        _, out, _ = await run("status")
    finally:
        await pool.config_set("appendonly", "no")
    assert "append-only" not in out


async def test_a_redis_that_knows_neither_a_run_nor_a_worker_is_not_well(
    pool: ArqRedis, run: RunCommand
) -> None:
    status, out, _ = await run("status")
    assert status == 3
    assert (
        out.rstrip()
        .split("\n")[-1]
        .startswith("this Redis knows neither a run nor a worker: start a run, or set ")
    )
    status, out, _ = await run("status", "--json")
    assert (status, json.loads(out)["well"]) == (3, False)
    await known_run(pool)
    assert (await run("status"))[0] == 0, "a run of the past is enough"


async def test_a_run_whose_alarm_has_begun_is_unwell_and_status_says_why(
    pool: ArqRedis, run: RunCommand
) -> None:
    alarm = "gap_grows since step 7: the gap is 0.2 nats"
    await census.beat_run(
        pool,
        census.RunStatus(run_id=samples.RUN, phase="waiting", alarms=(alarm,), updated_at=time.time()),
    )
    status, out, _ = await run("status")
    assert status == 1
    assert f"unwell: run {samples.RUN}, alarm {alarm}" in out


async def test_status_of_a_fleet_at_work_is_well(pool: ArqRedis, run: RunCommand) -> None:
    await trainer_lives(pool)
    await worker_lives(pool)
    claim = await taken(pool)
    lease = Lease(worker="host/1", attempt=1, claimed_at=time.time() - 600, phase="agent", turn=5)
    await queue.renew(pool, claim, lease)
    await queue.enqueue(pool, samples.request())
    await answered(pool)
    status, out, _ = await run("status")
    assert status == 0, out
    assert "step 3 of 9, waiting: 2 of 8" in out
    assert "1 queued, 1 claimed (oldest 10 min), 0 dead" in out
    assert "1 unread, 0 unacknowledged, 0.0 MB of bodies, 0.2 a minute" in out
    assert "1 worker, 1 of 4 slots busy" in out
    assert "turn 5 of 20" in out
    assert claim.request.id in out
    assert out.endswith("well\n")


async def test_status_names_each_reason_to_be_unwell(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    await dead_lettered(pool)
    await queue.enqueue(pool, samples.request())
    status, out, _ = await run("status")
    reasons = [line.removeprefix("unwell: ") for line in out.splitlines() if line.startswith("unwell: ")]
    assert status == 1
    assert reasons == [
        "run laptop has 1 dead request: `dead` lists them",
        "run laptop has no trainer alive, but 2 open requests",
        "no worker is alive, but 1 request queued",
    ]
    assert "trainer    no trainer has reported" in out


async def test_status_says_which_worker_fell_silent(pool: ArqRedis, run: RunCommand) -> None:
    await trainer_lives(pool)
    await worker_lives(pool)
    await taken(pool)
    await pool.delete(keys.worker("host/1"))
    _, out, _ = await run("status")
    assert "host/1  silent for " in out
    assert "opening" in out, "what it holds is shown with it"


async def test_status_for_a_pipe_is_one_object(pool: ArqRedis, run: RunCommand) -> None:
    await trainer_lives(pool)
    await dead_lettered(pool)
    status, out, _ = await run("status", "--json")
    (line,) = out.splitlines()
    found = json.loads(line)
    assert (status, found["well"], len(found["complaints"])) == (1, False, 1)
    assert found["fleet"]["runs"][0]["rollouts"]["dead"] == 1


async def test_a_run_that_ended_takes_one_line_that_says_how_and_when(
    pool: ArqRedis, run: RunCommand
) -> None:
    await known_run(pool)
    await trainer_lives(pool, run_id="older", ended="stopped by a signal at step 7 of 14")
    await silent(pool, "older", 3 * 3600)
    await trainer_lives(pool, run_id="newer", phase="evaluating", ended="finished all 14 steps")
    await silent(pool, "newer", 600)
    status, out, _ = await run("status")
    assert (status, out.splitlines()[:4]) == (
        0,
        [
            "3 earlier runs with nothing open",
            "  newer  ended 10 min ago: finished all 14 steps",
            "  older  ended 3.0 h ago: stopped by a signal at step 7 of 14",
            "  laptop  no trainer has reported",
        ],
    )
    assert "evaluating" not in out


async def test_a_trainer_that_was_killed_is_not_said_to_be_at_work(pool: ArqRedis, run: RunCommand) -> None:
    await trainer_lives(pool, phase="evaluating", detail="9 of 12", journal="/runs/laptop/journal")
    await silent(pool, samples.RUN, 600)
    claim = await taken(pool)
    status, out, _ = await run("status")
    assert status == 1
    assert (
        "the trainer stopped reporting 10 min ago at step 3 of 9, evaluating: 9 of 12; if it crashed, " in out
    )
    assert "`python -m trainer.run /runs/laptop/recipe.toml --run-dir /runs/laptop --resume`" in out
    assert "unwell: run laptop has no trainer alive, but 1 open request" in out
    await queue.withdraw(pool, samples.RUN, [claim.request.id])
    status, out, _ = await run("status")
    assert (status, out.splitlines()[0]) == (0, "1 earlier run with nothing open")


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ("exhausted:format_errors", "of its last 50 episodes ended 45 in format errors"),
        ("exhausted:context", "of its last 50 episodes ended 45 with a full context"),
        ("exhausted:turns", ""),
    ],
)
async def test_a_run_whose_episodes_nearly_all_end_before_they_begin_is_unwell(
    pool: ArqRedis, run: RunCommand, outcome: str, reason: str
) -> None:
    await trainer_lives(pool)
    await arrived(pool, 5, outcome="submitted")
    await arrived(pool, 44, outcome=outcome)
    assert (await run("status"))[0] == 0, "49 are too few to conclude anything"
    await arrived(pool, 1, outcome=outcome)
    status, out, _ = await run("status")
    assert (status, reason in out) == (1 if reason else 0, True)
    await arrived(pool, 1, outcome="submitted")
    assert (await run("status"))[0] == 0, "fewer than nine in ten"


async def test_a_run_without_a_signal_for_long_is_unwell(pool: ArqRedis, run: RunCommand) -> None:
    await trainer_lives(pool, groups_without_signal=49, max_groups_without_signal=200)
    assert (await run("status"))[0] == 0
    await trainer_lives(pool, groups_without_signal=50, max_groups_without_signal=200)
    status, out, _ = await run("status")
    assert status == 1
    assert "in 50 groups in a row all members had the same reward; at 200 it ends" in out
    await trainer_lives(
        pool, groups_without_signal=200, max_groups_without_signal=200, ended="ended at step 3 of 9"
    )
    assert (await run("status"))[0] == 0, "what has ended is not unwell"


async def test_an_engine_that_a_worker_does_without_is_named_with_the_reason(
    pool: ArqRedis, run: RunCommand
) -> None:
    await worker_lives(pool, set_aside="docker at tcp://b:2376 is out: no route")
    _, out, _ = await run("status")
    assert "set aside: docker at tcp://b:2376 is out: no route" in out
    fleet = json.loads((await run("top", "--json"))[1])
    assert fleet["complaints"] == [
        "1 worker set something aside, the first because docker at tcp://b:2376 is out: no route"
    ]
