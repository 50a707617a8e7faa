"""Our engine and router as an OpenAI-compatible server: for our evaluation, and for mini-swe-agent itself."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import bug
from infra import processes
from pipeline.taskfile import write_tasks
from tests.conftest import Serving, answers_ok, free_ports

pytestmark = pytest.mark.docker

MODEL = "tiny"
MINI = """
import json, sys
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.openrouter_textbased_model import OpenRouterTextbasedModel
url, model_name = sys.argv[1:]
model = OpenRouterTextbasedModel(
    model_name=model_name, model_kwargs={"max_tokens": 24, "temperature": 1.0}, cost_tracking="ignore_errors"
)
model._api_url = url + "/v1/chat/completions"
templates = {"system_template": "You fix code.", "instance_template": "Fix: {{task}}"}
agent = DefaultAgent(model, LocalEnvironment(), step_limit=2, cost_limit=0, **templates)
result = agent.run("add() subtracts")
print(json.dumps([result["exit_status"], [message["role"] for message in agent.messages]]))
"""


@pytest.fixture(scope="module", autouse=True)
def image(task_image: str) -> Iterator[None]:
    with bug.image():
        yield


@pytest.fixture(scope="module")
def serving(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """An engine that loads its tokenizer, behind a router."""
    logs = tmp_path_factory.mktemp("chat")
    engine_port, router_port, metrics_port = free_ports(3)
    engine_url, router_url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{router_port}"
    engine = ["infra.serving.engine", "--model", str(tiny_model), f"--port={engine_port}", "--chat"]
    router = ["infra.serving.router", f"--engine={engine_url}", f"--port={router_port}"]
    commands = {
        "engine": [*engine, "--", "--served-model-name", MODEL],
        "router": [*router, f"--metrics-port={metrics_port}"],
    }
    with ExitStack() as cleanup:
        children = {
            name: processes.start(name, [sys.executable, "-m", *command], log=logs / f"{name}.log")
            for name, command in commands.items()
        }
        for child in children.values():
            cleanup.callback(child.stop, grace_s=1)
        processes.wait_until(
            lambda: answers_ok(f"{router_url}/readiness"),
            child=children["engine"],
            timeout_s=300,
            log=logs / "engine.log",
        )
        yield Serving(router_url, engine_url, tiny_model, f"http://127.0.0.1:{metrics_port}/metrics")


@pytest.mark.slow
async def test_our_engine_is_evaluated_behind_our_router(serving: Serving, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", [bug.task()])
    where = ["--api-base", f"{serving.router_url}/v1", "--model", MODEL, "--local"]
    limits = ["--agent", "trainer/recipes/demo_agent.yaml", "--max-tokens", "24", "--step-limit", "2"]
    words = [str(tmp_path / "tasks.jsonl"), *where, *limits, "--out", str(tmp_path / "out"), "--samples", "2"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trainer.evaluate", *words), stdout=PIPE, stderr=PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["episodes"], summary["errors"], summary["resolved"]) == (2, 0, 0), "it can only babble"
    assert summary["prompt_tokens"] > summary["completion_tokens"] > 0
    saved = json.loads((tmp_path / "out/pricing-1/pricing-1.traj.json").read_text())
    assert [message["role"] for message in saved["messages"]][:3] == ["system", "user", "assistant"]


@pytest.mark.slow
async def test_mini_swe_agent_itself_plays_against_our_router(serving: Serving, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MINI, serving.router_url, MODEL),
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "MSWEA_SILENT_STARTUP": "1"},
        stdout=PIPE,
        stderr=PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    status, roles = json.loads(out.decode().splitlines()[-1])
    assert status == "LimitsExceeded"
    assert roles[:2] == ["system", "user"]
    assert roles.count("assistant") + roles.count("user") > 2
