"""Commands that make tasks, as processes of their own: killed at a stage, and what their books say."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from workers.making.candidates import CandidateBook, TaskCandidate


def candidates(out: Path) -> list[TaskCandidate]:
    """The candidates in the book of a command that may be running."""
    path = out / "candidates.jsonl"
    return list(CandidateBook.read(path).candidates.values()) if path.exists() and path.stat().st_size else []


def finished(words: Sequence[str]) -> None:
    """Runs a command to its end, which must be a good one."""
    subprocess.run([sys.executable, "-m", "workers.tasksets", *words], check=True, stdout=subprocess.DEVNULL)


def killed_when(words: Sequence[str], reached: Callable[[], bool]) -> None:
    """Starts a command and kills it as soon as `reached`."""
    command = [sys.executable, "-m", "workers.tasksets", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not reached():
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended before the stage was reached"
