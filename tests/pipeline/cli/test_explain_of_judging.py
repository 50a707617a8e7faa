"""What `explain` tells of judging: as part of a rollout's story, and of a judge request by itself."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from arq.connections import ArqRedis

from pipeline import deadletters, queue, stream
from pipeline.journal.rows import EpisodeRow, JudgedTurn, JudgementRow, StepRow
from pipeline.judge import judge_request_id
from pipeline.kinds import JUDGE
from pipeline.trajectory import Failed
from tests.pipeline import samples
from tests.pipeline.cli.situations import RunCommand, answered, known_run
from tests.pipeline.journal_rows import made, write
from tests.pipeline.judging import dead_lettered, enqueued, taken, voted
from trainer.records.journal_writer import Journal

BROKEN = Failed(boundary="engine", message="no reply", transient=True)


def _words(out: str) -> list[str]:
    """What happened, by line; an event of judging is two words."""
    return [" ".join(line[33:].split("  ")[0].split()) for line in out.splitlines() if line.startswith("  ")]


async def test_judging_is_part_of_the_story_of_a_rollout(pool: ArqRedis, run: RunCommand) -> None:
    rollout_id = await answered(pool)
    judge_id = judge_request_id(rollout_id)
    claim = await taken(pool, judge_id, worker="host/7", rollout_id=rollout_id)
    await queue.return_to_queue(pool, claim, failure=deadletters.attempt_failure(claim, BROKEN), kind=JUDGE)
    _, out, _ = await run("explain", rollout_id)
    assert out.splitlines()[-1] == "judging: not yet: it waits for try 2"
    again = await queue.claim(pool, judge_id, "host/8", JUDGE)
    assert not isinstance(again, str)
    await stream.open_reader(pool, samples.RUN, JUDGE)
    await stream.publish(pool, voted(again, (1.0,)), kind=JUDGE)
    await stream.read_new(pool, samples.RUN, kind=JUDGE)
    _, out, _ = await run("explain", rollout_id)
    assert _words(out) == [
        *("enqueued", "claimed", "published"),
        *(
            "judge enqueued",
            "judge claimed",
            "judge failed",
            "judge claimed",
            "judge published",
            "judge read",
        ),
    ]
    assert "engine: no reply" in out
    verdict, judging = out.splitlines()[-2:]
    assert verdict.startswith("answered, not yet read by the trainer")
    assert judging.startswith("judging: answered, read by the trainer")


async def test_a_judge_request_has_a_story_of_its_own(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    rollout_id = await answered(pool)
    judge_id = judge_request_id(rollout_id)
    await enqueued(pool, judge_id, rollout_id=rollout_id)
    _, out, _ = await run("explain", judge_id)
    assert (_words(out), out.splitlines()[-1]) == (["enqueued"], "not yet: it waits for a judge")
    await queue.withdraw(pool, samples.RUN, [judge_id], JUDGE)
    _, out, _ = await run("explain", judge_id)
    assert out.splitlines()[-1] == "not judged: the request was withdrawn"
    dead = await dead_lettered(pool, judge_request_id("another"))
    _, out, _ = await run("explain", dead)
    assert out.splitlines()[-1] == "not judged: dead-lettered, infrastructure: no reply"
    status, _, err = await run("explain", judge_request_id("never-asked"))
    assert (status, "nothing is known" in err) == (2, True)


async def test_a_rollout_that_was_never_to_be_judged_has_no_line_about_it(
    pool: ArqRedis, run: RunCommand
) -> None:
    _, out, _ = await run("explain", await answered(pool))
    assert "judg" not in out


def _settled(run_dir: Path, rollout_id: str, **fields: Any) -> None:
    """The trainer's journal, as the trainer writes it."""
    run_dir.joinpath("journal").mkdir()
    given: dict[str, Any] = {
        **{"rollout_id": rollout_id, "group_id": "g", "task_id": "t", "cursor": 0, "at": time.time() + 60},
        **{
            "fate": "joined",
            "turns": (JudgedTurn(0, 1.0, (1.0,)), JudgedTurn(1, None, (None,), "no_valid_vote")),
        },
        "waited_s": 12.0,
    }
    journal = Journal(run_dir / "journal")
    journal.append(JudgementRow(**(given | fields)))
    journal.close()
    write(run_dir, made(EpisodeRow, request_id=rollout_id, fate="trained", at=time.time()))
    write(run_dir, made(StepRow, step=7, version=6, request_ids=[rollout_id], at=time.time() + 90))


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, "joined its rollout before a step took the group; 1 of 2 turns scored, mean +1.00, waited 12 s"),
        (
            {"fate": "late"},
            "not used: a step took its group without it; 1 of 2 turns scored, mean +1.00, waited 12 s",
        ),
        (
            {"fate": "failed", "turns": (), "error": "engine: no reply"},
            "not used: the judge failed for good, so its rollout has no scores or log-probs; engine: no reply, waited 12 s",
        ),
        (
            {"fate": "unneeded", "turns": ()},
            "not used: its group was not trained, or the run ended first; waited 12 s",
        ),
    ],
)
async def test_the_journal_says_whether_the_judgement_was_used(
    pool: ArqRedis, run: RunCommand, tmp_path: Path, fields: dict[str, Any], verdict: str
) -> None:
    rollout_id = await answered(pool)
    _settled(tmp_path, rollout_id, **fields)
    _, out, _ = await run("explain", rollout_id, "--run-dir", str(tmp_path))
    assert _words(out)[-2:] == [f"judge {fields.get('fate', 'joined')}", "trained"]
    assert out.splitlines()[-2:] == ["trained in step 7, from weights v6", f"judging: {verdict}"]
    _, out, _ = await run("explain", judge_request_id(rollout_id), "--run-dir", str(tmp_path), "--json")
    assert json.loads(out)["verdict"] == verdict
