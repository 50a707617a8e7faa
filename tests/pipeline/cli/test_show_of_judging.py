"""What `show` prints of a rollout that was judged, and of a judge request by itself."""

import json
import time

from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import queue, stream
from pipeline.judge import Judge, Vote, judge_request_id
from pipeline.kinds import JUDGE
from pipeline.queue import Lease
from tests.pipeline import samples
from tests.pipeline.cli.situations import RunCommand, answered, known_run
from tests.pipeline.judging import dead_lettered, enqueued, taken, taught, voted

VOTING = Judge(method="votes", name="judge-8b")


async def judged(pool: ArqRedis, *steps: tuple[float | None, ...] | None) -> str:
    """The id of a rollout with a turn for each of these, which are its votes."""
    rollout_id = await answered(pool, turns=tuple(samples.turn() for _ in steps))
    claim = await taken(
        pool,
        judge_request_id(rollout_id),
        rollout_id=rollout_id,
        judge=VOTING,
        enqueued_at=time.time() - 600,
    )
    await stream.publish(pool, voted(claim, *steps), kind=JUDGE)
    return rollout_id


async def test_each_turn_of_a_judged_rollout_has_its_score_and_its_votes(
    pool: ArqRedis, run: RunCommand
) -> None:
    rollout_id = await judged(pool, (1.0, -1.0, 1.0), (None, None), None)
    _, out, _ = await run("show", rollout_id)
    assert f"judging  1 of 3 turns scored, mean +0.33, by judge-8b at v1  ({rollout_id}.judge)" in out
    first, second, third = [block for block in out.split("\n\n") if block.startswith("turn ")]
    assert first.endswith("[exit 0, 0.1 s]\n  score +0.33  (3 votes: +1 -1 +1)")
    assert second.endswith("  no score: every vote abstained or failed  (2 votes: none none)")
    assert third.endswith("  no score: its reply held no command")
    assert "boxed" not in out
    _, full, _ = await run("show", rollout_id, "--full")
    assert "  vote 2: -1  seed 1\n    \\boxed{-1}" in full
    assert "  vote 1: abstains  seed 0\n    It hangs." in full


async def test_a_judge_request_is_shown_with_what_each_vote_said(pool: ArqRedis, run: RunCommand) -> None:
    rollout_id = await judged(pool, (1.0, None), None)
    status, out, _ = await run("show", judge_request_id(rollout_id))
    assert status == 0
    for expected in (
        f"judge request {rollout_id}.judge\n  state    answered",
        f"rollout  {rollout_id}  (task-1, group g, run laptop)",
        "judge    judge-8b, 3 votes a turn at temperature 1",
        "attempt 1 by host/1, waited 10 min",
        "turn 1  score +1.00  (2 votes: +1 none)\n  vote 1: +1  seed 0\n    \\boxed{+1}\n  vote 2: abstains  seed 1",
        "turn 2  no score: its reply held no command",
    ):
        assert expected in out


async def test_a_rollout_that_was_taught_says_that_its_tokens_have_log_probs(
    pool: ArqRedis, run: RunCommand
) -> None:
    await known_run(pool)
    turns = tuple(samples.turn() for _ in range(2))
    rollout_id = await answered(pool, turns=turns)
    teacher = Judge(method="teacher", name="big")
    claim = await taken(pool, judge_request_id(rollout_id), rollout_id=rollout_id, judge=teacher)
    await stream.publish(pool, taught(claim, turns, logprob=-0.5), kind=JUDGE)
    _, out, _ = await run("show", rollout_id)
    assert f"judging  log-probs of 6 tokens, by big@7  ({rollout_id}.judge)" in out
    assert out.count("  the teacher's log-probs of 3 tokens, -0.500 nats on average") == 2
    _, out, _ = await run("show", judge_request_id(rollout_id))
    assert "judge    teacher big" in out
    assert "turn 2  the teacher's log-probs of 3 tokens" in out
    _, out, _ = await run("show", judge_request_id(rollout_id), "--json")
    steps = json.loads(out)["judgement"]["steps"]
    assert [step["logprobs"] for step in steps] == [[-0.5] * 3] * 2
    _, out, _ = await run("ls", "--kind", "judge")
    assert "judged, log-probs of 6 tokens" in out
    _, out, _ = await run("status")
    assert "scores     log-probs of 6 tokens in 2 recent steps" in out


async def test_a_vote_that_failed_is_told_from_one_that_abstained(pool: ArqRedis, run: RunCommand) -> None:
    rollout_id = await answered(pool)
    claim = await taken(pool, judge_request_id(rollout_id), rollout_id=rollout_id)
    failed = Vote(seed=4, value=None, error="no reply within 300 s\x1b[2J", generate_s=300.0)
    found = voted(claim, (1.0,))
    (step,) = found.steps
    found = replace(found, steps=(replace(step, votes=(*step.votes, failed)),))
    await stream.publish(pool, found, kind=JUDGE)
    _, out, _ = await run("show", judge_request_id(rollout_id))
    assert "vote 2: failed: no reply within 300 s␛[2J  seed 4, 300.0 s" in out


async def test_a_rollout_says_where_its_judging_is(pool: ArqRedis, run: RunCommand) -> None:
    rollout_id = await answered(pool)
    judge_id = judge_request_id(rollout_id)
    assert "judging" not in (await run("show", rollout_id))[1]
    await enqueued(pool, judge_id, rollout_id=rollout_id)
    assert "judging  queued" in (await run("show", rollout_id))[1]
    claim = await queue.claim(pool, judge_id, "host/2", JUDGE)
    assert not isinstance(claim, str)
    lease = Lease(worker="host/2", attempt=1, claimed_at=1.0, phase="judging", turn=3)
    await queue.renew(pool, claim, lease, JUDGE)
    assert (
        "judging  claimed by host/2, attempt 1: judging, 3 turns done" in (await run("show", rollout_id))[1]
    )
    assert "state    claimed by host/2" in (await run("show", judge_id))[1]


async def test_a_dead_judge_request_is_shown_with_the_evidence(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    rollout_id = await answered(pool)
    judge_id = await dead_lettered(pool, judge_request_id(rollout_id))
    _, out, _ = await run("show", judge_id)
    assert "state    dead, failed at engine: no reply" in out
    assert "attempt 1 failed at engine" in out
    assert "Traceback: judge" in out
    assert "judging  dead, failed at engine: no reply" in (await run("show", rollout_id))[1]
    status, _, err = await run("show", judge_request_id("never-asked"))
    assert (status, "nothing is known of request never-asked.judge" in err) == (2, True)


async def test_show_for_a_pipe_gives_votes_with_their_text(pool: ArqRedis, run: RunCommand) -> None:
    rollout_id = await judged(pool, (1.0,))
    _, out, _ = await run("show", rollout_id, "--json")
    judging = json.loads(out)["judging"]
    assert judging["judgement"]["steps"][0]["votes"][0]["text"] == "\\boxed{+1}"
    _, out, _ = await run("show", judge_request_id(rollout_id), "--json")
    assert json.loads(out) == judging
    _, out, _ = await run("show", await answered(pool), "--json")
    assert json.loads(out)["judging"] is None
