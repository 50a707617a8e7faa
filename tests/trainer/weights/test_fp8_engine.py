"""A real engine that was started from weights in FP8 samples from each version that a learner in more bits publishes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from benchmarks.small_models import EXPERTS, write_model
from infra import processes
from infra.serving import engine
from pipeline.weights import WeightVersion
from tests.conftest import answers_ok, free_ports
from tests.trainer.learner.tiny import config, make_samples, take_step
from trainer.batching.batch import Sample
from trainer.learner import backend
from trainer.learner.fp8 import write_fp8
from trainer.learner.megatron import Learner
from trainer.weights.engines import Engines
from trainer.weights.transport import DiskTransport

SHAPE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 128, "vocab_size": 512}
MIXTURE = EXPERTS | SHAPE | {"moe_intermediate_size": 128, "norm_topk_prob": True}
PROMPT = [5, 6, 7, 8]
LARGEST_NATS = 2e-4
"""Both compute in fp32 from the same numbers; what is left is the order of sums."""


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    torch.set_num_threads(1)
    backend.join()
    yield
    backend.leave()


@contextmanager
def plain_engine(model: Path, log: Path) -> Iterator[str]:
    """The address of an engine of weights in FP8 with `plain_fp8`; stopped at the end."""
    (port,) = free_ports(1)
    arguments = engine.parse_arguments([f"--model={model}", f"--port={port}", "--dtype=float32"])
    command = engine.engine_command(arguments)
    command[command.index("forked_server")] = "tests.trainer.weights.plain_fp8"
    environment = engine.engine_environment(arguments, dict(os.environ))
    environment["PYTHONPATH"] += f"{os.pathsep}{Path.cwd()}"
    child = processes.start("engine", command, log=log, environment=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        processes.wait_until(partial(answers_ok, f"{url}/health"), child=child, timeout_s=300, log=log)
        yield url
    finally:
        child.stop(grace_s=1)


async def reply_of(url: str) -> tuple[str, list[int], np.ndarray]:
    """The version that a reply reports, its tokens, and their log-probs."""
    sampling = {"max_new_tokens": 60, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.post(f"{url}/generate", json=body) as response,
    ):
        found: dict[str, Any] = (await response.json())["meta_info"]
    sampled = found["output_token_logprobs"]
    return found["weight_version"], [one[1] for one in sampled], np.array([one[0] for one in sampled])


def gap(model: Path, tokens: list[int], logprobs: np.ndarray) -> float:
    """The largest difference, in nats, to a learner that reads the weights in a directory."""
    every = np.array([*PROMPT, *tokens], dtype=np.int32)
    trained = np.arange(len(every)) >= len(PROMPT)
    nothing = np.zeros(len(every), dtype=np.float32)
    sample = Sample(
        request_id="r",
        group_id="g",
        branch=0,
        tokens_T=every,
        trained_T=trained,
        behaviour_logprobs_T=nothing,
        advantages_T=nothing,
        versions_T=np.where(trained, 0, -1).astype(np.int32),
    )
    ours = np.concatenate(
        Learner(config(micro_batch_tokens=128), model_directory=model).logprobs([sample], 1.0)
    )
    return float(np.abs(ours[-len(tokens) :] - logprobs).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape"), [("qwen3", SHAPE), ("qwen3_moe", MIXTURE)], ids=["dense", "mixture"]
)
async def test_an_engine_samples_from_the_numbers_and_scales_of_each_version(
    family: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    plain = write_model(tmp_path / "plain", family, **shape)
    write_fp8(plain, tmp_path / "fp8")
    learner = Learner(config(), model_directory=tmp_path / "fp8", packs_exports=True)
    transport = DiskTransport("run", directory=tmp_path / "weights", export=learner.export)
    with plain_engine(tmp_path / "fp8", tmp_path / "engine.log") as url:
        _, *reply = await reply_of(url)
        assert gap(tmp_path / "fp8", *reply) < LARGEST_NATS
        assert gap(plain, *reply) > 0.1
        before = tmp_path / "fp8"
        async with Engines("http://127.0.0.1:1", precision="fp8") as engines:
            for number in (1, 2):
                take_step(learner, make_samples(vocab_size=512, seed=number), step=number)
                version: WeightVersion = await transport.prepare(number, number)
                await engines.pause(url, "retract")
                await transport.deliver(engines, url, version, "retract")
                await engines.resume(url)
                name, *reply = await reply_of(url)
                assert name == version.name
                assert gap(Path(version.directory), *reply) < LARGEST_NATS
                assert gap(before, *reply) > 10 * LARGEST_NATS
                before = Path(version.directory)
