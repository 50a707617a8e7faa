"""Memory and speed of a step on this device, against what `python -m trainer.plan` says: the measurements of `benchmarks.device`."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks import device as measuring
from benchmarks import learner_methods
from benchmarks.gpu_check.random_models import write_random
from benchmarks.gpu_check.steps import DeviceKind, Findings
from benchmarks.learner import SHORT, Shape
from benchmarks.learner_methods import LearnerRun

GIB = 2**30
MEMORY_BOUND = 1.05
"""Share of the plan. Its formulas are within 5 % of what modules keep, by tests/trainer/plan/test_activations.py."""

UTILISATION_BOUND = 0.20
"""The lower end of what plans take for a dense model. Full recomputation makes a third more work of the same result."""

RECOMPUTED = 4 / 3


def memory(device: DeviceKind) -> Findings:
    found = Findings.none()
    shape = msgspec.structs.replace(_shape(measuring.QWEN3_600M, device), num_rounds=1)
    for recompute, run, directory in _runs(shape):
        measuring.take_steps(run, shape, directory)
        planned = measuring.planned_bytes(run.config, directory)
        found.numbers[f"recompute = {recompute}, planned, GiB"] = round(planned / GIB, 2)
        if device == "cuda":
            peak = learner_methods.this_device().peak_bytes()
            found.numbers[f"recompute = {recompute}, at the peak, GiB"] = round(peak / GIB, 2)
            found.at_most(f"recompute = {recompute}, share of the plan", peak / planned, MEMORY_BOUND)
    if device == "cpu":
        found.not_run = "a CPU's allocator does not count tensors"
    return found


def utilisation(device: DeviceKind) -> Findings:
    found = Findings.none()
    shape, peak = _shape(measuring.FOUR_LAYERS_OF_8B, device), learner_methods.this_device().flops_per_s
    for recompute, run, directory in _runs(shape):
        reached = measuring.take_steps(run, shape, directory).flops_per_s
        found.numbers[f"recompute = {recompute}, TFLOP/s"] = round(reached / 1e12, 3)
        if peak:
            bound = UTILISATION_BOUND / (RECOMPUTED if recompute == "full" else 1)
            found.at_least(f"recompute = {recompute}, share of the peak", reached / peak, bound)
    if not peak:
        found.not_run = "no peak is known for this device, so there is no share; trainer/learner/devices.py has those known"
    return found


def _shape(shape: Shape, device: DeviceKind) -> Shape:
    return shape if device == "cuda" else SHORT


def _runs(shape: Shape) -> Iterator[tuple[str, LearnerRun, Path]]:
    """One learner after another on the same random model, each closed before the next."""
    with tempfile.TemporaryDirectory(prefix="swerve-speed-") as temporary:
        directory = Path(temporary)
        write_random(directory, {"model_type": "qwen3", "max_position_embeddings": 4096} | shape.model)
        for config in measuring.configs(shape, learner_methods.this_device()):
            run = LearnerRun(config, directory)
            yield config.recompute, run, directory
            run.close()
