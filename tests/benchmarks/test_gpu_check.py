"""The check on GPUs: when it stops, what it says and writes, and that what passes for a step that holds was measured."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check.report import table
from benchmarks.gpu_check.steps import (
    BY_NAME,
    LIMIT_S,
    STEPS,
    CheckReport,
    DeviceKind,
    Findings,
    Outcome,
    Step,
    StepResult,
)
from pipeline.commandline import FAILED, MISUSE

ROOT = Path(__file__).parents[2]
DEFAULT = [step for step in STEPS if not step.is_extra]


class Scripted:
    """Steps that end as it is told; all others hold."""

    def __init__(self, **outcomes: Outcome) -> None:
        self.outcomes = {name.replace("_", " "): outcome for name, outcome in outcomes.items()}
        self.ran: list[str] = []

    def __call__(self, step: Step, device: DeviceKind) -> StepResult:
        self.ran.append(step.name)
        outcome = self.outcomes.get(step.name, "holds")
        return StepResult(
            name=step.name,
            checks=step.checks,
            outcome=outcome,
            seconds=1.5,
            limit_s=step.limit_s,
            numbers={"nats": 0.25},
            faults=["nats: it is 0.25, and may be 0.1 at most"] if outcome == "does not hold" else [],
            reason="it needs two GPUs" if outcome == "not run" else "",
        )


def checked(run: Scripted, out: Path, *, goes_on: bool = False) -> CheckReport:
    return command.check(DEFAULT, "cuda", out, goes_on=goes_on, run=run)


def test_the_check_stops_at_the_first_step_that_does_not_hold_and_says_what_to_send(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = Scripted(kernels="does not hold"), tmp_path / "check.json"
    report = checked(run, out)
    assert run.ran == ["machine", "kernels"]
    said = capsys.readouterr().out
    assert "nats: it is 0.25, and may be 0.1 at most" in said
    assert f"what that means: {BY_NAME['kernels'].means}" in said
    assert f"what to try:     {BY_NAME['kernels'].remedy}" in said
    assert f"what to send us: {out}" in said
    assert f"1 hold, 1 do not hold, {len(DEFAULT) - 2} not reached" in said
    assert command.exit_status(report, DEFAULT) == FAILED


def test_the_check_goes_on_if_it_is_asked_to_and_has_failed_all_the_same(tmp_path: Path) -> None:
    run = Scripted(kernels="does not hold", resume="does not hold")
    report = checked(run, tmp_path / "check.json", goes_on=True)
    assert run.ran == [step.name for step in DEFAULT]
    assert report.count("does not hold") == 2
    assert command.exit_status(report, DEFAULT) == FAILED


def test_a_step_that_was_not_run_never_counts_as_one_that_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = checked(Scripted(publication="not run"), tmp_path / "check.json")
    assert command.exit_status(report, DEFAULT) == command.UNDECIDED
    assert f"{len(DEFAULT) - 1} hold, 1 not run" in capsys.readouterr().out
    (row,) = (line for line in table(report).splitlines() if line.startswith("| publication"))
    assert row == "| publication | not run | 2 | it needs two GPUs; nats 0.25 |"


def test_steps_that_all_hold_are_exit_status_0(tmp_path: Path) -> None:
    assert command.exit_status(checked(Scripted(), tmp_path / "check.json"), DEFAULT) == 0


def test_the_file_has_machine_versions_and_every_step_and_becomes_the_table_of_the_status_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "check.json"
    report = checked(Scripted(memory="does not hold"), out)
    report = msgspec.structs.replace(
        report, machine=msgspec.structs.replace(report.machine, gpus=["NVIDIA H100, 81559 MiB"] * 8)
    )
    out.write_bytes(msgspec.json.encode(report))
    written = msgspec.json.decode(out.read_bytes())
    assert written["versions"].keys() >= {
        "driver",
        "CUDA of torch",
        "torch",
        "megatron-core",
        "sglang",
        "transformers",
    }
    assert [step["name"] for step in written["steps"]] == ["machine", "kernels", "parity", "memory"]
    assert all(step.keys() >= {"outcome", "seconds", "numbers", "limit_s"} for step in written["steps"])
    assert command.main(["--table", str(out)]) == 0
    first, empty, *rows = capsys.readouterr().out.splitlines()[-8:]
    assert ", on 8 x NVIDIA H100, 81559 MiB: torch 2." in first
    assert (empty, rows[0], rows[1]) == ("", "| step | outcome | s | measured |", "|---|---|--:|---|")
    assert rows[-1].startswith(
        "| memory | does not hold | 2 | nats: it is 0.25, and may be 0.1 at most; nats"
    )


def test_the_file_is_written_after_each_step(tmp_path: Path) -> None:
    out, seen = tmp_path / "check.json", list[int]()

    class Looking(Scripted):
        def __call__(self, step: Step, device: DeviceKind) -> StepResult:
            if out.exists():
                seen.append(len(msgspec.json.decode(out.read_bytes(), type=CheckReport).steps))
            return super().__call__(step, device)

    checked(Looking(), out)
    assert seen == list(range(1, len(DEFAULT)))


def test_a_check_on_a_cpu_says_so_in_its_last_line_its_file_and_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "check.json"
    report = command.check(DEFAULT[:1], "cpu", out, goes_on=False, run=Scripted())
    assert "ON THE CPU, which says nothing about a GPU" in capsys.readouterr().out
    assert msgspec.json.decode(out.read_bytes())["device"] == "cpu"
    assert ", on a CPU, no GPU: " in table(report)


def test_all_steps_together_take_a_quarter_of_an_hour_at_most() -> None:
    assert sum(step.limit_s for step in DEFAULT) <= LIMIT_S == 15 * 60


def test_the_steps_are_listed_and_an_unknown_one_is_refused_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(step.name in listed and step.checks in listed for step in STEPS)
    with pytest.raises(SystemExit) as ended:
        command.main(["--only", "kernel"])
    assert ended.value.code == MISUSE
    assert "there is no such step; the steps are machine, kernels" in capsys.readouterr().err


def test_a_file_that_is_none_of_the_check_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text("{}")
    for name, said in (("other.json", "is no file of this check"), ("absent.json", "No such file")):
        with pytest.raises(SystemExit) as ended:
            command.main(["--table", str(tmp_path / name)])
        assert ended.value.code == MISUSE
        assert said in capsys.readouterr().err


def test_named_steps_run_in_their_order_and_the_extra_one_only_if_it_is_named() -> None:
    assert [step.name for step in command.chosen(["resume", "machine"])] == ["machine", "resume"]
    assert command.chosen(["tests"]) == [BY_NAME["tests"]]
    assert BY_NAME["tests"] not in command.chosen([])


LEAVES = "import sys; open(sys.argv[1], 'w').write({text!r}); print('the last words'); {then}"


def supervised(text: str = "", *, then: str = "pass", limit_s: float = 240.0) -> StepResult:
    """A process that leaves `text`, if any, and then does something."""
    code = LEAVES.format(text=text, then=then) if text else f"print('the last words', flush=True); {then}"
    return command.supervise(BY_NAME["kernels"], [sys.executable, "-c", code], {}, limit_s=limit_s)


@pytest.mark.parametrize(
    ("text", "then", "limit_s", "fault"),
    [
        ("", "import time; time.sleep(600)", 1.0, "it did not end within 1 s"),
        ("", "import os; os.kill(os.getpid(), 11)", 240.0, "ended with status -11 before it had measured"),
        ("", "sys.exit(1)", 240.0, "ended with status 1 before it had measured anything"),
        ('{"numbers": {"nats": 2.0}, "faults": ["too many"]}', "pass", 240.0, "too many"),
    ],
    ids=["hangs", "crashes", "fails", "measures a fault"],
)
def test_a_step_whose_process_hangs_dies_or_measures_a_fault_does_not_hold(
    text: str, then: str, limit_s: float, fault: str
) -> None:
    result = supervised(text, then=then, limit_s=limit_s)
    assert result.outcome == "does not hold"
    assert fault in result.faults[0]
    assert "the last words" in result.log or limit_s == 1.0


def test_a_step_without_a_fault_holds_and_one_with_a_reason_was_not_run() -> None:
    held = supervised('{"numbers": {"nats": 0.1}, "faults": []}')
    assert (held.outcome, held.numbers, held.log) == ("holds", {"nats": 0.1}, "")
    unrun = supervised('{"numbers": {}, "faults": [], "not_run": "it needs two GPUs"}')
    assert (unrun.outcome, unrun.reason) == ("not run", "it needs two GPUs")
    both = supervised('{"numbers": {}, "faults": ["wrong"], "not_run": "it needs two GPUs"}')
    assert both.outcome == "does not hold"


def measured(name: str, device: DeviceKind, tmp_path: Path) -> command.Measured:
    command.measure(BY_NAME[name], device, tmp_path / "found.json")
    return msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=command.Measured)


@pytest.mark.cpu_only
def test_what_is_asked_of_a_gpu_is_not_computed_on_a_cpu_in_its_place(tmp_path: Path) -> None:
    for step in STEPS:
        if step.needs_device:
            (fault,) = measured(step.name, "cuda", tmp_path).faults
            assert "sees no CUDA device" in fault
    assert any("sees no CUDA device" in fault for fault in measured("machine", "cuda", tmp_path).faults)


def test_an_error_of_a_step_is_a_fault_and_what_it_lacks_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: DeviceKind) -> Findings:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("benchmarks.gpu_check.kernels.check", fails)
    assert measured("kernels", "cpu", tmp_path).faults == ["ZeroDivisionError: by nothing"]
    monkeypatch.setattr("benchmarks.gpu_check.serving.engine_python", lambda: None)
    found = measured("engine", "cpu", tmp_path)
    assert not found.faults
    assert found.not_run.startswith("SGLang is neither in this environment nor")


def test_a_number_that_is_none_keeps_no_bound() -> None:
    found = Findings.none()
    found.at_most("a", float("nan"), 1.0)
    found.at_least("b", float("nan"), 1.0)
    assert len(found.faults) == 2


@pytest.mark.parametrize(
    ("status", "is_success"), [(0, True), (command.UNDECIDED, True), (FAILED, False), (MISUSE, False)]
)
def test_make_takes_steps_that_were_not_run_for_no_failure(
    tmp_path: Path, status: int, is_success: bool
) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    stand_in.chmod(0o755)
    words = ["make", "gpu-check", f"GPU_PYTHON={stand_in}", "CHECK=--only kernels --go-on"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == is_success
    assert "-m benchmarks.gpu_check --only kernels --go-on" in done.stdout
