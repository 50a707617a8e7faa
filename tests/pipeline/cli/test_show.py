"""What `show` prints of one request."""

import json

from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import deadletters, keys, queue, request_store, stream
from pipeline.trajectory import Action, Cut, Observation, Reward, failed_trajectory
from tests.pipeline import samples
from tests.pipeline.cli.situations import (
    BROKEN,
    RunCommand,
    answered,
    dead_lettered,
    known_run,
    taken,
)


async def test_show_prints_a_trajectory_to_read(pool: ArqRedis, run: RunCommand) -> None:
    long = Observation(
        exit_code=1, output="\n".join(f"line {n}" for n in range(50)), dropped_chars=9, wall_s=2.0
    )
    turns = (
        samples.turn(),
        samples.turn(actions=(Action(command="cat calc.py", observation=long),)),
        samples.turn(text="hm", actions=()),
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
        "no command could be read",
        "+    return a + b",
    ):
        assert expected in out
    _, full, _ = await run("show", request_id, "--full")
    assert "line 25" in full
    assert "line 25" not in out


async def test_show_says_which_turn_each_turn_of_an_agent_program_follows(
    pool: ArqRedis, run: RunCommand
) -> None:
    turns = (
        samples.turn(after=-1, aside=True, thread="title"),
        samples.turn(after=-1),
        samples.turn(after=1),
        samples.turn(after=1),
    )
    _, out, _ = await run("show", await answered(pool, turns=turns))
    assert "turn 1  in title, an aside, not trained, 4 tokens in" in out
    assert "turn 2  begins a conversation, 4 tokens in" in out
    assert "turn 3  4 tokens in" in out
    assert "turn 4  follows turn 2, 4 tokens in" in out


async def test_show_says_at_its_turn_what_a_cut_took_out_of_the_context(
    pool: ArqRedis, run: RunCommand
) -> None:
    cut = Cut(num_omitted=3, marker="[...]", num_thoughts=1, dropped_chars=1200)
    turns = (
        samples.turn(),
        samples.turn(cut=cut, repeated_tokens=40),
        samples.turn(cut=Cut(forgot_reply=True)),
    )
    _, out, _ = await run("show", await answered(pool, turns=turns))
    assert (
        "context cut: 3 turns omitted in all, the thoughts of 1 reply taken out, 1,200 characters of the newest "
        "messages left out, 40 tokens computed again\nturn 2" in out
    )
    assert "context cut: the last reply was taken out\nturn 3" in out


async def test_show_prints_a_turn_whose_command_is_empty(pool: ArqRedis, run: RunCommand) -> None:
    request_id = await answered(
        pool, turns=(samples.turn(actions=(Action(command=""),), text="Nothing to do."),)
    )
    status, out, _ = await run("show", request_id)
    assert (status, "  Nothing to do." in out) == (0, True)


async def test_show_for_a_pipe_gives_token_ids_and_text(pool: ArqRedis, run: RunCommand) -> None:
    _, out, _ = await run("show", await answered(pool), "--json")
    found = json.loads(out)["trajectory"]
    assert (found["turns"][0]["fed"], found["turns"][0]["sampled"]) == ([1, 2, 3, 4], [5, 6, 7])
    assert found["turns"][0]["logprobs"] == [-0.5, -0.25, -1.0]
    assert found["outcome"]["patch"].startswith("--- a/calc.py")


async def test_show_works_for_what_is_not_answered(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    waiting, held, dead = samples.request(), await taken(pool), await dead_lettered(pool)
    await queue.enqueue(pool, waiting)
    assert "state    queued" in (await run("show", waiting.id))[1]
    assert "claimed by host/1, attempt 1: opening" in (await run("show", held.request.id))[1]
    _, out, _ = await run("show", dead)
    assert "state    dead" in out
    assert "container vanished (another try might help)" in out
    assert "Traceback: boom" in out
    status, _, err = await run("show", "never-asked")
    assert (status, "nothing is known of request never-asked" in err) == (2, True)


async def test_what_redis_lost_the_place_of_is_said_to_be_lost(pool: ArqRedis, run: RunCommand) -> None:
    await known_run(pool)
    request = samples.request()
    await queue.enqueue(pool, request)
    await pool.zrem(keys.queue(), request.id)
    _, out, _ = await run("show", request.id, "--json")
    assert json.loads(out)["state"] == "lost"


async def test_show_prints_the_issue_and_the_end_of_the_log_of_grading(
    pool: ArqRedis, run: RunCommand
) -> None:
    problem = "\n".join(["Adding drops an operand.\x1b[2J", *(f"detail {n}" for n in range(40))])
    log = "\n".join(f"test line {n}" for n in range(100)) + "\n1 failed\x1b]0;title\x07\n"
    reward = Reward(value=0.0, resolved=False, decided_by="exit_code 1", log_tail=log)
    claim = await taken(pool, task=replace(samples.TASK, problem=problem))
    await stream.publish(pool, samples.trajectory(claim, reward=reward))
    _, out, _ = await run("show", claim.request.id)
    assert "issue\n  Adding drops an operand.␛[2J\n  detail 0\n" in out
    assert "end of the log of grading\n  ... 81 lines before, with --full\n  test line 81\n" in out
    assert out.endswith("  test line 99\n  1 failed␛]0;title␇\n")
    assert "detail 20" not in out
    _, full, _ = await run("show", claim.request.id, "--full")
    assert "detail 20" in full
    assert "  test line 0\n" in full


async def test_show_says_what_the_control_said_of_a_pass(pool: ArqRedis, run: RunCommand) -> None:
    reward = Reward(
        value=1.0, resolved=True, decided_by="exit status 0", control="confirmed", num_controlled=7
    )
    claim = await taken(pool)
    await stream.publish(pool, samples.trajectory(claim, reward=reward))
    _, out, _ = await run("show", claim.request.id)
    assert "1 (exit status 0, control: confirmed, 7 tests; graded in 0.0 s)" in out


async def test_show_prints_the_issue_of_what_is_not_answered(pool: ArqRedis, run: RunCommand) -> None:
    claim = await taken(pool)
    _, out, _ = await run("show", claim.request.id)
    assert out.endswith("issue\n  add() drops its second argument\n")


async def test_a_tasks_calibration_is_never_shown(pool: ArqRedis, run: RunCommand) -> None:
    """It is for the grader: whoever reads the queue learns nothing of the contradictions."""
    await known_run(pool)
    secret = replace(samples.TASK, calibration=b"what the hidden tests expect")
    waiting, held = samples.request(task=secret), await taken(pool, task=secret)
    await queue.enqueue(pool, waiting)
    dead = failed_trajectory(held, BROKEN, held.claimed_at)
    evidence = [deadletters.attempt_failure(held, BROKEN)]
    shown = [await run("show", waiting.id, "--json"), await run("show", held.request.id, "--json")]
    await deadletters.dead_letter(pool, dead, evidence)
    shown += [await run("show", held.request.id, "--json"), await run("dead", "--json")]
    for status, out, _ in shown:
        assert (status, secret.id in out) == (0, True)
        assert "what the hidden tests expect" not in out
    stored = await request_store.read(pool, held.request.id)
    assert stored is not None
    assert stored.task.calibration, "a request that is requeued is graded with it"
