"""Our engine and router as an OpenAI-compatible server: for our evaluation, and for mini-swe-agent itself."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from benchmarks import bug
from pipeline.taskfile import write_tasks
from tests.conftest import Serving

pytestmark = pytest.mark.docker

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


async def served_model(serving: Serving) -> str:
    """The name under which the router has the model."""
    async with aiohttp.ClientSession() as session, session.get(f"{serving.router_url}/v1/models") as response:
        return (await response.json())["data"][0]["id"]


async def test_our_engine_is_evaluated_behind_our_router(serving: Serving, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", [bug.task()])
    where = ["--api-base", f"{serving.router_url}/v1", "--model", await served_model(serving), "--local"]
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


async def test_mini_swe_agent_itself_plays_against_our_router(serving: Serving, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MINI, serving.router_url, await served_model(serving)),
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
