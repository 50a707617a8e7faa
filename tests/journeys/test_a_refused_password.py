"""Trainer, worker and command line say at once that Redis refuses the password, in one line without it, and end with 2."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from infra.redis_server import FORGETFUL, own_redis
from pipeline.taskfile import write_tasks
from tests.conftest import free_ports
from tests.pipeline import samples

RECIPE = """
name = "tiny"
model = "{model}"
num_steps = 1
[tasks]
train = "train.jsonl"
heldout = "heldout.jsonl"
unverified = "allow"
[rollout]
group_size = 2
agent = "agent.yaml"
[rollout.sampling]
max_new_tokens = 16
[rollout.limits]
context_tokens = 512
[admission]
max_lag_versions = 1
[batch]
groups_per_step = 1
[learner]
lr = 1e-3
micro_batch_tokens = 512
[weights]
engines = "none"
"""


@pytest.fixture(scope="module")
def locked() -> Iterator[int]:
    """The port of a Redis whose password nobody here knows."""
    (port,) = free_ports(1)
    with own_redis({**FORGETFUL, "requirepass": "right", "port": str(port)}):
        yield port


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "agent.yaml").write_text(Path("trainer/recipes/demo_agent.yaml").read_text())
    write_tasks(tmp_path / "train.jsonl", [samples.TASK])
    write_tasks(tmp_path / "heldout.jsonl", [replace(samples.TASK, id="demo:text-3")])
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(model=tiny_model))
    return path


@pytest.mark.slow_but_for("pipeline-:wr0ng@-refuses the password", "pipeline--wants a password")
@pytest.mark.parametrize(("login", "said"), [(":wr0ng@", "refuses the password"), ("", "wants a password")])
@pytest.mark.parametrize("module", ["pipeline", "workers.run", "trainer.run", "trainer.evaluate"])
def test_a_refused_password_is_one_line(
    module: str, login: str, said: str, locked: int, recipe: Path, tmp_path: Path
) -> None:
    run = [str(recipe), "--run-dir", str(tmp_path / "run")]
    words = {"pipeline": ["status"], "trainer.run": run, "trainer.evaluate": run}
    environment = os.environ | {"SWERVE_REDIS_URL": f"redis://{login}127.0.0.1:{locked}/0"}
    command = [sys.executable, "-m", module, *words.get(module, [])]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    shown = "redis://:***@127.0.0.1" if login else "redis://127.0.0.1"
    assert f"Redis at {shown}:{locked}/0 {said}" in line
    assert "set SWERVE_REDIS_URL" in line
    assert "wr0ng" not in ended.stdout
