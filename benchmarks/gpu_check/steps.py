"""The steps of the check: what each one looks at, how long it may take, and what to do where it does not hold.

A step is a function that measures. It runs in a process of its own, so that it finds an empty GPU, and so that one that hangs can be ended.
Nothing here imports torch.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from benchmarks.report import significant

DeviceKind = Literal["cuda", "cpu"]
Outcome = Literal["holds", "does not hold", "not run"]
Number = float | int | str | None

NUM_FAULT_LINES = 12


class NotRun(Exception):
    """The step cannot be run here. Its text says what it needs."""


@dataclass(slots=True)
class Findings:
    """What a step measured. It holds if there is no fault."""

    numbers: dict[str, Number]
    faults: list[str]
    not_run: str = ""  # why there is no verdict on what was measured; what was measured stays

    @classmethod
    def none(cls) -> "Findings":
        return cls({}, [])

    def at_most(self, name: str, value: float, bound: float) -> None:
        """Note a number and its bound. A number that is not finite is above every bound."""
        self.numbers[name] = significant(value)
        if not value <= bound:
            self.faults.append(f"{name}: it is {value:.3g}, and may be {bound:.3g} at most")

    def at_least(self, name: str, value: float, bound: float, fix: str = "") -> None:
        self.numbers[name] = significant(value)
        if not value >= bound:
            tail = f": {fix}" if fix else ""
            self.faults.append(f"{name}: it is {value:.3g}, and must be {bound:.3g} at least{tail}")

    def require(self, name: str, value: Number, *, holds: bool, otherwise: str) -> None:
        """Note a value that is right or wrong, with what is said if it is wrong."""
        self.numbers[name] = value
        if not holds:
            self.faults.append(otherwise)


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    checks: str  # one sentence
    limit_s: int
    function: str  # module:function, of the device kind
    means: str  # what it means where it does not hold
    remedy: str  # what to try
    needs_device: bool = True  # False: it says itself what is wrong where torch sees no GPU
    is_extra: bool = False  # run only where it is named

    def measure(self, device: DeviceKind) -> Findings:
        """Runs in a process of its own. Raises NotRun."""
        module, _, name = self.function.partition(":")
        function: Callable[[DeviceKind], Findings] = getattr(importlib.import_module(module), name)
        return function(device)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """A step's part of the file."""

    name: str
    checks: str
    outcome: Outcome
    seconds: float  # with the start of its process
    limit_s: float
    numbers: dict[str, Number] = msgspec.field(default_factory=dict[str, Number])
    faults: list[str] = msgspec.field(default_factory=list[str])  # each bound that was not kept, or the error
    reason: str = ""  # why it was not run
    log: str = ""  # the last lines of its output where it does not hold


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    gpus: list[str]  # name and memory of each, as nvidia-smi prints them; empty without a driver
    host: str  # kernel and processor
    cores: int
    memory_gib: float


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The file that `--out` names, and that people send."""

    device: DeviceKind
    commit: str
    began_at: float
    machine: Machine
    versions: dict[str, str]  # "none" for what is not there
    steps: list[StepResult]
    format: int = 1

    def count(self, outcome: Outcome) -> int:
        return sum(step.outcome == outcome for step in self.steps)


HERE = "benchmarks.gpu_check"

STEPS: Sequence[Step] = (
    Step(
        "machine",
        "GPUs, driver, torch, NCCL, shared memory, disk and open files are what training needs.",
        60,
        f"{HERE}.machine:check",
        "The machine or its Python environment is not ready; no later step would say anything about Swerve.",
        "Do what the lines above say; `make setup-gpu` makes an environment whose torch fits the driver.",
        needs_device=False,
    ),
    Step(
        "kernels",
        "Variable-length attention over 32,000 positions, and products of bf16 with results in fp32, are those of plain fp32.",
        60,
        f"{HERE}.kernels:check",
        "torch's kernels compute something else than the learner calls them for, so losses and gradients would be wrong.",
        "Install the torch of constraints.txt with `make setup-gpu`; with that one, send the file.",
    ),
    Step(
        "parity",
        "For each family of models, log-probs and gradients on this device are those of a CPU, in fp32, and in bf16 within its rounding.",
        100,
        f"{HERE}.learning:parity",
        "The learner computes another function on this device than on a CPU, where it is tested against transformers.",
        "Do not train the families that are named; NVIDIA_TF32_OVERRIDE=0 shows whether it is TF32.",
    ),
    Step(
        "memory",
        "A step takes no more of the GPU's memory than `python -m trainer.plan` says.",
        60,
        f"{HERE}.speed:memory",
        "The plan is too small for this GPU, so a recipe that fits by the plan may run out of memory.",
        'Plan with a reserve of what is missing, for example a smaller learner.micro_batch_tokens or learner.recompute = "full".',
    ),
    Step(
        "recipes",
        "The settings of each recipe for GPUs take one optimizer step, on one GPU, with random weights and few layers.",
        140,
        f"{HERE}.recipes:check",
        "The recipes that are named would fail in their first step, or learn nothing from it.",
        "Run again with --only recipes; where memory is the reason, the recipe needs the GPUs that its table [plan] names.",
    ),
    Step(
        "publication",
        "A version of the weights goes from the sender on one GPU to a receiver on another, and arrives byte for byte.",
        50,
        f"{HERE}.serving:publication",
        'Engines would not get new weights with weights.transport = "distributed".',
        'Set NCCL_DEBUG=INFO and run with --only publication; until it holds, use weights.transport = "disk" or "delta".',
    ),
    Step(
        "resume",
        "A learner that is restored from its checkpoint is bit for bit the one that wrote it, and takes the same next steps.",
        40,
        f"{HERE}.learning:resume",
        "A run that is interrupted would go on as another run.",
        "Look for a full disk or a file system that loses writes; run again with TMPDIR on a local disk.",
    ),
    Step(
        "engine",
        "SGLang in bf16 samples tokens with the log-probs that the learner in bf16 gives them.",
        110,
        f"{HERE}.serving:engine",
        "Engine and learner compute different policies, so the off-policy correction would start from wrong log-probs.",
        "Compare SGLang's version with constraints.txt; try its flag --attention-backend triton.",
    ),
    Step(
        "run",
        "Two steps of a real run: tasks, containers, SGLang in bf16, training, and a new version in the engine.",
        220,
        f"{HERE}.serving:short_run",
        "The parts work alone and not together.",
        "Read runs/gpu-check/logs; `python -m pipeline.where runs/gpu-check` says where the time went.",
    ),
    Step(
        "utilisation",
        "A step reaches the share of the GPU's peak that plans assume of a dense model.",
        60,
        f"{HERE}.speed:utilisation",
        "Training is right, and slower than plans say.",
        "Set plan.utilisation to the measured share; look at clocks and power limits with `nvidia-smi -q -d PERFORMANCE`.",
    ),
    Step(
        "tests",
        "The learner's own tests pass on this device, except for those that are bit-exact on a CPU.",
        1800,
        f"{HERE}.learning:own_tests",
        "Some part of the learner does on this device what its test excludes.",
        "Run the tests that are named with `python -m pytest`.",
        is_extra=True,
    ),
)

LIMIT_S = 900
"""Seconds of all steps together that are run where none is named."""

BY_NAME: Mapping[str, Step] = {step.name: step for step in STEPS}
