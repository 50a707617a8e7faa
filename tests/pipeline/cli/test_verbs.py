"""The command line, run as a person or a script would run it."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import census, deadletters, keys, queue, stream
from pipeline.__main__ import main
from pipeline.cli import text
from pipeline.queue import Lease
from pipeline.request import Claim
from pipeline.trajectory import Failed, Observation
from tests.pipeline import samples

BROKEN = Failed(boundary="sandbox", message="container vanished", transient=True)
Line = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def run(pool: ArqRedis, redis_url: str, capsys: pytest.CaptureFixture[str]) -> Line:
    """A command line's exit status, output and error output.

    In a thread, for it has an event loop of its own.
    """

    async def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = await asyncio.to_thread(main, [*words, "--redis", redis_url])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


async def taken(pool: ArqRedis, **fields: Any) -> Claim:
    request = samples.request(**fields)
    await queue.enqueue(pool, request)
    claim = await queue.claim(pool, request.id, "host/1")
    assert isinstance(claim, Claim)
    return claim


async def answered(pool: ArqRedis, **fields: Any) -> str:
    claim = await taken(pool)
    assert await stream.publish(pool, samples.trajectory(claim, **fields)) == "published"
    return claim.request.id


async def buried(pool: ArqRedis, failed: Failed = BROKEN) -> str:
    claim = await taken(pool)
    evidence = [deadletters.attempt_failure(claim, failed, detail="Traceback: boom")]
    await deadletters.dead_letter(pool, samples.trajectory(claim, turns=(), outcome=failed, reward=None), evidence)
    return claim.request.id


async def trainer_lives(pool: ArqRedis) -> None:
    status = census.RunStatus(run_id=samples.RUN, phase="waiting", detail="2 of 8", step=3, num_steps=9)
    await census.beat_run(pool, status)


async def test_status_names_the_tasks_in_quarantine(pool: ArqRedis, run: Line) -> None:
    status = census.RunStatus(run_id=samples.RUN, phase="waiting", quarantined=("fleet:a", "fleet:b"))
    await census.beat_run(pool, status)
    _, out, _ = await run("status")
    assert "quarantine 2 tasks: fleet:a, fleet:b" in out


async def worker_lives(pool: ArqRedis, name: str = "host/1", **fields: str) -> None:
    now = time.time()
    status = census.WorkerStatus(
        name=name, slots=4, running=(), finished=7, failed=1, started_at=now, updated_at=now, **fields
    )
    await census.beat_worker(pool, status)


async def known_run(pool: ArqRedis) -> None:
    """A run that began and whose trainer is gone."""
    await trainer_lives(pool)
    await pool.delete(keys.run_status(samples.RUN))


async def test_status_of_a_fleet_at_work_is_well(pool: ArqRedis, run: Line) -> None:
    await trainer_lives(pool)
    await worker_lives(pool)
    claim = await taken(pool)
    lease = Lease(worker="host/1", attempt=1, claimed_at=time.time() - 90, phase="agent", turn=5)
    await queue.renew(pool, claim, lease)
    await queue.enqueue(pool, samples.request())
    await answered(pool)
    status, out, _ = await run("status")
    assert status == 0, out
    assert "step 3 of 9, waiting: 2 of 8" in out
    assert "1 queued, 1 claimed (oldest 90 s), 0 dead" in out
    assert "1 unread, 0 unacknowledged, 0.0 MB of bodies, 0.2 a minute" in out
    assert "1 worker, 1 of 4 slots busy" in out
    assert "turn 5 of 20" in out
    assert claim.request.id in out
    assert out.endswith("well\n")


async def test_status_names_each_reason_to_be_unwell(pool: ArqRedis, run: Line) -> None:
    await known_run(pool)
    await buried(pool)
    await queue.enqueue(pool, samples.request())
    status, out, _ = await run("status")
    reasons = [line.removeprefix("unwell: ") for line in out.splitlines() if line.startswith("unwell: ")]
    assert status == 1
    assert reasons == [
        "run laptop has 1 dead request: `dead` lists them",
        "run laptop has no trainer alive, but 2 open requests",
        "no worker is alive, but 1 request queued",
    ]
    assert "no trainer has reported for a while" in out


async def test_status_says_which_worker_fell_silent(pool: ArqRedis, run: Line) -> None:
    await trainer_lives(pool)
    await worker_lives(pool)
    await taken(pool)
    await pool.delete(keys.worker("host/1"))
    _, out, _ = await run("status")
    assert "host/1  silent for " in out
    assert "opening" in out, "what it holds is shown with it"


async def test_status_for_a_pipe_is_one_object(pool: ArqRedis, run: Line) -> None:
    await trainer_lives(pool)
    await buried(pool)
    status, out, _ = await run("status", "--json")
    (line,) = out.splitlines()
    found = json.loads(line)
    assert (status, found["well"], len(found["complaints"])) == (1, False, 1)
    assert found["fleet"]["runs"][0]["dead"] == 1


async def test_a_run_that_is_over_takes_one_line(pool: ArqRedis, run: Line) -> None:
    await known_run(pool)
    status, out, _ = await run("status")
    assert (status, out.splitlines()[0]) == (0, "1 earlier run with nothing open: laptop")


async def test_ls_tells_requests_apart_by_state(pool: ArqRedis, run: Line) -> None:
    await known_run(pool)
    waiting, held = samples.request(), await taken(pool)
    await queue.enqueue(pool, waiting)
    done, dead = await answered(pool), await buried(pool)
    expected = {
        "queued": [waiting.id],
        "claimed": [held.request.id],
        "answered": [dead, done],
        "dead": [dead],
    }
    for state, ids in expected.items():
        status, out, _ = await run("ls", "--state", state, "--json")
        rows = [json.loads(line) for line in out.splitlines()]
        assert (status, [row["request_id"] for row in rows]) == (0, ids)
        assert {row["state"] for row in rows} == {state}
    _, out, _ = await run("ls")
    assert [line.split()[1] for line in out.splitlines()] == [
        "dead",
        "claimed",
        "queued",
        "answered",
        "answered",
    ]
    assert "infrastructure, sandbox: container vanished" in out


async def test_ls_keeps_to_its_limit_and_its_run(pool: ArqRedis, run: Line) -> None:
    await known_run(pool)
    for _ in range(3):
        await queue.enqueue(pool, samples.request())
    _, out, _ = await run("ls", "--limit", "2")
    assert len(out.splitlines()) == 2
    status, _, err = await run("ls", "--run", "another")
    assert (status, err) == (2, "no run another; there is laptop\n")


async def test_show_prints_a_trajectory_to_read(pool: ArqRedis, run: Line) -> None:
    long = Observation(
        exit_code=1, output="\n".join(f"line {n}" for n in range(50)), dropped_chars=9, wall_s=2.0
    )
    turns = (
        samples.turn(),
        samples.turn(observation=long),
        samples.turn(command=None, text="hm", observation=None),
    )
    request_id = await answered(pool, turns=turns)
    status, out, _ = await run("show", request_id)
    assert status == 0
    for expected in (
        "demo:calc-7",
        "reward   1 (exit_code 0",
        "weights  v3 to v4",
        "turn 1  4 tokens in, 3 out, mean log-prob -0.583, v3[0:2] v4[2:3]",
        "  THOUGHT: look at the file\n  $ cat calc.py\n  def add(a, b):\n      return a\n  [exit 0, 0.1 s]",
        "32 lines more, with --full",
        "[exit 1, 2.0 s, 9 characters cut]",
        "no single command could be read",
        "+    return a + b",
    ):
        assert expected in out
    _, full, _ = await run("show", request_id, "--full")
    assert "line 25" in full
    assert "line 25" not in out


async def test_show_prints_a_turn_whose_command_is_empty(pool: ArqRedis, run: Line) -> None:
    request_id = await answered(pool, turns=(samples.turn(command="", text="Nothing to do."),))
    status, out, _ = await run("show", request_id)
    assert (status, "  Nothing to do." in out) == (0, True)


async def test_show_for_a_pipe_gives_token_ids_and_text(pool: ArqRedis, run: Line) -> None:
    _, out, _ = await run("show", await answered(pool), "--json")
    found = json.loads(out)["trajectory"]
    assert (found["turns"][0]["fed"], found["turns"][0]["sampled"]) == ([1, 2, 3, 4], [5, 6, 7])
    assert found["turns"][0]["logprobs"] == [-0.5, -0.25, -1.0]
    assert found["outcome"]["patch"].startswith("--- a/calc.py")


async def test_show_works_for_what_is_not_answered(pool: ArqRedis, run: Line) -> None:
    await known_run(pool)
    waiting, held, dead = samples.request(), await taken(pool), await buried(pool)
    await queue.enqueue(pool, waiting)
    assert "state    queued" in (await run("show", waiting.id))[1]
    assert "claimed by host/1, attempt 1: opening" in (await run("show", held.request.id))[1]
    _, out, _ = await run("show", dead)
    assert "state    dead" in out
    assert "container vanished (another try might help)" in out
    assert "Traceback: boom" in out
    status, _, err = await run("show", "never-asked")
    assert (status, "nothing is known of request never-asked" in err) == (2, True)


async def test_requeue_and_drop_say_what_they_did(pool: ArqRedis, run: Line) -> None:
    await known_run(pool)
    first, second, third = [await buried(pool) for _ in range(3)]
    status, out, _ = await run("requeue", first)
    assert (status, out) == (0, f"requeued: {first}  demo:calc-7  run laptop, 1 failed try\n")
    assert await pool.zscore(keys.QUEUE, first) is not None
    status, out, _ = await run("drop", second, "--json")
    assert json.loads(out) == {"request_id": second, "run_id": "laptop", "outcome": "dropped", "reason": ""}
    await pool.delete(keys.request(third))
    status, out, _ = await run("requeue", "--all-dead")
    assert status == 1
    assert out.startswith(f"left as it was: {third}")
    assert list(await deadletters.listed(pool, samples.RUN)) == [third]
    status, out, _ = await run("drop", "--all-dead")
    assert (status, out.split(":")[0]) == (0, "dropped")
    assert (await run("drop", "--all-dead"))[1] == "nothing is dead\n"
    status, _, err = await run("requeue", first)
    assert (status, "not among the dead" in err) == (2, True)


async def test_ls_filters(pool: ArqRedis, run: Line) -> None:
    await known_run(pool)
    other = replace(samples.TASK, id="demo:text-3")
    waiting, held = samples.request(task=other), await taken(pool, group_id="laptop-gx")
    await queue.enqueue(pool, waiting)
    done, dead = await answered(pool), await buried(pool)
    lease = Lease(worker="host/1", attempt=1, claimed_at=1.0, task_id="demo:calc-7", group_id="laptop-gx")
    await queue.renew(pool, held, lease)

    async def ids(*words: str) -> list[str]:
        _, out, _ = await run("ls", "--json", *words)
        return [json.loads(line)["request_id"] for line in out.splitlines()]

    assert await ids("--task", "demo:text-*") == [waiting.id]
    assert await ids("--group", "laptop-gx") == [held.request.id]
    assert dead in await ids("--group", "laptop-g*", "--state", "dead")
    assert await ids("--outcome", "submitted") == [done]
    assert await ids("--outcome", "failed:*", "--state", "dead") == [dead]
    assert await ids("--worker", "nobody") == []
    assert await ids("--older-than", "1d", "--state", "answered") == []
    assert await ids("--older-than", "30s", "--state", "queued") == [waiting.id], "asked for a minute ago"


async def test_dead_lists_by_class_what_requests_died_of(pool: ArqRedis, run: Line) -> None:
    await known_run(pool)
    hopeless = Failed(boundary="grader", message="tests do not apply", transient=False)
    outage, broken = await buried(pool), await buried(pool, hopeless)
    _, out, _ = await run("dead")
    assert [line.split()[:2] for line in out.splitlines()] == [
        [broken, "environment"],
        [outage, "infrastructure"],
    ]
    _, out, _ = await run("dead", "--class", "environment", "--json")
    (row,) = [json.loads(line) for line in out.splitlines()]
    assert (row["request_id"], row["class"], row["request"]["task"]["id"]) == (
        broken,
        "environment",
        samples.TASK.id,
    )
    assert (row["failures"][0]["worker"], row["failures"][0]["detail"]) == ("host/1", "Traceback: boom")
    _, out, _ = await run("dead", "--full", "--class", "infrastructure")
    assert "Traceback: boom" in out
    await run("requeue", "--class", "infrastructure")
    assert list(await deadletters.listed(pool, samples.RUN)) == [broken]
    status, _, err = await run("drop", broken, outage)
    assert (status, f"{outage} not among the dead" in err) == (2, True)
    assert list(await deadletters.listed(pool, samples.RUN)) == [broken], "all or nothing"


async def test_dead_speaks_of_those_that_nobody_can_read_too(pool: ArqRedis, run: Line) -> None:
    await known_run(pool)
    poison, broken = samples.request(), await buried(pool)
    await queue.enqueue(pool, poison)
    await pool.set(keys.request(poison.id), b"\xff rubbish")
    await queue.take(pool, "host/1", 1)
    status, out, _ = await run("dead", "--json")
    rows = {row["request_id"]: row for row in map(json.loads, out.splitlines())}
    assert (status, set(rows)) == (0, {poison.id, broken})
    assert rows[poison.id]["request"] is None
    assert rows[poison.id]["unreadable"]
    assert rows[poison.id]["class"] == "poison"


async def test_an_answer_whose_body_is_gone_is_answered_still(pool: ArqRedis, run: Line) -> None:
    await known_run(pool)
    request_id = await answered(pool)
    await pool.delete(keys.body(request_id))
    _, out, _ = await run("show", request_id, "--json")
    assert json.loads(out)["state"] == "answered"
    _, out, _ = await run("explain", request_id)
    assert "not yet read by the learner" in out


async def test_what_redis_lost_the_place_of_is_said_to_be_lost(pool: ArqRedis, run: Line) -> None:
    await known_run(pool)
    request = samples.request()
    await queue.enqueue(pool, request)
    await pool.zrem(keys.QUEUE, request.id)
    _, out, _ = await run("show", request.id, "--json")
    assert json.loads(out)["state"] == "lost"


async def test_nothing_is_known_of_what_was_dropped_but_its_life(pool: ArqRedis, run: Line) -> None:
    await known_run(pool)
    dead = await buried(pool)
    await run("drop", dead)
    assert (await run("show", dead))[0] == 2
    assert "withdrawn" in (await run("explain", dead))[1]


async def test_explain_tells_a_life_from_its_beginning(pool: ArqRedis, run: Line) -> None:
    await stream.open_reader(pool, samples.RUN)
    claim = await taken(pool)
    await queue.return_to_queue(pool, claim, failure=deadletters.attempt_failure(claim, BROKEN))
    _, out, _ = await run("explain", claim.request.id)
    assert out.endswith("not yet: it waits for try 2\n")
    again = await queue.claim(pool, claim.request.id, "host/2")
    assert isinstance(again, Claim)
    await stream.publish(pool, samples.trajectory(again))
    await stream.read_new(pool, samples.RUN)
    _, out, _ = await run("explain", claim.request.id)
    assert [line.split()[4] for line in out.splitlines()[1:-1]] == [
        *("enqueued", "claimed", "failed", "claimed", "published", "read")
    ]
    assert "sandbox: container vanished" in out
    assert "read by the learner" in out.splitlines()[-1]
    status, _, err = await run("explain", "never-asked")
    assert (status, "nothing is known" in err) == (2, True)


@pytest.mark.parametrize(
    ("fate", "verdict"),
    [
        ("trained", "trained in step 7, from weights v6"),
        ("zero_variance", "not trained: its whole group was worth the same, so there was nothing to learn"),
        ("not_finite", "not trained: the loss or gradient of its batch was not finite, so the batch was skipped"),
    ],
)
async def test_explain_asks_the_journal_what_became_of_it(
    pool: ArqRedis, run: Line, tmp_path: Path, fate: str, verdict: str
) -> None:
    request_id = await answered(pool)
    (tmp_path / "journal").mkdir()
    ids = [request_id] if fate == "trained" else []
    step = {"step": 7, "version": 6, "request_ids": ids, "at": time.time()}
    episode = {"request_id": request_id, "fate": fate, "at": time.time()}
    (tmp_path / "journal/steps.jsonl").write_text(json.dumps(step) + "\n")
    (tmp_path / "journal/episodes.jsonl").write_text("no JSON\n" + json.dumps(episode) + "\n")
    _, out, _ = await run("explain", request_id, "--run-dir", str(tmp_path), "--json")
    found = json.loads(out)
    assert (found["verdict"], found["moments"][-1]["what"]) == (verdict, fate)
    status, _, err = await run("explain", request_id, "--run-dir", str(tmp_path / "elsewhere"))
    assert (status, "holds no journal" in err) == (2, True)


async def test_an_engine_that_a_worker_does_without_is_named_with_the_reason(
    pool: ArqRedis, run: Line
) -> None:
    await worker_lives(pool, set_aside="docker at tcp://b:2376 is out: no route")
    _, out, _ = await run("status")
    assert "set aside: docker at tcp://b:2376 is out: no route" in out
    fleet = json.loads((await run("top", "--json"))[1])
    assert fleet["complaints"] == [
        "1 worker set something aside, the first because docker at tcp://b:2376 is out: no route"
    ]


async def test_top_draws_one_picture_into_a_pipe(pool: ArqRedis, run: Line) -> None:
    await trainer_lives(pool)
    await worker_lives(pool, paused="docker is out: no such socket")
    request_id = await answered(pool)
    status, out, _ = await run("top")
    assert status == 0
    assert "paused: docker is out: no such socket" in out
    assert request_id in out
    complaints = json.loads((await run("top", "--json"))[1])["complaints"]
    assert complaints == ["every worker is paused, the first because docker is out: no such socket"]


async def test_top_lives_on_a_terminal_until_q(pool: ArqRedis, redis_url: str) -> None:
    await trainer_lives(pool)
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "pipeline", "top", "--every", "60", "--redis", redis_url]
    child = await asyncio.create_subprocess_exec(*command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    drawn = b""
    while b"no answers yet" not in drawn:
        drawn += await asyncio.to_thread(os.read, ours, 65536)
    os.write(ours, b"q")
    assert await child.wait() == 0
    with suppress(OSError):
        drawn += os.read(ours, 65536)
    os.close(ours)
    assert b"step 3 of 9" in drawn
    assert drawn.endswith(b"\x1b[?1049l"), "the terminal is as it was"


async def test_tail_without_f_ends(pool: ArqRedis, run: Line) -> None:
    await known_run(pool)
    first, second = await answered(pool), await answered(pool)
    _, out, _ = await run("tail", "--json")
    assert [json.loads(line)["request_id"] for line in out.splitlines()] == [first, second]


async def test_tail_follows_arrivals_until_interrupted(pool: ArqRedis, redis_url: str) -> None:
    await known_run(pool)
    _, seen = await answered(pool), await answered(pool)
    command = [sys.executable, "-m", "pipeline", "tail", "-f", "-n", "1", "--json", "--redis", redis_url]
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    ids = [json.loads(await child.stdout.readline())["request_id"]]
    new = await answered(pool)
    ids.append(json.loads(await child.stdout.readline())["request_id"])
    child.send_signal(signal.SIGINT)
    rest, err = await child.communicate()
    assert (ids, child.returncode, rest, err) == ([seen, new], 0, b"", b"")


async def test_a_reader_that_goes_away_ends_tail_quietly(pool: ArqRedis, redis_url: str) -> None:
    await known_run(pool)
    await answered(pool)
    command = (
        f"{sys.executable} -m pipeline tail -f --redis '{redis_url}' | head -n 1; echo ${{PIPESTATUS[0]}}"
    )
    child = await asyncio.create_subprocess_exec(
        *("bash", "-c", command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    await child.stdout.readline()
    ending = asyncio.create_task(child.communicate())
    while not ending.done():  # `tail` notices at its first line after the reader is gone
        await answered(pool)
        await asyncio.wait({ending}, timeout=0.05)
    assert ending.result() == (b"0\n", b"")


@pytest.mark.parametrize(
    "words", [[], ["fly"], ["ls", "--limit", "0"], ["requeue"], ["requeue", "x", "--all-dead"]]
)
def test_a_command_line_that_makes_no_sense_is_misuse(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2


def test_a_redis_that_does_not_answer_is_said_without_its_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--redis", "redis://:secret@127.0.0.1:1/0", "status"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Redis at redis://:***@127.0.0.1:1/0 does not answer")
    assert main(["--redis", "http://elsewhere", "status"]) == 2


def test_what_a_policy_wrote_cannot_steer_the_terminal() -> None:
    assert text.visible("a\x1b]0;title\x07b\tc\n") == "a␛]0;title␇b\tc\n"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(3.2, "3 s"), (720, "12 min"), (3 * 3600, "3.0 h"), (9 * 86400, "9 d"), (-1, "0 s")],
)
def test_ages_read_at_a_glance(seconds: float, shown: str) -> None:
    assert text.age(seconds) == shown
