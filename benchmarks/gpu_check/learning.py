"""What the learner computes on this device: as on a CPU, and the same after a resume."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.gpu_check.steps import DeviceKind, Findings
from benchmarks.learner_methods import batch_of, make_batch
from benchmarks.small_models import FAMILIES, write_model
from trainer.learner import backend, hf
from trainer.learner.config import LearnerConfig, LossConfig, StepMetrics
from trainer.learner.megatron import Learner
from trainer.learner.optimizer import Undo

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 64

LOGPROB_BOUND = 2e-4
"""Nats, at most, between fp32 on a GPU and on a CPU. TF32 rounds inputs to eleven bits, 5e-4 of each, and would be above."""

GRADIENT_BOUND = 1e-3
"""Of the norm of the whole gradient, in fp32."""

ROUNDING_FACTOR = 2.0
"""bf16 on a GPU may be this many times as far from fp32 as bf16 on the CPU is, which is measured beside it: both round to eight bits, in
another order. A mixture sends some tokens to other experts then, so each family has a distance of its own."""

ROUNDING_FLOOR = 0.02
"""Nats and share of the gradient that are added to it, for families whose CPU happens to be close."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a learner made of one batch."""

    logprobs_N: npt.NDArray[np.float32]  # nats, of the trained tokens of all samples
    gradient: npt.NDArray[np.float32]  # of all parameters, side by side in the order of their names


def parity(device: DeviceKind) -> Findings:
    return compared(FAMILIES)


def compared(families: Mapping[str, Mapping[str, Any]]) -> Findings:
    """Each family in fp32 and bf16 on this device, against a process that sees no GPU."""
    found = Findings.none()
    with tempfile.TemporaryDirectory(prefix="swerve-parity-") as temporary:
        directory = Path(temporary)
        for family, changes in families.items():
            write_model(directory / family, family, **changes)
        _compute_on_cpu(directory)
        for family in families:
            found.faults += _compare(found, family, directory)
    return found


def _compare(found: Findings, family: str, directory: Path) -> list[str]:
    """The faults of one family. An error of the learner is one, so that the other families are still compared."""
    try:
        here = {dtype: compute(directory / family, dtype) for dtype in ("fp32", "bf16")}
    except Exception as error:
        return [f"{family}: {type(error).__name__}: {error}"]
    cpu = {dtype: _read(directory / f"{family}.{dtype}.npz") for dtype in ("fp32", "bf16")}
    exact = cpu["fp32"]
    gap = np.abs(here["fp32"].logprobs_N - exact.logprobs_N).max()
    found.at_most(f"{family}, fp32, log-probs, nats at most", float(gap), LOGPROB_BOUND)
    found.at_most(f"{family}, fp32, gradient, share of its norm", _apart(here["fp32"], exact), GRADIENT_BOUND)
    rounded, bound = _mean_gap(here["bf16"], exact), _mean_gap(cpu["bf16"], exact)
    found.at_most(
        f"{family}, bf16, log-probs, nats in the mean", rounded, ROUNDING_FACTOR * bound + ROUNDING_FLOOR
    )
    rounded, bound = _apart(here["bf16"], exact), _apart(cpu["bf16"], exact)
    found.at_most(
        f"{family}, bf16, gradient, share of its norm", rounded, ROUNDING_FACTOR * bound + ROUNDING_FLOOR
    )
    return []


def _mean_gap(one: Computed, other: Computed) -> float:
    return float(np.abs(one.logprobs_N - other.logprobs_N).mean())


def _apart(one: Computed, other: Computed) -> float:
    """The norm of the difference of two gradients, as a share of that of the second."""
    return float(np.linalg.norm(one.gradient - other.gradient) / np.linalg.norm(other.gradient))


def compute(directory: Path, dtype: str) -> Computed:
    """By a learner in this process: one forward pass, and the gradient of one step."""
    backend.join()
    config = LearnerConfig(
        lr=1e-3,
        eps=1e-5,
        clip_grad=0.0,
        micro_batch_tokens=256,
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        loss=LossConfig(kind="reinforce"),
    )
    learner = Learner(config, model_directory=directory)
    batch = batch_of(make_batch(24, 100, VOCAB_SIZE, step=1))
    logprobs = learner.logprobs(batch.samples, 1.0)
    trained = [values[sample.trained_T] for values, sample in zip(logprobs, batch.samples, strict=True)]
    metrics = learner.step(batch)
    assert isinstance(metrics, StepMetrics), metrics
    parameters: dict[str, Any] = dict(learner._model.named_parameters())
    gradients = {name: one.main_grad for name, one in parameters.items() if one.requires_grad}
    flat = [gradients[name].float().cpu().numpy().ravel() for name in sorted(gradients)]
    return Computed(np.concatenate(trained), np.concatenate(flat))


