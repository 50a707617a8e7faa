"""The learner beside the engines: weights that are sent to another GPU, log-probs of SGLang, and a short real run."""

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import torch

from benchmarks import device as measuring
from benchmarks.gpu_check.inventory import engine_python
from benchmarks.gpu_check.random_models import write_random
from benchmarks.gpu_check.steps import DeviceKind, Findings, NotRun
from benchmarks.report import significant
from benchmarks.small_models import SHAPE, write_model
from infra import processes
from infra.serving.check.target import Model, Reply, Target
from pipeline.journal.reading import journal_of, read
from pipeline.journal.rows import StepRow
from trainer.batching.batch import Sample
from trainer.learner import backend
from trainer.learner.config import LearnerConfig
from trainer.learner.megatron import Learner
from trainer.weights.distributed import Sender, SentTensor, buckets

ROOT = Path(__file__).parents[2]


def publication(device: DeviceKind) -> Findings:
    """From `trainer.learner.weight_sender` to a process that joins as SGLang's ranks do. On a CPU by gloo."""
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and num_gpus < 2:
        raise NotRun(f"it needs two GPUs, and torch sees {num_gpus}")
    found = Findings.none()
    with tempfile.TemporaryDirectory(prefix="swerve-publication-") as temporary:
        shape = measuring.QWEN3_600M.model if device == "cuda" else SHAPE
        write_random(Path(temporary), {"model_type": "qwen3"} | shape)
        asyncio.run(_publish(found, Path(temporary), "nccl" if device == "cuda" else "gloo"))
    return found


async def _publish(found: Findings, directory: Path, by: str) -> None:
    sender = await Sender.start()
    receiver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.gpu_check.weight_receiver"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        began = time.perf_counter()
        join = {"join": sender.port, "group": sender.group, "backend": by}
        await asyncio.gather(sender.join(2, by), _asked(receiver, join))
        found.numbers["seconds until both have joined"] = round(time.perf_counter() - began, 2)
        num_tensors = num_bytes = num_different = 0
        began = time.perf_counter()
        for bucket in buckets(directory):
            command = {"receive": [msgspec.to_builtins(tensor) for tensor in bucket]}
            _, answer = await asyncio.gather(sender.send(bucket), _asked(receiver, command))
            num_different += answer["different"]
            num_tensors, num_bytes = num_tensors + len(bucket), num_bytes + _num_bytes(bucket)
        seconds = time.perf_counter() - began
    finally:
        receiver.kill()
        await receiver.wait()
        await sender.end()
    found.numbers |= {"by": by, "tensors": num_tensors, "MiB": round(num_bytes / 2**20, 1)}
    found.numbers["MiB a second, with reading and comparing"] = round(num_bytes / 2**20 / seconds, 1)
    found.require(
        "tensors that differ",
        num_different,
        holds=num_tensors > 0 and num_different == 0,
        otherwise=f"{num_different} of {num_tensors} tensors arrived changed",
    )


async def _asked(process: asyncio.subprocess.Process, command: dict[str, Any]) -> dict[str, int]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(command) + b"\n")
    await process.stdin.drain()
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"the receiving process ended with status {await process.wait()}")
    return msgspec.json.decode(line)


def _num_bytes(bucket: Sequence[SentTensor]) -> int:
    return sum(tensor.num_bytes for tensor in bucket)


ENGINE_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "initializer_range": 0.08,
}
VOCAB_SIZE, MAX_POSITIONS = 2048, 2048
PROMPT_TOKENS, ENGINE_START_S = 100, 600.0
NUM_REPLIES: dict[DeviceKind, int] = {"cuda": 64, "cpu": 8}
REPLY_TOKENS: dict[DeviceKind, int] = {"cuda": 200, "cpu": 24}

GAP_FACTOR = 1.5
"""Engine and learner each round to eight bits, in another order. How far that takes the learner from fp32 is measured beside it; of two
computations that are each so far from it, and know nothing of each other, the difference is 1.41 times that."""

GAP_FLOOR_NATS = 0.01


