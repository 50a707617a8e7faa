"""What the check prints: a line for each step, what to do where one does not hold, and the rows for docs/status.md."""

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.steps import CheckReport, Step, StepResult

NONE = "none"
NAMED_VERSIONS = ("driver", "CUDA of torch", "torch", "megatron-core", "transformers", "sglang")


def result_line(result: StepResult) -> str:
    reason = f": {result.reason}" if result.reason else ""
    numbers = "".join(f"\n    {name}: {value}" for name, value in result.numbers.items())
    return f"    {result.outcome} after {result.seconds:.0f} s{reason}{numbers}"


def next_steps(step: Step, out: Path) -> str:
    return (
        f"    what that means: {step.means}\n"
        f"    what to try:     {step.remedy}\n"
        f"    then:            python -m benchmarks.gpu_check --only {step.name}\n"
        f"    what to send us: {out}, as it is. It has the machine, the versions, every number and the last lines of the step's output."
    )


def summary(report: CheckReport, steps: Sequence[Step], out: Path) -> str:
    """How many of the steps that were asked for hold. One that was not reached is counted apart."""
    counted = {
        "hold": report.count("holds"),
        "do not hold": report.count("does not hold"),
        "not run": report.count("not run"),
        "not reached": len(steps) - len(report.steps),
    }
    where = "" if report.device == "cuda" else " ON THE CPU, which says nothing about a GPU"
    seconds = sum(step.seconds for step in report.steps)
    words = ", ".join(f"{number} {what}" for what, number in counted.items() if number)
    return f"gpu-check{where}: {words}, after {seconds:.0f} s. {out} has all of it."


def table(report: CheckReport) -> str:
    """A file as rows for docs/status.md: when, on what, and each step with its outcome and its numbers."""
    day = time.strftime("%Y-%m-%d", time.gmtime(report.began_at))
    where = " + ".join(_counted(report.machine.gpus)) if report.device == "cuda" else "a CPU, no GPU"
    versions = ", ".join(
        f"{name} {report.versions[name]}"
        for name in NAMED_VERSIONS
        if report.versions.get(name, NONE) != NONE
    )
    rows = [f"{day}, {report.commit}, on {where or 'no GPU'}: {versions}.", ""]
    rows += ["| step | outcome | s | measured |", "|---|---|--:|---|"]
    for step in report.steps:
        said = [*step.faults, step.reason, *(f"{name} {value}" for name, value in step.numbers.items())]
        cell = "; ".join(one for one in said if one).replace("|", "/").replace("\n", " ")
        rows.append(f"| {step.name} | {step.outcome} | {step.seconds:.0f} | {cell} |")
    return "\n".join(rows)


def _counted(gpus: Sequence[str]) -> list[str]:
    """Equal GPUs together, as in "8 x NVIDIA H100 80GB HBM3, 81559 MiB"."""
    return [f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)]
