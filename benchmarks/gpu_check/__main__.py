"""What holds on this machine's NVIDIA GPUs, step by step: `make gpu-check`, or

    python -m benchmarks.gpu_check [--list] [--only NAME ...] [--go-on] [--out FILE.json] [--device cuda|cpu]
    python -m benchmarks.gpu_check --table FILE.json

The steps run in order, the cheapest first, each in a process of its own that is ended at its limit; all together take 15 minutes at most.
The check stops at the first step that does not hold, and says what that means, what to try, and what to send. A step that cannot be run
here, because it needs a second GPU or SGLang, is `not run`, which is never counted as holding.

The file has the machine, the versions, and the outcome, seconds and numbers of each step; it is written again after each step. `--table`
prints it as rows for docs/status.md. With `--device cpu` the same code runs with small sizes and without CUDA, which shows that it runs
and says nothing about a GPU; the file says so.

Exit status: 0 if all steps hold; 1 if one does not; 2 misuse; 3 if none failed and some were not run.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from benchmarks.gpu_check import inventory
from benchmarks.gpu_check.report import next_steps, result_line, summary, table
from benchmarks.gpu_check.steps import (
    BY_NAME,
    NUM_FAULT_LINES,
    STEPS,
    CheckReport,
    DeviceKind,
    Findings,
    NotRun,
    Number,
    Outcome,
    Step,
    StepResult,
)
from infra import processes
from pipeline.commandline import FAILED, refuse

UNDECIDED = 3
"""The exit status if no step failed and some were not run."""

CPU_LIMIT_FACTOR = 6
"""A CPU takes longer for the small sizes than a GPU for the large ones."""

GRACE_S = 5.0


class Measured(msgspec.Struct, frozen=True):
    """What the process of a step leaves."""

    numbers: dict[str, Number]
    faults: list[str]
    not_run: str = ""


def run_step(step: Step, device: DeviceKind) -> StepResult:
    """Run a step in a process of its own, and end that and all that it started after its limit."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", device, "--measure", step.name]
    limit_s = step.limit_s * (CPU_LIMIT_FACTOR if device == "cpu" else 1)
    return supervise(step, [*command, "--out"], _environment(device), limit_s=limit_s)


def supervise(
    step: Step, command: Sequence[str], environment: Mapping[str, str], *, limit_s: float
) -> StepResult:
    """Run `command`, which gets one more argument: the file in which it leaves a `Measured`."""
    with tempfile.TemporaryDirectory(prefix="swerve-gpu-check-") as directory:
        found, log = Path(directory) / "found.json", Path(directory) / "log"
        began = time.monotonic()
        child = processes.start(step.name, [*command, str(found)], log=log, environment=environment)
        status = None
        try:
            while (status := child.process.poll()) is None and time.monotonic() - began < limit_s:
                time.sleep(0.1)
        finally:
            child.stop(GRACE_S)
        seconds = time.monotonic() - began
        measured = msgspec.json.decode(found.read_bytes(), type=Measured) if found.exists() else None
        return _result(step, measured, status, seconds, limit_s=limit_s, log=log)


def _result(
    step: Step, measured: Measured | None, status: int | None, seconds: float, *, limit_s: float, log: Path
) -> StepResult:
    """The verdict on what a step's process left, and on how it ended: no status if it was ended at its limit."""
    outcome: Outcome = "does not hold"
    if status is None:
        faults = [f"it did not end within {limit_s:g} s"]
    elif measured is None:
        faults = [f"its process ended with status {status} before it had measured anything"]
    else:
        faults = measured.faults
        if not faults:
            outcome = "not run" if measured.not_run else "holds"
    return StepResult(
        name=step.name,
        checks=step.checks,
        outcome=outcome,
        seconds=round(seconds, 1),
        limit_s=limit_s,
        numbers=measured.numbers if measured else {},
        faults=faults,
        reason=measured.not_run if measured and outcome == "not run" else "",
        log=processes.tail(log, 60) if outcome == "does not hold" else "",
    )


