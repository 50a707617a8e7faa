"""The learner on this machine's device: `python -m benchmarks.device [--json] [--short]`; `make gpu-check` measures with it on a GPU.

Compared are memory at the peak of a step with the plan's figure (tensors of a GPU: a CPU's allocator does not count them), operations a
second with the device's peak (where it is known), and bytes a second of an export with writing as many to one file.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks import learner_methods
from benchmarks.learner import SHORT, SMALL, Shape
from benchmarks.learner_methods import Device, LearnerRun
from benchmarks.report import Comparison, main
from trainer.learner.architecture import training_flops
from trainer.learner.config import LearnerConfig
from trainer.learner.families.registry import read_architecture
from trainer.plan.division import Division
from trainer.plan.memory import fullest_rank

GIB = 2**30
CHUNK_BYTES = 64 * 2**20

QWEN3_600M = Shape(
    name="the shape of Qwen3-0.6B",
    model={
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    num_samples=16,
    longest_tokens=4096,
    num_rounds=3,
)
FOUR_LAYERS_OF_8B = Shape(
    name="four layers of Qwen3-8B",
    model={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    num_samples=16,
    longest_tokens=4096,
    num_rounds=3,
)


def configs(shape: Shape, device: Device) -> Iterator[LearnerConfig]:
    base = LearnerConfig(
        lr=learner_methods.LR,
        micro_batch_tokens=4 * shape.longest_tokens,
        dtype="bf16" if device.is_gpu else "fp32",
    )
    yield base
    yield msgspec.structs.replace(base, recompute="full")


def measure(shape: Shape, directory: Path, device: Device) -> Iterator[Comparison]:
    """One learner after another, in this process."""
    learner_methods.write_model(directory, shape.model)
    for config in configs(shape, device):
        of = f"{shape.name}, recompute = {config.recompute}"
        run = LearnerRun(config, directory)
        yield from _compared_steps(run, shape, directory, device, of)
        if config.recompute == "none":
            yield _compared_export(run, directory / "export", of)
        run.close()


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps that a learner took, without the first."""

    flops: int  # operations of the model, without what is computed again
    seconds: float

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds


def take_steps(run: LearnerRun, shape: Shape, directory: Path) -> Timed:
    """One step to begin with, then as many as the shape has rounds, each on a batch of its own."""
    architecture = read_architecture(directory)
    batches = [
        learner_methods.make_batch(
            shape.num_samples, shape.longest_tokens, architecture.vocab_size, step=1 + n
        )
        for n in range(shape.num_rounds + 1)
    ]
    seconds = [learner_methods.timed(run.step, batch)[1] for batch in batches][1:]
    flops = [
        training_flops(
            architecture, [len(one) - 1 for one in batch.tokens], num_head_positions=batch.num_trained
        )
        for batch in batches[1:]
    ]
    return Timed(sum(flops), sum(seconds))


def planned_bytes(config: LearnerConfig, directory: Path) -> int:
    """What the plan says that the tensors of a learner alone on its GPU take at the peak."""
    architecture = read_architecture(directory)
    return fullest_rank(architecture, config, Division.of(config, architecture, 1)).gpu_bytes


def _compared_steps(
    run: LearnerRun, shape: Shape, directory: Path, device: Device, of: str
) -> Iterator[Comparison]:
    reached = take_steps(run, shape, directory).flops_per_s
    if device.is_gpu:
        yield Comparison(
            "device",
            device.peak_bytes() / GIB,
            planned_bytes(run.config, directory) / GIB,
            "the plan",
            f"GiB of tensors at the peak, {of}",
        )
    if device.flops_per_s:
        yield Comparison(
            "device",
            reached / 1e12,
            device.flops_per_s / 1e12,
            "the device's peak",
            f"TFLOP/s of a step, {of}",
        )
    else:
        yield Comparison("device", reached / 1e9, 0.0, "no known peak", f"GFLOP/s of a step, {of}")


def _compared_export(run: LearnerRun, directory: Path, of: str) -> Comparison:
    began = time.perf_counter()
    run.export(directory)
    export_s = time.perf_counter() - began
    num_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    floor_s = _write(directory.with_name("floor"), num_bytes)
    mib = num_bytes / 2**20
    return Comparison(
        "device", mib / export_s, mib / floor_s, "one file written", f"MiB a second of an export, {of}"
    )


def _write(path: Path, num_bytes: int) -> float:
    """Seconds for writing `num_bytes` to one file and forcing them to disk."""
    chunk = os.urandom(CHUNK_BYTES)
    began = time.perf_counter()
    with path.open("wb") as file:
        for start in range(0, num_bytes, CHUNK_BYTES):
            file.write(chunk[: num_bytes - start])
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def _measure_all(short: bool) -> list[Comparison]:
    device = learner_methods.this_device()
    whole = (QWEN3_600M, FOUR_LAYERS_OF_8B) if device.is_gpu else (SMALL,)
    rows: list[Comparison] = []
    for shape in (SHORT,) if short else whole:
        with tempfile.TemporaryDirectory() as directory:
            rows += measure(shape, Path(directory), device)
    return rows


async def device(short: bool) -> list[Comparison]:
    return await asyncio.to_thread(_measure_all, short)


if __name__ == "__main__":
    sys.exit(main("device", __doc__, device))
