"""A run that cannot work is refused in one line with the fix, by --dry-run too, and leaves nothing behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import task
from pipeline.taskfile import write_tasks
from tests.trainer.processes import RECIPE, start
from trainer import run
from trainer.evaluate import weights
from trainer.recipe import load_recipe, to_toml
from trainer.records.run_directory import create

DRY = ["--dry-run"]


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Path:
    """A recipe that works, with a model, an agent and tasks of its own to spoil."""
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "agent.yaml").write_text(Path("trainer/recipes/demo_agent.yaml").read_text())
    write_tasks(tmp_path / "train.jsonl", [task(f"t{i}") for i in range(5)])
    write_tasks(tmp_path / "heldout.jsonl", [task(f"h{i}") for i in range(3)])
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(model="model"))
    return path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, redis_url: str, recipe: Path):
    """`trainer.run RECIPE --run-dir DIR/run ARGUMENTS` in this process; returns its exit status."""
    monkeypatch.setenv("SWERVE_REDIS_URL", redis_url)

    def call(*arguments: str | Path, command=run) -> int:
        words = [str(recipe), "--run-dir", str(recipe.parent / "run"), *map(str, arguments)]
        monkeypatch.setattr("sys.argv", [command.__name__, *words])
        return command.main()

    return call


def the_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


def edit_config(recipe: Path, **changes: object) -> None:
    path = recipe.parent / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_recipe_that_works_passes_the_dry_run_which_writes_nothing(call, recipe: Path) -> None:
    before = set(recipe.parent.iterdir())
    assert call(*DRY) == 0
    assert set(recipe.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"model_type": "mixtral"},
            "error: the learner trains Llama 2 and 3 to 3.3, SmolLM2; Qwen2, Qwen2.5; Qwen3; Qwen3's mixture",
        ),
        ({"mlp_bias": True}, "has mlp_bias, which the learner does not compute"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    ],
)
@pytest.mark.parametrize("how", [DRY, []])
def test_a_model_that_the_learner_cannot_run_is_refused(
    call,
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    how: list[str],
    change: dict[str, object],
    complaint: str,
) -> None:
    edit_config(recipe, **change)
    assert call(*how) == 2
    assert complaint in the_line(capsys)
    assert not (recipe.parent / "run").exists()


@pytest.mark.parametrize(
    ("wish", "complaint"),
    [
        (
            "learner.tensor_parallel=3",
            "learner.tensor_parallel = 3 does not divide the model's 4 attention heads",
        ),
        ("learner.pipeline_parallel=4", "learner.pipeline_parallel = 4 does not divide the model's 2 layers"),
        ("learner.micro_batch_tokens=64", "set it to rollout.limits.context_tokens = 512 or more"),
        ("model=absent", "absent is not a directory; give the Hugging Face directory"),
        ("rollout.agent=absent.yaml", "rollout.agent: "),
        ("rollout.group_deadline_s=1", "rollout.group_deadline_s is 1, and an episode may play for"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(
    call, capsys: pytest.CaptureFixture[str], wish: str, complaint: str
) -> None:
    assert call("--set", wish, *DRY) == 2
    assert complaint in the_line(capsys)


def test_a_model_that_cannot_be_trained_is_refused_before_its_tokenizer_and_tasks_are_read(
    call, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe.parent / "model" / "config.json").write_text('{"model_type": "gemma3", "text_config": {}}')
    (recipe.parent / "model" / "tokenizer_config.json").write_text("{}")
    (recipe.parent / "train.jsonl").write_text("")
    assert call(*DRY) == 2
    line = the_line(capsys)
    assert line.startswith(
        "error: the learner trains Llama 2 and 3 to 3.3, SmolLM2; Qwen2, Qwen2.5; Qwen3; Qwen3's mixture of experts"
    )
    assert "model_type 'gemma3'" in line


def test_a_layout_needs_its_number_of_processes(
    call, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = ("--set", "learner.tensor_parallel=2")
    assert call(*halves, *DRY) == 0, "a dry run is no torchrun"
    assert (
        "learner: 2 processes (tensor_parallel 2 x pipeline_parallel 1 x context_parallel 1)"
        in capsys.readouterr().out
    )
    assert call(*halves) == 2
    assert "need 2 processes or a multiple, not 1" in the_line(capsys)
    assert not (recipe.parent / "run").exists()
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert call(*halves, *DRY) == 2
    assert "need 2 processes or a multiple, not 3" in the_line(capsys)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("agent: {step_limit: many}", "agent.step_limit: expected a number, got 'many'"),
        ("agent: [", "agent.yaml is not YAML"),
        ("{% if", None),
        ("{{ tsak }}", "agent.instance_template: unknown variable 'tsak'"),
        ("{{ task.x.y }}", "agent.instance_template: 'str object' has no attribute 'x'"),
    ],
)
def test_an_agent_file_that_no_worker_could_use_is_refused(
    call, recipe: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str | None
) -> None:
    agent = recipe.parent / "agent.yaml"
    is_template = "{" in text and not text.startswith("agent")
    agent.write_text(agent.read_text().replace("ISSUE: {{task}}", text) if is_template else text)
    assert call(*DRY) == 2
    line = the_line(capsys)
    assert f"rollout.agent: {agent}" in line
    assert (complaint or "agent.instance_template") in line


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% for message in", "chat_template: "),
        ("{{ messages[-1].content }}", "the system message"),
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        (
            "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
            "a later message changes how earlier ones are rendered",
        ),
    ],
)
def test_a_chat_template_that_is_not_append_only_is_refused(
    call, recipe: Path, capsys: pytest.CaptureFixture[str], template: str, complaint: str
) -> None:
    (recipe.parent / "model" / "chat_template.jinja").write_text(template)
    assert call(*DRY) == 2
    assert complaint in the_line(capsys)


@pytest.mark.slow
async def test_a_run_refused_by_its_learner_leaves_no_directory_and_nothing_in_redis(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    where = ("--run-dir", recipe.parent / "run", "--run-id", "refused")
    trainer = await start(redis_url, recipe, *where, "--set", "learner.train_only=['.absent.']")
    assert await trainer.ended() == 2, trainer.output
    assert "learner.train_only = ['.absent.'] matches no parameter" in trainer.output
    assert not (recipe.parent / "run").exists()
    assert await redis.keys("*") == []


@pytest.mark.slow
async def test_a_refused_run_leaves_a_directory_that_was_there_as_it_was(
    recipe: Path, redis_url: str
) -> None:
    mine = recipe.parent / "run"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    trainer = await start(redis_url, recipe, "--run-dir", mine, "--set", "learner.train_only=['.absent.']")
    assert await trainer.ended() == 2, trainer.output
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("command", [run, weights])
@pytest.mark.parametrize("place", ["recipe.toml", "recipe.toml/below", "/proc/swerve"])
def test_a_run_directory_that_cannot_be_written_is_one_line(
    call, recipe: Path, capsys: pytest.CaptureFixture[str], redis: Redis, command, place: str
) -> None:
    path = recipe.parent / place
    assert call("--run-dir", path, command=command) == 2
    line = the_line(capsys)
    assert f"--run-dir {path} cannot be written (" in line
    assert "choose another directory" in line


@pytest.mark.slow
def test_a_disk_that_is_full_is_one_line(recipe: Path, redis_url: str, redis: Redis) -> None:
    """No file may hold a byte, which fails where a full disk does."""
    words = [sys.executable, "-m", "trainer.run", str(recipe), "--run-dir", str(recipe.parent / "run")]
    limited = ["bash", "-c", 'ulimit -f 0; exec "$@"', "limited", *words]
    done = subprocess.run(
        limited, env=os.environ | {"SWERVE_REDIS_URL": redis_url}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "run cannot be written (File too large" in line
    assert not (recipe.parent / "run").exists()


@pytest.mark.parametrize("command", [run, weights])
def test_a_recipe_that_is_no_readable_file_is_one_line(
    call, recipe: Path, capsys: pytest.CaptureFixture[str], command
) -> None:
    recipe.unlink()
    recipe.mkdir()
    assert call(command=command) == 2
    assert f"{recipe}: Is a directory; give the path of a recipe" in the_line(capsys)
    recipe.rmdir()
    recipe.write_bytes(b"\xff\xfe")
    assert call(command=command) == 2
    assert f"{recipe}: not TOML" in the_line(capsys)


@pytest.mark.slow
async def test_a_resume_says_which_of_the_optimizers_settings_changed(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    at = recipe.parent / "run"
    create(at, "resumed", to_toml(load_recipe(recipe)))
    wishes = ("learner.weight_decay=0.1", "learner.betas=[0.8, 0.9]", "learner.eps=1e-6")
    unusable = ("learner.train_only=['.absent.']",)  # so that the run ends as soon as it has said so
    changes = [word for wish in wishes + unusable for word in ("--set", wish)]
    trainer = await start(redis_url, recipe, "--run-dir", at, "--resume", *changes)
    assert await trainer.ended() == 2, trainer.output
    assert "changed since the run began: learner.weight_decay: 0.0 -> 0.1" in trainer.output
    assert "changed since the run began: learner.betas: (0.9, 0.95) -> (0.8, 0.9)" in trainer.output
    assert "changed since the run began: learner.eps: 1e-08 -> 1e-06" in trainer.output
