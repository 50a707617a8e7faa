"""A machine with a load of fifty decides as an idle one does: hostile code earns 0 and is no failure, a right fix earns 1."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from msgspec.structs import replace

from pipeline.request import Claim
from pipeline.task import Resources, Task
from pipeline.trajectory import Reward
from tests.workers.claims import make_claim
from tests.workers.grading.patches import FIX, edited
from workers.grading import container
from workers.grading.grade import Grader
from workers.sandbox import disk
from workers.sandbox.disk import DiskWatch
from workers.sandbox.docker import DockerSandboxes
from workers.settings import DiskSettings

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1200)]

NUM_SPINNING = 50
# Nobody but the test holds the other end of their standard input: they end with the test, however that ends.
SPIN = f"""
import os, select
for _ in range({NUM_SPINNING} - 1):
    if not os.fork():
        os.setsid()  # the kernel may give all processes of a session the share of one
        break
while not select.select([0], [], [], 0)[0]: pass
"""
SMALL = Resources(memory_bytes=256 * 1024**2, cpus=1.5, pids=48)
MAX_WRITTEN_BYTES = 16_000_000
CPU_S, WALL_S = 2.0, 300.0
# A thread that spins reaches this wall deadline first, wherever it runs.
SPINNING_CPU_S, SPINNING_WALL_S = 4.0, 3.0

SPINNING = "CPU spin"
# Code that the hidden tests import. It fixes nothing.
CODE = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "endless threads": """
import threading
def spin():
    while True: pass
while True:
    try: threading.Thread(target=spin).start()
    except RuntimeError: pass
""",
    # What the runner's own process prints goes to a file.
    "1 GB of output": """
import os
with open(f"/proc/{os.getppid()}/fd/1", "wb") as output:
    for _ in range(1000): output.write(bytes(10**6))
""",
    "a disk filled by many files": """
import itertools
for number in itertools.count():
    with open(f"/tmp/{number}", "wb") as file: file.write(bytes(8192))
""",
    SPINNING: "while True: pass",
}


@pytest.fixture
def load() -> Iterator[psutil.Process]:
    """The first of processes that spin, each in a session of its own, as other programs are; the others are its children."""
    command = [sys.executable, "-S", "-E", "-c", SPIN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as first:
        yield psutil.Process(first.pid)


async def test_zeros_stay_zeros_and_a_right_fix_is_paid(
    load: psutil.Process,
    sandboxes: DockerSandboxes,
    task: Task,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code that spins passes its wall deadline and has time to use up its CPU time, however busy the machine is."""
    monkeypatch.setattr(container, "WATCH_S", 1.0)
    monkeypatch.setattr(container, "MOVING_SHARE", 0.001)
    monkeypatch.setattr(container, "BUSY_FACTOR", 90.0)
    monkeypatch.setattr(disk, "MEASURE_S", 1.0)
    sandboxes.disk = DiskSettings(min_free_bytes=0, max_written_bytes=MAX_WRITTEN_BYTES)
    grader = Grader(sandboxes)

    def claim(cpu_s: float = CPU_S, wall_s: float = WALL_S) -> Claim:
        return make_claim(replace(task, resources=SMALL), grade_cpu_s=cpu_s, grade_wall_s=wall_s)

    async def grade(name: str) -> Reward:
        limits = (SPINNING_CPU_S, SPINNING_WALL_S) if name == SPINNING else ()
        return await grader.grade(claim(*limits), edited("calc.py", "def add", f"{CODE[name]}\ndef add"))

    watching = asyncio.create_task(DiskWatch(sandboxes).watch())
    *zeros, paid = await asyncio.gather(*(grade(name) for name in CODE), grader.grade(claim(), FIX))
    watching.cancel()
    assert len(load.children()) == NUM_SPINNING - 1
    assert {name: reward.value for name, reward in zip(CODE, zeros, strict=True)} == dict.fromkeys(CODE, 0.0)
    assert zeros[-1].decided_by == "cpu time used up"
    assert paid.value == 1.0