def engine(device: DeviceKind) -> Findings:
    """Random weights, so that the log-probs depend on every layer, and no network is needed."""
    python = engine_python()
    if python is None:
        raise NotRun(
            "SGLang is neither in this environment nor in .venv-engine, which `make setup-gpu` makes"
        )
    found = Findings.none()
    with tempfile.TemporaryDirectory(prefix="swerve-engine-") as temporary:
        model = Path(temporary) / "model"
        write_model(
            model, "llama", **ENGINE_SHAPE, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_POSITIONS
        )
        prompts, replies = _sampled(found, python, model, Path(temporary) / "log", device)
        samples = [_sample(index, *pair) for index, pair in enumerate(zip(prompts, replies, strict=True))]
        half, exact = (_logprobs(model, samples, dtype) for dtype in ("bf16", "fp32"))
    behaviour = np.concatenate([one.behaviour_logprobs_T[one.trained_T] for one in samples])
    rounding = float(np.abs(half - exact).mean())
    found.numbers["tokens"] = len(behaviour)
    found.numbers["learner in bf16 against fp32, nats in the mean"] = round(rounding, 5)
    found.numbers["engine against learner in fp32, nats in the mean"] = round(
        float(np.abs(behaviour - exact).mean()), 5
    )
    found.numbers["engine against learner in bf16, nats at most"] = round(
        float(np.abs(behaviour - half).max()), 4
    )
    bound = GAP_FACTOR * rounding + GAP_FLOOR_NATS
    mean = float(np.abs(behaviour - half).mean())
    found.at_most("engine against learner in bf16, nats in the mean", mean, bound)
    return found


def _sampled(
    found: Findings, python: str, model: Path, log: Path, device: DeviceKind
) -> tuple[list[list[int]], list[Reply]]:
    """What an engine samples at temperature 1 to random prompts, all of them at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [python, "-m", "infra.serving.engine", "--model", str(model), "--port", str(port)]
    child = processes.start(
        "engine",
        [*command, "--device", device, "--dtype", "bfloat16"],
        log=log,
        environment=_environment(),
    )
    try:
        waited = processes.wait_until(lambda: _answers(url), child=child, timeout_s=ENGINE_START_S, log=log)
        found.numbers["seconds until the engine answers"] = round(waited, 1)
        return asyncio.run(_ask(url, device))
    finally:
        child.stop(grace_s=10)
        print(processes.tail(log, 40))


async def _ask(url: str, device: DeviceKind) -> tuple[list[list[int]], list[Reply]]:
    about = Model(VOCAB_SIZE, MAX_POSITIONS, frozenset(), "bfloat16")
    async with aiohttp.ClientSession() as http:
        target = Target(http, [url], "", about, num_burst_requests=0)
        prompts = [target.prompt(PROMPT_TOKENS) for _ in range(NUM_REPLIES[device])]
        asked = (target.sample(url, prompt, REPLY_TOKENS[device], temperature=1.0) for prompt in prompts)
        return prompts, list(await asyncio.gather(*asked))


def _environment() -> dict[str, str]:
    """Without what is set for a learner's allocator: an engine has its own settings, and a trainer sets it itself."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTORCH_CUDA_ALLOC_CONF"}
    return inherited | {"PYTHONPATH": str(ROOT)}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False


def _sample(index: int, prompt: list[int], reply: Reply) -> Sample:
    trained = np.arange(len(prompt) + len(reply.output_ids)) >= len(prompt)
    logprobs = np.zeros(len(trained), np.float32)
    logprobs[trained] = reply.logprobs
    return Sample(
        request_id=str(index),
        group_id="0",
        branch=0,
        tokens_T=np.array([*prompt, *reply.output_ids], np.int32),
        trained_T=trained,
        behaviour_logprobs_T=logprobs,
        advantages_T=np.zeros(len(trained), np.float32),
        versions_T=np.where(trained, 0, -1).astype(np.int32),
    )


def _logprobs(model: Path, samples: Sequence[Sample], dtype: str) -> np.ndarray:
    """By the learner, of the sampled tokens, nats."""
    backend.join()
    config = LearnerConfig(
        lr=1e-6,
        micro_batch_tokens=4096,
        dtype=dtype,  # pyright: ignore[reportArgumentType]
    )
    values = Learner(config, model_directory=model).logprobs(samples, 1.0)
    return np.concatenate([one[sample.trained_T] for one, sample in zip(values, samples, strict=True)])


RUN, TASKS = ROOT / "runs" / "gpu-check", ROOT / "runs" / "tasks" / "gpu-check"
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
NUM_STEPS = 2
NEEDED_MODULES, NEEDED_PROGRAMS = ("sglang", "smg", "docker", "arq"), ("dockerd", "redis-server")

