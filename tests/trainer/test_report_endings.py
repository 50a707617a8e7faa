"""What the report says of how a run ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.screen import READER_LEFT
from tests.trainer.journals import Run, reported
from trainer.records.run_directory import sole_trainer
from trainer.report import __main__ as report


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def told(run: Run, capsys: pytest.CaptureFixture[str]) -> str:
    """The first line of the report: which run it is, and how it ended."""
    report.main([str(run.directory)])
    return capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("reason", ["stopped", "failing", "error"])
def test_the_report_says_how_a_run_ended_and_how_to_resume_it(
    run: Run, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    run.step(7, run.group(0, [1.0, 0.0]))
    run.end(7, reason)
    assert reported(run, capsys)[1]["state"] == reason
    resume = f"resume with `python -m trainer.run RECIPE.toml --run-dir {run.directory} --resume`"
    line = told(run, capsys)
    assert f"{reason} at step 7" in line
    assert resume in line
    (run.directory / "recipe.toml").touch()
    assert f"trainer.run {run.directory}/recipe.toml --run-dir" in told(run, capsys)


def test_a_run_whose_trainer_is_gone_without_a_row_has_crashed(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step(7, run.group(0, [1.0, 0.0]))
    assert reported(run, capsys)[1]["state"] == "crashed"
    assert "crashed after step 7" in told(run, capsys)


def test_a_run_whose_trainer_holds_the_lock_is_still_running(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step(7, run.group(0, [1.0, 0.0]))
    with sole_trainer(run.directory):
        assert reported(run, capsys)[1]["state"] == "running"
        assert told(run, capsys).endswith("still running")
    assert "crashed" in told(run, capsys)


def test_a_finished_run_is_told_as_finished(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.step(7, run.group(0, [1.0, 0.0]))
    run.end(7)
    assert reported(run, capsys)[1]["state"] == "finished"
    assert told(run, capsys).endswith("finished")


def test_a_reader_that_stops_early_gets_no_traceback(run: Run) -> None:
    run.group(0, [1.0, 0.0])
    run.write()
    gone, pipe = os.pipe()
    os.close(gone)
    command = [sys.executable, "-m", "trainer.report", str(run.directory)]
    with open(pipe, "w") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (READER_LEFT, "")
