"""The engine as our workers and learner use it: a real SGLang on the CPU, behind the real router."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from infra.serving import engine
from tests.conftest import Serving


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        yield session


async def generate(http: aiohttp.ClientSession, url: str, num_tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": True}
    async with http.post(f"{url}/generate", json=body) as response:
        return await response.json()


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(url, json=body) as response:
        return await response.json()


async def test_every_sampled_token_has_a_logprob_and_a_weight_version(
    http: aiohttp.ClientSession, serving: Serving
) -> None:
    reply = await generate(http, serving.router_url, 8)
    logprobs = reply["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in logprobs] == reply["output_ids"]
    assert all(logprob < 0 for logprob, _, _ in logprobs)
    spans = reply["meta_info"]["weight_versions"]
    assert [(span["start"], span["end"]) for span in spans] == [(0, 8)]


@pytest.mark.slow
async def test_new_weights_arrive_in_the_middle_of_a_request(
    http: aiohttp.ClientSession, serving: Serving
) -> None:
    for version in map(str, range(3, 8)):  # again, if a slow machine comes when the reply is over
        spans = await spans_across_an_update(http, serving, version)
        if len(spans) > 1:
            break
    before, after = spans
    assert before["start"] == 0
    assert 0 < before["end"] == after["start"]
    assert after == {"version": version, "start": before["end"], "end": 1500}


async def spans_across_an_update(
    http: aiohttp.ClientSession, serving: Serving, version: str
) -> list[dict[str, Any]]:
    """Which weights drew which of a reply's 1,500 tokens; new ones came once the engine worked on it."""
    request = asyncio.create_task(generate(http, serving.router_url, 1500))
    await running(http, serving, request)
    await post(http, f"{serving.engine_url}/pause_generation", {"mode": "retract"})
    async with http.get(f"{serving.engine_url}/health") as response:
        assert response.status == 200, "the router would drop an engine that is paused"
    update = {"model_path": str(serving.model_dir), "weight_version": version, "flush_cache": True}
    updated = await post(http, f"{serving.engine_url}/update_weights_from_disk", update)
    await post(http, f"{serving.engine_url}/continue_generation", {})
    assert updated["success"]
    return (await request)["meta_info"]["weight_versions"]


async def running(http: aiohttp.ClientSession, serving: Serving, request: asyncio.Task[Any]) -> None:
    """Return once the engine works on the request, or has answered it."""
    while not request.done():
        async with http.get(f"{serving.engine_url}/v1/loads") as response:
            if (await response.json())["loads"][0]["num_running_reqs"]:
                return
        await asyncio.sleep(0.02)


async def test_one_control_call_reaches_every_engine(http: aiohttp.ClientSession, serving: Serving) -> None:
    async with http.get(f"{serving.router_url}/v1/rl/engine/model_info?selector=engine=sglang") as response:
        results = (await response.json())["results"]
    assert [result["url"] for result in results.values()] == [serving.engine_url]


def in_a_shimmed_interpreter(code: str) -> subprocess.CompletedProcess[str]:
    arguments = engine.parse_arguments(["--model", "unused"])
    environment = engine.engine_environment(arguments, dict(os.environ))
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("import sgl_kernel; sgl_kernel.silu_and_mul(1)", "sgl_kernel.silu_and_mul"),
        ("from torchvision.transforms import Resize; Resize(3)", "torchvision.transforms.Resize"),
        ("import triton; triton.jit(lambda x: x)", "triton.jit"),
        ("import soundfile; class_ = type('C', (soundfile.SoundFile,), {}); class_()", "C"),
    ],
)
def test_a_stand_in_refuses_to_be_called(call: str, name: str) -> None:
    run = in_a_shimmed_interpreter(call)
    assert run.returncode == 1
    assert f"{name} was called, but it is a stand-in" in run.stderr


def test_a_stand_in_may_be_named_while_a_module_is_imported(tmp_path: Path) -> None:
    source = (
        "import triton\n\n@triton.jit\ndef kernel(x: triton.language.constexpr | None):\n    return x + 1\n"
    )
    (tmp_path / "kernels.py").write_text(source)
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.kernel(1))"
    run = in_a_shimmed_interpreter(code)
    assert (run.returncode, run.stdout) == (0, "2\n"), run.stderr


def test_a_package_that_is_installed_is_never_replaced() -> None:
    code = "import sitecustomize, sys, json; sys.meta_path.append(sitecustomize.StandInFinder({'json'}))"
    code += "; print(json.dumps([1]))"
    assert in_a_shimmed_interpreter(code).stdout == "[1]\n"
