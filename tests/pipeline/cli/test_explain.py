"""What `explain` tells of one request."""

import json
import time
from pathlib import Path

import pytest
from arq.connections import ArqRedis

from pipeline import deadletters, keys, queue, stream
from pipeline.journal.rows import EpisodeRow, StepRow
from pipeline.request import Claim
from tests.pipeline import samples
from tests.pipeline.cli.situations import (
    BROKEN,
    RunCommand,
    answered,
    dead_lettered,
    known_run,
    taken,
)
from tests.pipeline.journal_rows import made, write


async def test_explain_tells_a_life_from_its_beginning(pool: ArqRedis, run: RunCommand) -> None:
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
    assert "read by the trainer" in out.splitlines()[-1]
    status, _, err = await run("explain", "never-asked")
    assert (status, "nothing is known" in err) == (2, True)


@pytest.mark.parametrize(
    ("fate", "verdict"),
    [
        ("trained", "trained in step 7, from weights v6"),
        (
            "zero_variance",
            "not trained: all members of its group had the same reward, so there was nothing to learn",
        ),
        (
            "overlong",
            "not trained: it ran into a limit that the recipe filters; its reward counts in the baseline of its group",
        ),
        (
            "not_finite",
            "not trained: the loss or gradient of its batch was not finite, so the batch was skipped",
        ),
    ],
)
async def test_explain_asks_the_journal_what_became_of_it(
    pool: ArqRedis, run: RunCommand, tmp_path: Path, fate: str, verdict: str
) -> None:
    request_id = await answered(pool)
    ids = [request_id] if fate == "trained" else []
    write(tmp_path, made(StepRow, step=7, version=6, request_ids=ids, at=time.time()))
    (tmp_path / "journal/episodes.jsonl").write_text(f"no JSON\n{request_id} and what a crash has torn\n")
    write(tmp_path, made(EpisodeRow, request_id=request_id, fate=fate, at=time.time()))
    _, out, _ = await run("explain", request_id, "--run-dir", str(tmp_path), "--json")
    found = json.loads(out)
    assert (found["verdict"], found["moments"][-1]["what"]) == (verdict, fate)
    (tmp_path / "elsewhere").mkdir()
    status, _, err = await run("explain", request_id, "--run-dir", str(tmp_path / "elsewhere"))
    assert (status, "holds no journal" in err) == (2, True)


async def test_an_answer_whose_body_is_gone_is_answered_still(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    request_id = await answered(pool)
    await pool.delete(keys.body(request_id))
    _, out, _ = await run("show", request_id, "--json")
    assert json.loads(out)["state"] == "answered"
    _, out, _ = await run("explain", request_id)
    assert "not yet read by the trainer" in out


async def test_nothing_is_known_of_what_was_dropped_but_its_life(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    dead = await dead_lettered(pool)
    await run("drop", dead)
    assert (await run("show", dead))[0] == 2
    assert "withdrawn" in (await run("explain", dead))[1]