def _environment(device: DeviceKind) -> dict[str, str]:
    """As `trainer.process` sets it for a learner; without a GPU if the check is one of the CPU."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return environment | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


def measure(step: Step, device: DeviceKind, out: Path) -> None:
    """The process of one step: leaves what it measured in `out`. An error is a fault of the step."""
    try:
        if step.needs_device and device == "cuda":
            _check_cuda()
        findings = step.measure(device)
    except NotRun as reason:
        findings = Findings({}, [], str(reason))
    except Exception as error:
        traceback.print_exc()
        findings = Findings({}, [f"{type(error).__name__}: {error}"[:2000]])
    done = Measured(findings.numbers, findings.faults, findings.not_run)
    out.write_bytes(msgspec.json.encode(done))


class Runner(Protocol):
    """How a step is run: `run_step`, but for tests."""

    def __call__(self, step: Step, device: DeviceKind) -> StepResult: ...


def _check_cuda() -> None:
    """Without CUDA the learner would compute on the CPU, and its results would pass for those of a GPU. Raises RuntimeError."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device: --only machine says more")


def check(
    steps: Sequence[Step], device: DeviceKind, out: Path, *, goes_on: bool, run: Runner = run_step
) -> CheckReport:
    """Run the steps in order, and write the file after each one. Stops at the first that does not hold, unless `goes_on`."""
    results: list[StepResult] = []
    report = CheckReport(
        device=device,
        commit=inventory.commit(),
        began_at=time.time(),
        machine=inventory.machine(),
        versions=inventory.versions(),
        steps=results,
    )
    for number, step in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {step.name}: {step.checks}", flush=True)
        result = run(step, device)
        results.append(result)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
        print(result_line(result), flush=True)
        if result.outcome == "does not hold":
            for fault in result.faults[:NUM_FAULT_LINES]:
                print(f"    {fault}")
            print(next_steps(step, out), flush=True)
            if not goes_on:
                break
    print(summary(report, steps, out), flush=True)
    return report


def exit_status(report: CheckReport, steps: Sequence[Step]) -> int:
    if report.count("does not hold"):
        return FAILED
    return 0 if report.count("holds") == len(steps) else UNDECIDED


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="print the steps, and run none")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="run this step; may be given again"
    )
    parser.add_argument(
        "--go-on", action="store_true", help="run the later steps after one that does not hold"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check.json"), help="%(default)s")
    parser.add_argument(
        "--table", type=Path, metavar="FILE.json", help="print a file as rows for docs/status.md"
    )
    parser.add_argument("--measure", choices=tuple(BY_NAME), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def chosen(names: Sequence[str]) -> list[Step]:
    """The named steps in their order; all but the extra ones if none is named. Raises ValueError."""
    for name in names:
        if name not in BY_NAME:
            raise ValueError(f"--only {name}: there is no such step; the steps are {', '.join(BY_NAME)}")
    return [step for step in STEPS if (step.name in names if names else not step.is_extra)]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.measure:
        measure(BY_NAME[arguments.measure], arguments.device, arguments.out)
        return 0
    try:
        steps = chosen(arguments.only)
        if arguments.table:
            print(table(_read(arguments.table)))
            return 0
    except ValueError as error:
        refuse(error)
    if arguments.list:
        for step in STEPS:
            when = ", only where it is named" if step.is_extra else ""
            print(f"{step.name} (at most {step.limit_s} s{when})\n    {step.checks}")
        return 0
    report = check(steps, arguments.device, arguments.out, goes_on=arguments.go_on)
    return exit_status(report, steps)


def _read(path: Path) -> CheckReport:
    try:
        return msgspec.json.decode(path.read_bytes(), type=CheckReport)
    except OSError as error:
        raise ValueError(f"--table {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"--table {path} is no file of this check: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
