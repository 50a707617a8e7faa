"""Ctrl-C while `python -m infra.local` runs: the trainer ends in good order, or at once if it is pressed again."""

import signal
import subprocess
import sys
from pathlib import Path

# A trainer whose first signal is the order to finish what takes ten minutes, or no time; the rest is the real command.
TRAINER = """
import signal, sys, time
def finish(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("finishing", flush=True)
    time.sleep(float(sys.argv[1]))
    print("finished", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, finish)
print("ready", flush=True)
time.sleep(600)
"""
LOCAL = f"""
import os, signal, sys, time
from infra.local import __main__ as local
from infra.processes import SupervisedProcess
def run(arguments, cleanup, trainers):
    command = [sys.executable, "-c", {TRAINER!r}, sys.argv[1]]
    cleanup.callback(trainers.stop)
    trainers.start(SupervisedProcess("trainer", lambda: command, dict(os.environ), None, 600.0, signal.SIGKILL))
    time.sleep(600)
local.run = run
sys.exit(local.main(["recipe.toml", "--run-dir", sys.argv[2]]))
"""


def start(finish_s: str, run_dir: Path) -> subprocess.Popen[str]:
    """The command, once its trainer is ready."""
    command = [sys.executable, "-c", LOCAL, finish_s, str(run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert next_line(process) == "ready"
    return process


def next_line(process: subprocess.Popen[str]) -> str:
    """The next that the trainer prints."""
    assert process.stdout is not None
    return next(line.strip() for line in process.stdout if not line.startswith("local: "))


def test_after_ctrl_c_the_trainer_ends_in_good_order(tmp_path: Path) -> None:
    with start("1", tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert next_line(process) == "finishing"
        assert next_line(process) == "finished"
    assert process.returncode == 130


def test_a_second_ctrl_c_does_not_wait_for_the_trainer(tmp_path: Path) -> None:
    with start("600", tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert next_line(process) == "finishing"
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate()
    assert "finished" not in rest
    assert process.returncode == 130
