"""Evaluation by command, as a process: real queue and stream, a scripted fleet."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import fleet, task
from pipeline import keys, queue
from pipeline.request import RolloutRequest
from pipeline.rollout_store.reading import stores_of
from pipeline.taskfile import write_tasks
from pipeline.weights import PolicyHolder
from tests.trainer.processes import RECIPE, TrainerProcess, keep_engines, start
from trainer.evaluate.weights import TaskOutcome, main

TEMPLATE = Path("tests/chat_templates/Qwen-Qwen3-0.6B.jinja").resolve()


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "agent.yaml").write_text(Path("trainer/recipes/demo_agent.yaml").read_text())
    write_tasks(tmp_path / "train.jsonl", [task("t0")])
    write_tasks(tmp_path / "heldout.jsonl", [task(f"h{i}") for i in range(4)])
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(model=tiny_model))
    return path


async def evaluate(redis_url: str, recipe: Path, *arguments: str | Path) -> TrainerProcess:
    where = ("--run-dir", recipe.parent / "run")
    return await start(redis_url, recipe, *where, *arguments, module="trainer.evaluate")


def summary(trainer: TrainerProcess) -> dict[str, Any]:
    return json.loads(trainer.output.splitlines()[-1])


def rewards_by_task(outcomes: Path) -> dict[tuple[float, str], tuple[float | None, ...]]:
    found = [msgspec.json.decode(line, type=TaskOutcome) for line in outcomes.read_bytes().splitlines()]
    return {(one.temperature, one.task_id): one.rewards for one in found}


def verdict(request: RolloutRequest) -> float | None:
    """h0 always, h1 every second time unless greedily, h2 breaks when sampled, h3 never."""
    greedy = request.sampling.temperature == 0
    scores = {"h0": 1.0, "h1": 0.0 if greedy else float(request.member % 2), "h2": 0.0 if greedy else None}
    return scores.get(request.task.id, 0.0)


async def test_success_is_told_by_temperature_and_by_task(recipe: Path, redis_url: str, redis: Redis) -> None:
    async with fleet(redis_url, verdict):
        trainer = await evaluate(
            redis_url, recipe, "--temperature", "0.7", "--temperature", "0", "--episodes", "8", "--json"
        )
        assert await trainer.ended() == 1, "two episodes were never judged"
    told = summary(trainer)
    sampled, greedy = told["results"]
    assert (sampled["temperature"], sampled["episodes"], sampled["tasks"], sampled["failed"]) == (
        0.7,
        6,
        3,
        2,
    )
    assert sampled["success"] == pytest.approx(0.5)
    low, high = sampled["interval"]
    assert 0 < low < 0.1, "three tasks of shares 1, 0.5 and 0 say little"
    assert high == pytest.approx(1 - low)
    assert (greedy["temperature"], greedy["episodes"], greedy["success"]) == (0.0, 4, 0.25)
    by_task = rewards_by_task(Path(told["outcomes"]))
    assert by_task[0.7, "h1"] == (0.0, 1.0)
    assert by_task[0.7, "h2"] == (None, None)
    assert by_task[0.0, "h0"] == (1.0,)
    assert len(by_task) == 8
    assert await queue.open_ids(redis, told["run_id"]) == []
    assert await redis.zcard(keys.queue()) == 0
    (store,) = stores_of(recipe.parent / "run")
    kept = [stored.head.outcome for stored in store.heads()]
    assert (len(kept), sum(outcome.startswith("failed:") for outcome in kept)) == (12, 2)


@pytest.mark.slow
async def test_without_a_word_the_newest_checkpoint_of_the_run_is_judged(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url):
        trainer = await start(redis_url, recipe, "--run-dir", run, "--set", "num_steps=1")
        assert await trainer.ended() == 0, trainer.output
        exam = await evaluate(redis_url, recipe, "--episodes", "2", "--temperature", "1")
        assert await exam.ended() == 0, exam.output
    assert f"{run}/checkpoints/step-00000001" in exam.output
    learned = (run / "weights" / "v000001" / "model.safetensors").read_bytes()
    (judged,) = run.glob("evaluations/*/weights/v000000/model.safetensors")
    assert judged.read_bytes() == learned


async def test_a_signal_ends_it_and_withdraws_its_requests(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    trainer = await evaluate(redis_url, recipe)
    while not await redis.zcard(keys.queue()):
        assert trainer.process.returncode is None, trainer.output
        await asyncio.sleep(0.02)
    trainer.process.send_signal(signal.SIGTERM)
    assert await trainer.ended() == 1, trainer.output
    assert "interrupted" in trainer.output
    assert await redis.zcard(keys.queue()) == 0


async def test_without_an_engine_nothing_is_enqueued(recipe: Path, redis_url: str, redis: Redis) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWERVE_ROUTER_URL", "http://127.0.0.1:1")
        trainer = await evaluate(redis_url, recipe, "--set", "weights.engines=router")
    assert await trainer.ended() == 1, trainer.output
    assert "no engine took the weights" in trainer.output
    assert await redis.zcard(keys.queue()) == 0


async def test_engines_in_the_service_of_a_run_are_left_alone(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    await keep_engines(redis, PolicyHolder("busy", host="elsewhere", pid=7))
    trainer = await evaluate(redis_url, recipe, "--set", "weights.engines=router")
    assert await trainer.ended() == 2, trainer.output
    assert "the engines of this Redis serve run busy (process 7 on elsewhere)" in trainer.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--episodes", "6"], "--episodes 6: there are 4 tasks"),
        (["--temperature", "-1"], "--temperature -1"),
        (["--checkpoint", "."], ". holds no checkpoint"),
        (["--model", "."], "holds no .safetensors file"),
        (["--tasks", "train.jsonl"], "train.jsonl"),
        (["--set", "tasks.heldout="], "give --tasks"),
    ],
)
def test_misuse_of_an_evaluation_is_refused(
    recipe: Path,
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["evaluate", str(recipe), "--run-dir", str(recipe.parent / "run"), *arguments]
    )
    assert main() == 2
    assert complaint in capsys.readouterr().err


async def test_an_agent_program_of_the_command_line_plays_in_place_of_the_recipes_agent(
    recipe: Path, redis_url: str
) -> None:
    played: list[tuple[str, str]] = []

    def noted(request: RolloutRequest) -> float:
        played.append((request.harness.name if request.harness else "", request.context.policy))
        return 1.0

    changes = (
        f"chat.template={TEMPLATE}",
        "rollout.limits.context_tokens=8192",
        "learner.micro_batch_tokens=8192",
    )
    options = [word for change in changes for word in ("--set", change)]
    async with fleet(redis_url, noted):
        trainer = await evaluate(redis_url, recipe, "--harness", "pi", "--temperature", "1", *options)
        assert await trainer.ended() == 0, trainer.output
    assert played == [("pi", "stop")] * 4
