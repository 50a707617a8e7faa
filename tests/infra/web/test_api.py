"""What the server tells of a run."""

import math
import time
from pathlib import Path

import msgspec
import pytest
from arq.connections import ArqRedis
from msgspec import structs
from redis.asyncio import Redis

from infra.web import run_journal
from pipeline import census, queue, watching
from pipeline.journal.rows import StepRow
from pipeline.judge import Judge, JudgedStep, Judgement, JudgeRequest, Vote, judgement_head
from pipeline.request import Claim
from tests.infra.web.example_run import HOSTILE, Serve, append, finished, read, settled, step, store
from tests.pipeline import samples
from tests.pipeline.cli.situations import dead_lettered, taken, trainer_lives, worker_lives
from tests.pipeline.journal_rows import made
from trainer.records.rollout_writer import RolloutWriter

RUN = f"/api/runs/{samples.RUN}"


async def test_runs_are_found_in_a_folder_and_by_their_own_directory(serve: Serve, run_dir: Path) -> None:
    later = {"name": "heldout_after", "success": 0.1, "at": 2300.0}
    append(run_dir, "evaluations", later | {"greedy": True}, later | {"tasks": "unseen"})
    of_folder = (await read(await serve(run_dir.parent), "/api/runs"))["runs"]
    assert of_folder == (await read(await serve(run_dir), "/api/runs"))["runs"]
    told = {name: of_folder[0][name] for name in ("id", "name", "live", "step", "num_steps", "success")}
    assert told == {
        **{"id": samples.RUN, "name": "mine", "live": None},  # for there is no Redis
        **{"step": 1, "num_steps": 9, "success": 0.5},
    }