RUN_GAP_NATS = 0.1
"""Between engine and learner, both in bf16 with the same weights. On a CPU it was 0.044 over 545 tokens and 0.048 over 832."""


def short_run(device: DeviceKind) -> Findings:
    """Two steps of SmolLM2-135M on the demo's tasks, in few and short episodes, as `infra.local` runs them."""
    missing = [name for name in NEEDED_MODULES if importlib.util.find_spec(name) is None]
    missing += [name for name in NEEDED_PROGRAMS if shutil.which(name) is None]
    if missing:
        raise NotRun(f"it needs all of a run in one environment, and {', '.join(missing)} is missing")
    _prepare()
    _call(*_run_command(device))
    return _judged(list(read(journal_of(RUN), StepRow)))


def _judged(rows: Sequence[StepRow]) -> Findings:
    """What the journal of the run says."""
    found = Findings.none()
    found.require(
        "steps",
        len(rows),
        holds=len(rows) == NUM_STEPS,
        otherwise=f"{len(rows)} of {NUM_STEPS} steps were taken",
    )
    if rows:
        smallest = min(row.grad_norm for row in rows)
        found.require(
            "smallest gradient norm",
            significant(smallest),
            holds=smallest > 0,
            otherwise="a step had no gradient, so the versions that were published are equal",
        )
    found.numbers["trained tokens"] = sum(row.num_trained_tokens for row in rows)
    measured = [row for row in rows if row.is_gap_measured]
    found.require(
        "steps with a measured gap",
        len(measured),
        holds=bool(measured),
        otherwise="no step was audited, so engine and learner were not compared",
    )
    if measured:
        num_tokens = sum(row.num_gap_tokens for row in measured)
        weighted = sum((row.logprob_gap_mean or 0.0) * row.num_gap_tokens for row in measured)
        found.numbers["tokens whose gap was measured"] = num_tokens
        found.numbers["log-prob gap, nats at most"] = max(row.logprob_gap_max or 0.0 for row in measured)
        found.at_most("log-prob gap, nats in the mean", weighted / num_tokens, RUN_GAP_NATS)
    return found


def _prepare() -> None:
    """Tasks and weights, kept for the next time."""
    if not (TASKS / "heldout.jsonl").exists():
        counts = ("--seed", "0", "--train", "4", "--heldout", "4")
        _call("-m", "trainer.demo", "tasks", "--out", str(TASKS / "family"), *counts)
        for part in ("train", "heldout"):
            source, target = str(TASKS / "family" / part), str(TASKS / f"{part}.jsonl")
            _call("-m", "workers.tasksets", "import", "fleet", source, "--out", target)
    _call("-m", "infra.smollm2", "--out", str(SMOLLM2))


def _run_command(device: DeviceKind) -> list[str]:
    settings = {
        "num_steps": NUM_STEPS,
        "tasks.train": TASKS / "train.jsonl",
        "tasks.heldout": TASKS / "heldout.jsonl",
        "tasks.heldout_sets": "{}",
        "model": SMOLLM2,
        "learner.dtype": "bf16",
        "rollout.group_size": 2,
        "rollout.limits.turns": 3,
        "batch.groups_per_step": 1,
        # The model solves nothing as it comes, so its groups have no signal of their own: a judge is asked, and the gradient is that of the
        # entropy.
        "learner.loss.entropy": 0.01,
        "judge.method": "rule",
        "judge.name": "evidence",
        "credit.method": "outcome_then_steps",
        "batch.train_without_signal": "true",
        "audit.share": 1.0,
        "evaluation.episodes": 4,
        "evaluation.greedy_episodes": 2,
    }
    return [
        *("-m", "infra.local", "trainer/recipes/smollm2_135m.toml", "--run-dir", str(RUN), "--fresh"),
        *("--model", str(SMOLLM2), "--device", device, "--dtype", "bfloat16"),
        *("--prepare", f"-m trainer.demo images {TASKS / 'family'}"),
        *("--prepare", f"-m workers.verify {TASKS / 'train.jsonl'} --new", "--"),
        *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
    ]


def _call(*words: str) -> None:
    """Run one of our programs with its output in this step's log. Raises RuntimeError if it fails."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=_environment(), check=False)
    if done.returncode:
        raise RuntimeError(f"python {' '.join(words[:3])} ended with status {done.returncode}")
