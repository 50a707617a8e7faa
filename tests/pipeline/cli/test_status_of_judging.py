"""What `status` says of judges and judge requests, and when it calls judging unwell."""

import json
import time
from typing import Any

import pytest
from arq.connections import ArqRedis

from pipeline import keys, queue, stream
from pipeline.kinds import JUDGE
from pipeline.queue import Lease
from tests.pipeline import samples
from tests.pipeline.cli.situations import RunCommand, answered, trainer_lives, worker_lives
from tests.pipeline.judging import dead_lettered, enqueued, taken, voted


async def test_a_run_that_is_not_judged_has_no_line_about_judging(pool: ArqRedis, run: RunCommand) -> None:
    await trainer_lives(pool)
    await answered(pool)
    _, out, _ = await run("status")
    assert "judg" not in out


async def test_judge_requests_and_judges_are_shown_apart_from_rollouts(
    pool: ArqRedis, run: RunCommand
) -> None:
    await trainer_lives(pool)
    await worker_lives(pool)
    await worker_lives(pool, "host/2", kind=JUDGE.name)
    await stream.publish(pool, voted(await taken(pool, "judge-1"), (1.0, None), None), kind=JUDGE)
    held = await taken(pool, "judge-2", worker="host/2")
    lease = Lease(worker="host/2", attempt=1, claimed_at=time.time() - 600, phase="judging", task_id="task-1")
    await queue.renew(pool, held, lease, JUDGE)
    await enqueued(pool, "judge-3")
    status, out, _ = await run("status")
    assert status == 0, out
    assert "requests   0 queued, 0 claimed, 0 dead" in out
    assert "judging    1 queued, 1 claimed (oldest 10 min), 0 dead" in out
    assert "judgements 1 unread, 0 unacknowledged" in out
    assert "scores     1 of 2 recent steps scored, 1 of 2 votes valid" in out
    workers, judges = out.split("\n\n")[1:3]
    assert workers.startswith("1 worker, 0 of 4 slots busy\n  host/1")
    assert judges.startswith("1 judge, 1 of 4 slots busy")
    assert "host/2  1 of 4 busy" in judges
    assert "judging" in judges.splitlines()[-1]
    assert "judge-2" in judges.splitlines()[-1]


async def test_status_names_each_reason_why_judging_is_unwell(pool: ArqRedis, run: RunCommand) -> None:
    await trainer_lives(pool)
    await dead_lettered(pool, "judge-1")
    await enqueued(pool, "judge-2", enqueued_at=time.time() - 3600)
    await pool.rpush(keys.malformed(samples.RUN, JUDGE), b"not a head")
    status, out, _ = await run("status", "--json")
    assert (status, json.loads(out)["complaints"]) == (
        1,
        [
            "run laptop has 1 dead judge request: `dead --kind judge` lists them",
            "run laptop has 1 judgement that could not be decoded",
            "run laptop is judged too slowly: the oldest of 1 judge request has waited 60 min, and groups may train "
            "without scores",
            "no judge is alive, but 1 judge request queued",
        ],
    )


@pytest.mark.parametrize(
    ("fields", "follows"),
    [
        ({"judge_wait_s": 60.0}, "and groups may train without scores"),
        ({"judge_wait_s": 60.0, "judge_required": True}, "and groups wait for their scores"),
        ({"judge_wait_s": 7200.0}, ""),
        ({}, ""),
    ],
)
async def test_judging_is_too_slow_once_a_request_has_waited_for_longer_than_groups_of_its_run_wait(
    pool: ArqRedis, run: RunCommand, fields: dict[str, Any], follows: str
) -> None:
    await trainer_lives(pool, **fields)
    await worker_lives(pool, "host/2", kind=JUDGE.name)
    await enqueued(pool, "judge-1", enqueued_at=time.time() - 300)
    status, out, _ = await run("status")
    assert (status, "judged too slowly" in out) == ((1, True) if follows else (0, False))
    assert follows in out


async def test_a_request_that_was_just_enqueued_is_not_late_where_groups_do_not_wait(
    pool: ArqRedis, run: RunCommand
) -> None:
    await trainer_lives(pool, judge_wait_s=0.0)
    await worker_lives(pool, "host/2", kind=JUDGE.name)
    await enqueued(pool, "judge-1", enqueued_at=time.time() - 2)
    assert (await run("status"))[0] == 0


async def test_judges_that_are_all_paused_are_unwell_although_workers_go_on(
    pool: ArqRedis, run: RunCommand
) -> None:
    await trainer_lives(pool)
    await worker_lives(pool)
    await worker_lives(pool, "host/2", kind=JUDGE.name, paused="the judge's engines are out: no reply")
    await enqueued(pool)
    status, out, _ = await run("status")
    assert status == 1
    assert "unwell: every judge is paused, the first because the judge's engines are out: no reply" in out
    assert "every worker" not in out


async def test_a_judge_that_fell_silent_is_named_with_what_it_holds(pool: ArqRedis, run: RunCommand) -> None:
    await trainer_lives(pool)
    await worker_lives(pool, "host/2", kind=JUDGE.name)
    await taken(pool, "judge-1", worker="host/2")
    await pool.delete(keys.worker("host/2"))
    _, out, _ = await run("status")
    told = out[out.index("not heard from") :]
    assert "host/2  silent for " in told
    assert "judge-1" in told


async def test_a_run_with_nothing_but_judge_requests_is_not_an_earlier_run(
    pool: ArqRedis, run: RunCommand
) -> None:
    await trainer_lives(pool, ended="stopped by a signal")
    await enqueued(pool)
    status, out, _ = await run("status")
    assert status == 1
    assert "judging    1 queued" in out
    assert "run laptop has no trainer alive, but 1 open request" in out


async def test_a_judge_without_engines_is_shown_and_is_well(pool: ArqRedis, run: RunCommand) -> None:
    await trainer_lives(pool)
    await worker_lives(pool, "host/2", kind=JUDGE.name, set_aside="no engines: only rules judge here")
    status, out, _ = await run("status")
    assert (status, "set aside: no engines: only rules judge here" in out) == (0, True)