async def test_what_curves_are_drawn_from_is_computed_again_only_after_a_change(
    serve: Serve, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, series = list[object](), run_journal.series
    monkeypatch.setattr(run_journal, "series", lambda journal: computed.append(journal) or series(journal))
    client = await serve(run_dir)
    first = await read(client, f"{RUN}/series")
    assert await read(client, f"{RUN}/series") == first
    assert len(computed) == 1
    append(run_dir, "evaluations", {"name": "heldout_step_1", "success": 0.6, "at": 2400.0})
    assert len((await read(client, f"{RUN}/series"))["evaluations"]) == 2
    assert len(computed) == 2


async def test_a_copy_of_a_run_is_a_run_of_its_own(serve: Serve, run_dir: Path) -> None:
    copy = run_dir.parent / "other"
    copy.mkdir()
    (copy / "run.json").write_bytes((run_dir / "run.json").read_bytes())
    client = await serve(run_dir.parent)
    found = {row["name"]: row["id"] for row in (await read(client, "/api/runs"))["runs"]}
    assert [row["id"] for row in (await read(client, "/api/runs", only=samples.RUN))["runs"]] == [samples.RUN]
    assert found == {"mine": samples.RUN, "other": f"{samples.RUN}~2"}
    assert (await read(client, f"{RUN}~2/series"))["steps"] == []


async def test_series_have_every_number_of_a_step_and_how_its_episodes_ended(
    serve: Serve, run_dir: Path
) -> None:
    shown = await read(await serve(run_dir), f"{RUN}/series")
    (first,) = shown["steps"]
    assert (first["loss"], first["judging_num_judged"]) == (0.25, 2)
    assert "request_ids" not in first
    assert first["outcomes"] == {"submitted": 1}  # the other one was settled after the step
    assert [row["name"] for row in shown["evaluations"]] == ["heldout_after"]
    assert [(mark["kind"], mark["step"]) for mark in shown["marks"]] == [("published", 1)]


async def test_series_have_the_distance_from_a_teacher_with_its_interval(serve: Serve, run_dir: Path) -> None:
    taught = {"num_taught": 7, "num_left_out": 1, "num_tokens": 90, "reverse_kl": 0.25, "reverse_kl_low": 0.2}
    append(run_dir, "steps", {**step(2, []), "distillation": taught})
    first, second = (await read(await serve(run_dir), f"{RUN}/series"))["steps"]
    assert "distill_reverse_kl" not in first
    assert (second["distill_reverse_kl"], second["distill_reverse_kl_low"]) == (0.25, 0.2)
    assert second["distill_reverse_kl_high"] is None
    assert "distillation" not in second


async def test_alarms_are_marks_with_what_decided_them(serve: Serve, run_dir: Path) -> None:
    alarm = {"step": 1, "kind": "entropy", "text": "0.01 nats", "at": 2300.0}
    append(run_dir, "alarms", alarm, {**alarm, "text": "0.5 nats", "is_over": True, "at": 2400.0})
    marks = (await read(await serve(run_dir), f"{RUN}/series"))["marks"]
    assert [mark["text"] for mark in marks if mark["kind"] == "alarm"] == [
        *("entropy: 0.01 nats", "over: entropy: 0.5 nats")
    ]


async def test_series_go_on_after_a_step_that_is_known(serve: Serve, run_dir: Path) -> None:
    client = await serve(run_dir)
    append(run_dir, "steps", step(2, []))
    shown = await read(client, f"{RUN}/series", after=1)
    assert [row["step"] for row in shown["steps"]] == [2]
    assert shown["evaluations"] == []


async def test_a_number_that_is_not_finite_is_null(serve: Serve, run_dir: Path) -> None:
    append(run_dir, "steps", {**step(2, []), "loss": 1e999})
    rows = (await read(await serve(run_dir), f"{RUN}/series"))["steps"]
    assert all(row["loss"] is None or math.isfinite(row["loss"]) for row in rows)


async def test_rows_that_a_resumed_trainer_took_back_are_gone(serve: Serve, run_dir: Path) -> None:
    client = await serve(run_dir)
    append(run_dir, "steps", step(2, []))
    assert len((await read(client, f"{RUN}/series"))["steps"]) == 2
    path = run_dir / "journal" / "steps.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    path.with_name("steps.jsonl.discarded").write_text(second)
    path.write_text(first)
    append(run_dir, "steps", {**step(2, []), "loss": 0.75})
    rows = (await read(client, f"{RUN}/series"))["steps"]
    assert [row["loss"] for row in rows] == [0.25, 0.75]


async def test_a_row_that_is_being_written_is_read_when_it_is_whole(serve: Serve, run_dir: Path) -> None:
    client, path = await serve(run_dir), run_dir / "journal" / "steps.jsonl"
    line = msgspec.json.encode(made(StepRow, step=2, loss=0.5)) + b"\n"
    with path.open("ab", buffering=0) as file:
        file.write(line[:20])
        assert len((await read(client, f"{RUN}/series"))["steps"]) == 1
        file.write(line[20:])
    assert [row["loss"] for row in (await read(client, f"{RUN}/series"))["steps"]] == [0.25, 0.5]


async def test_tasks_have_their_success_by_version(serve: Serve, run_dir: Path) -> None:
    shown = await read(await serve(run_dir), f"{RUN}/tasks")
    (task,) = shown["tasks"]
    assert (task["task_id"], task["num_episodes"], task["success"]) == (samples.TASK.id, 2, 0.5)
    assert task["fates"] == {"trained": 1, "zero_variance": 1}
    assert task["by_version"] == [{"from": 3, "to": 3, "num_episodes": 2, "success": 0.5}]
    assert shown["heldout"] == []


async def test_who_gets_trained_is_told_as_a_ratio_with_reasons(serve: Serve, run_dir: Path) -> None:
    failed = finished("failed", reward=0.0, task=samples.TASK)
    append(run_dir, "episodes", {**settled(failed, "failed"), "outcome": "failed:sandbox", "reward": None})
    shown = await read(await serve(run_dir), f"{RUN}/represented")
    assert (shown["num_asked"], shown["num_finished"], shown["num_trained"]) == (3, 2, 1)
    buckets = {one["name"]: one for one in shown["by"]["outcome"]}
    assert buckets["submitted"]["ratio"]["value"] == pytest.approx((1 / 1) / (2 / 3))
    assert (buckets["failed:sandbox"]["ratio"]["value"], buckets["failed:sandbox"]["reasons"]) == (0.0, {"failed": 1})
    assert [one["name"] for one in shown["by"]["difficulty"]] == ["sometimes"]
    assert shown["warnings"] == []


async def test_without_redis_the_status_says_so_and_the_stored_part_goes_on(
    serve: Serve, run_dir: Path
) -> None:
    client = await serve(run_dir)
    assert "does not answer" in (await read(client, f"{RUN}/status"))["gone"]
    assert (await read(client, f"{RUN}/rollouts"))["total"] == 3


async def test_without_redis_nobody_says_that_a_run_has_no_trainer(serve: Serve, run_dir: Path) -> None:
    told = await read(await serve(run_dir), "/api/runs")
    assert "does not answer" in told["gone"]
    assert [row["live"] for row in told["runs"]] == [None]


async def test_a_run_that_redis_forgot_is_not_called_an_outage(
    serve: Serve, pool: ArqRedis, redis_url: str, run_dir: Path
) -> None:
    gone = (await read(await serve(run_dir, redis_url=redis_url), f"{RUN}/status"))["gone"]
    assert gone == f"Redis knows nothing of run {samples.RUN} any more, or never did."


async def test_the_list_of_runs_says_what_is_unwell(
    serve: Serve, pool: ArqRedis, redis_url: str, run_dir: Path
) -> None:
    await trainer_lives(pool, alarms=("gap_grows since step 7",))
    await dead_lettered(pool)
    await worker_lives(pool, paused="docker is out")
    told = await read(await serve(run_dir, redis_url=redis_url), "/api/runs")
    (row,) = told["runs"]
    assert row["complaints"] == [
        f"run {samples.RUN} has 1 dead request: `dead` lists them",
        f"run {samples.RUN}, alarm gap_grows since step 7",
    ]
    assert told["complaints"] == [
        *row["complaints"],
        "every worker is paused, the first because docker is out",
    ]
    assert told["pauses"] == ["rollout worker host/1 is paused: docker is out"]


async def test_a_reward_beyond_all_sums_is_shown_and_what_cannot_be_computed_is_null(
    serve: Serve, run_dir: Path
) -> None:
    huge = [finished(f"huge-{number}", reward=1e308, group_id=f"huge-{number // 2}") for number in range(4)]
    store(run_dir, *huge)
    append(run_dir, "episodes", *(settled(one, "zero_variance") for one in huge))
    append(run_dir, "steps", {**step(2, []), "reward_mean": 1e308, "at": 1e4})
    client = await serve(run_dir)
    (task,) = (await read(client, f"{RUN}/tasks"))["tasks"]
    assert (task["success"], task["variance"]) == (None, None)
    assert (await read(client, f"{RUN}/series"))["steps"][1]["reward_low"] is None
    assert (await read(client, f"{RUN}/rollouts", sort="-reward"))["rows"][0]["reward"] == 1e308
    for path in ("represented", "rollouts/huge-0", "rollouts"):
        await read(client, f"{RUN}/{path}", **({"reward": "1e308"} if path == "rollouts" else {}))


async def test_status_is_what_redis_says(serve: Serve, pool: ArqRedis, redis_url: str, run_dir: Path) -> None:
    await trainer_lives(pool, admission="2 more groups")
    await queue.enqueue(pool, samples.request())
    worker = census.WorkerStatus(
        **{"name": "host/1", "slots": 4, "running": (), "finished": 0, "failed": 0},
        **{"started_at": 1.0, "updated_at": time.time()},
    )
    await census.beat_worker(pool, worker)
    client = await serve(run_dir, redis_url=redis_url)
    shown = await read(client, f"{RUN}/status")
    assert (shown["has_trainer"], shown["run"]["step"], shown["admission"]) == (True, 3, "2 more groups")
    assert (shown["queue"]["queued"], shown["judging"]) == (1, None)
    assert [(one["name"], one["paused"]) for one in shown["workers"]] == [("host/1", "")]
    assert [(row["id"], row["live"], row["phase"]) for row in (await read(client, "/api/runs"))["runs"]] == [
        (samples.RUN, True, "waiting")
    ]


async def test_a_claim_is_told_whole_though_its_worker_has_not_renewed_it_yet(
    serve: Serve, pool: ArqRedis, redis_url: str, run_dir: Path
) -> None:
    await trainer_lives(pool)
    claim = await taken(pool)
    (shown,) = (await read(await serve(run_dir, redis_url=redis_url), f"{RUN}/status"))["queue"]["claimed"]
    assert shown["request_id"] == claim.request.id
    assert (shown["lease"]["worker"], shown["lease"]["phase"], shown["lease"]["turn"]) == (
        "host/1",
        "opening",
        0,
    )


async def test_a_heartbeat_opens_no_directory_but_that_of_its_own_run(
    serve: Serve, pool: ArqRedis, redis_url: str, run_dir: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign" / "journal"
    foreign.mkdir(parents=True)
    await trainer_lives(pool, journal=str(foreign))
    client = await serve(redis_url=redis_url)
    (row,) = (await read(client, "/api/runs"))["runs"]
    assert row["directory"] == ""
    await trainer_lives(pool, journal=str(run_dir / "journal"))
    (row,) = (await read(client, "/api/runs"))["runs"]
    assert row["directory"] == str(run_dir)


async def test_a_rollout_is_a_conversation_with_tokens_and_a_life(serve: Serve, run_dir: Path) -> None:
    shown = await read(await serve(run_dir), f"{RUN}/rollouts/solved")
    (turn,) = shown["turns"]
    assert turn["told"][0] == {
        **{"role": "user", "content": HOSTILE, "reasoning": ""},
        **{"tool_calls": [], "tool_call_id": ""},
    }
    assert turn["actions"][0]["observation"]["output"] == HOSTILE
    assert [(one["id"], one["version"], one["trained"]) for one in turn["tokens"]] == [
        *((5, 3, True), (6, 3, True), (7, 4, True))
    ]
    assert [one["logprob"] for one in turn["tokens"]] == [-0.5, -0.25, -1.0]
    assert shown["outcome"] == {"kind": "submitted", "from_tree": ""}
    assert shown["reward"]["value"] == 1.0
    assert "return a + b" in shown["patch"]
    assert [one["what"] for one in shown["life"]] == ["enqueued", "claimed", "published", "trained"]
    assert shown["verdict"] == "trained in step 1, from weights v4"


async def test_a_long_rollout_is_read_in_parts_with_an_outline_of_all_turns(
    serve: Serve, run_dir: Path
) -> None:
    failing = samples.action("false", "no")
    assert failing.observation is not None
    failing = structs.replace(failing, observation=structs.replace(failing.observation, exit_code=1))
    turns = [samples.turn(text=f"turn {index}", actions=(), asked_at=1500.0 + index) for index in range(120)]
    turns[70] = samples.turn(text="turn 70", actions=(failing,), generate_s=2.0, engine_wait_s=0.5)
    store(run_dir, structs.replace(finished("long", reward=0.0), turns=tuple(turns)))
    client = await serve(run_dir)
    shown = await read(client, f"{RUN}/rollouts/long", turns=100, find="TURN 7")
    assert [turn["index"] for turn in shown["turns"]] == [*range(100, 120)]
    assert shown["found"] == [7, *range(70, 80)]
    outline = shown["outline"]
    assert len(outline) == 120
    assert [index for index, turn in enumerate(outline) if turn["is_failed"]] == [70]
    assert (outline[70]["generate_s"], outline[70]["engine_wait_s"], outline[70]["num_commands"]) == (2.0, 0.5, 1)
    assert len((await read(client, f"{RUN}/rollouts/long"))["turns"]) == 50
    assert len((await read(client, f"{RUN}/rollouts/long", turns="all"))["turns"]) == 120
    for query in ({"turns": "last"}, {"turn": "3"}):
        async with client.get(f"{RUN}/rollouts/long", params=query) as response:
            assert response.status == 400
            assert next(iter(query)) in (await response.json())["error"]


async def test_a_rollout_that_is_not_stored_shows_what_the_journal_has(serve: Serve, run_dir: Path) -> None:
    withdrawn = {"request_id": "gone", "task_id": "demo:calc-7", "fate": "withdrawn", "at": 2001.0}
    append(run_dir, "episodes", withdrawn)
    shown = await read(await serve(run_dir), f"{RUN}/rollouts/gone")
    assert (shown["head"]["fate"], shown["turns"]) == ("withdrawn", [])
    assert shown["unreadable"]


async def test_scores_and_votes_lie_with_their_turns(serve: Serve, run_dir: Path) -> None:
    trajectory = finished("judged", reward=1.0)
    store(run_dir, trajectory)
    request = JudgeRequest(
        **{"id": "judged.judge", "run_id": samples.RUN, "purpose": "train", "group_id": "g"},
        **{"enqueued_at": 1.0, "rollout_id": "judged", "task": "demo:calc-7"},
        judge=Judge(method="votes"),
    )
    claim = Claim(request=request, attempt=1, worker="judge/1", claimed_at=2.0)
    vote = Vote(seed=1, value=0.5, text=HOSTILE)
    steps = (JudgedStep(turn=0, score=0.5, votes=(vote,)),)
    writer = RolloutWriter(run_dir / "rollouts", max_bytes=10**9)
    judgement = Judgement(claim=claim, steps=steps, judge="tiny@1", started_at=2.0, finished_at=3.0)
    writer.add_judgement(judgement_head(judgement, 0), judgement)
    writer.close()
    shown = await read(await serve(run_dir), f"{RUN}/rollouts/judged")
    assert shown["judge"] == "tiny@1"
    judged = shown["turns"][0]["judged"]
    assert (judged["score"], judged["votes"][0]["text"]) == (0.5, HOSTILE)


async def test_an_episode_is_read_while_it_is_played(
    serve: Serve, pool: ArqRedis, redis_url: str, run_dir: Path
) -> None:
    await trainer_lives(pool)
    claim = await taken(pool)
    client, path = await serve(run_dir, redis_url=redis_url), f"{RUN}/rollouts/{claim.request.id}"
    assert not await watching.is_watched(pool, claim.request.id)
    assert (await read(client, path))["turns"] == []
    assert await watching.is_watched(pool, claim.request.id), "the worker is told"
    turns = [samples.turn(text=f"turn {number}", asked_at=1.0 + number) for number in range(130)]
    await watching.show(pool, claim.request.id, 1, turns)
    shown = await read(client, path)
    assert [turn["raw"] for turn in shown["turns"]] == [f"turn {number}" for number in range(30, 130)]
    assert [turn["index"] for turn in shown["turns"]] == [*range(30, 130)]
    assert (shown["state"], len(shown["outline"])) == ("claimed", 130)
    assert shown["turns"][0]["tokens"] == []


async def test_what_redis_has_and_no_store_is_shown_too(
    serve: Serve, pool: ArqRedis, redis: Redis, redis_url: str, run_dir: Path
) -> None:
    await trainer_lives(pool)
    request = samples.request()
    await queue.enqueue(pool, request)
    shown = await read(await serve(run_dir, redis_url=redis_url), f"{RUN}/rollouts/{request.id}")
    assert (shown["state"], shown["source"], shown["problem"]) == ("queued", "redis", request.task.problem)