def _compute_on_cpu(directory: Path) -> None:
    """The same in a process that sees no GPU, of which each family and type leaves a file."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.learning", str(directory)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the learner on the CPU failed: {done.stderr[-2000:]}")


def write_computed(directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        for dtype in ("fp32", "bf16") if path.is_dir() else ():
            computed = compute(path, dtype)
            np.savez(f"{path}.{dtype}.npz", logprobs_N=computed.logprobs_N, gradient=computed.gradient)


def _read(path: Path) -> Computed:
    with np.load(path) as arrays:
        return Computed(arrays["logprobs_N"], arrays["gradient"])


NEXT_STEP_BOUND = 2e-3
"""Between the next losses of two learners with the same state: the backward pass of flash attention adds in the order in which its blocks
finish, so on a GPU they differ between any two runs. On a CPU they may not."""


def resume(device: DeviceKind) -> Findings:
    """A learner saves after two steps and takes two more; two others are restored from that, one after the other."""
    found = Findings.none()
    backend.join()
    config = LearnerConfig(
        lr=1e-3, micro_batch_tokens=1024, dtype="bf16", loss=LossConfig(kind="reinforce"), warmup_steps=4
    )
    width = 512 if device == "cuda" else 64
    shape = {"hidden_size": width, "num_hidden_layers": 4, "head_dim": 64, "vocab_size": 2 * width}
    with tempfile.TemporaryDirectory(prefix="swerve-resume-") as temporary:
        model, saved = Path(temporary) / "model", Path(temporary) / "checkpoint"
        write_model(model, "qwen3", **shape)
        first = Learner(config, model_directory=model)
        _train(first, 2, vocab_size=2 * width)
        first.save(saved, b"cursor")
        state, logprobs = _state(first), _logprobs(first, 2 * width)
        first.export(Path(temporary) / "exported")
        expected = _train(first, 2, vocab_size=2 * width)
        runs: list[list[float]] = []
        for name in ("restored", "restored again"):
            learner = Learner(config, model_directory=model)
            extra = learner.restore(saved)
            found.require(
                f"{name}, own data", extra.decode(), holds=extra == b"cursor", otherwise="it is lost"
            )
            _require_equal(found, f"{name}, weights and optimizer", _state(learner), state)
            _require_equal(found, f"{name}, log-probs", _logprobs(learner, 2 * width), logprobs)
            learner.export(Path(temporary) / name)
            exports = (_tensors(Path(temporary) / one) for one in (name, "exported"))
            _require_equal(found, f"{name}, exported weights", *exports)
            runs.append(_train(learner, 2, vocab_size=2 * width))
    bound = NEXT_STEP_BOUND if device == "cuda" else 0.0
    found.at_most("next losses, against those of the first learner", _relative(runs[0], expected), bound)
    found.at_most("next losses, of the two restored ones", _relative(runs[1], runs[0]), bound)
    return found


def _require_equal(
    found: Findings, name: str, observed: Iterable[Tensor], expected: Iterable[Tensor]
) -> None:
    """Notes the number of values that differ in any bit."""
    pairs = list(zip(observed, expected, strict=True))
    num_values = sum(one.numel() for one, _ in pairs)
    num_different = sum(int((one.cpu() != other.cpu()).sum()) for one, other in pairs)
    found.require(
        f"{name}, values that differ",
        f"{num_different} of {num_values}",
        holds=num_values > 0 and num_different == 0,
        otherwise=f"{name}: {num_different} of {num_values} values differ from those that were saved",
    )


def _train(learner: Learner, num_steps: int, *, vocab_size: int) -> list[float]:
    """The losses of the next steps, each on the batch of its number."""
    losses: list[float] = []
    for step in range(learner.steps + 1, learner.steps + 1 + num_steps):
        metrics = learner.step(batch_of(make_batch(8, 200, vocab_size, step=step)))
        assert isinstance(metrics, StepMetrics), metrics
        losses.append(metrics.loss)
    return losses


def _state(learner: Learner) -> list[Tensor]:
    """Copies of the weights, of their fp32 originals, and of Adam's moments."""
    kept = Undo(learner._model, learner._optimizer)
    moments = (
        state[name] for part in kept._states for state in part for name in sorted(state) if state[name].dim()
    )
    originals = (tensor for part in kept._parameters for tensor in part)
    return [*kept._weights.values(), *originals, *moments]


def _logprobs(learner: Learner, vocab_size: int) -> list[Tensor]:
    samples = batch_of(make_batch(8, 200, vocab_size, step=99)).samples
    return [torch.from_numpy(one) for one in learner.logprobs(samples, 1.0)]


def _tensors(directory: Path) -> list[Tensor]:
    exported = hf.SafetensorsDirectory(directory)
    return [exported[name] for name in sorted(exported)]


def _relative(observed: list[float], expected: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(observed, expected, strict=True))


def own_tests(device: DeviceKind) -> Findings:
    """pytest over the learner's tests, in a process of its own."""
    found = Findings.none()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not cpu_only", "tests/trainer/learner"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-20_000:], done.stderr[-5_000:])
    last = done.stdout.strip().rpartition("\n")[2]
    for number, what in re.findall(r"(\d+) (passed|failed|error|skipped)", last):
        found.numbers[what] = int(number)
    found.faults += re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, flags=re.MULTILINE)
    if done.returncode and not found.faults:
        found.faults.append(f"pytest ended with status {done.returncode}")
    return found


if __name__ == "__main__":
    write_computed(Path(sys.argv[1]))
