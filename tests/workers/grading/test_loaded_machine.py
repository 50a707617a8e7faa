"""A machine with a load of fifty decides as an idle one does: hostile code earns 0 and is no failure, a right fix earns 1.

Twelve other containers share two cores with the gradings. Beside so many that a grading's share falls below
`container.MOVING_SHARE` it raises Starved instead, and nobody is paid.
"""

import asyncio
import time

import docker
import pytest
from msgspec.structs import replace

from pipeline.request import Claim
from pipeline.task import Resources, Task
from pipeline.trajectory import Reward
from tests.workers.busy import busy_machine, idle_s
from tests.workers.claims import make_claim
from tests.workers.grading.patches import FIX, edited
from workers.grading import container
from workers.grading.grade import Grader
from workers.sandbox import disk
from workers.sandbox.disk import DiskWatch
from workers.sandbox.docker import DockerSandboxes
from workers.settings import DiskSettings

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1200)]

NUM_PROCESSES = 4  # in each of the containers that share the cores with the gradings
IDLE_SHARE = 0.02  # of one core's time, in which the machine had CPU to give
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


async def test_zeros_stay_zeros_and_a_right_fix_is_paid(
    sandboxes: DockerSandboxes,
    task: Task,
    docker_client: docker.DockerClient,
    task_image: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code that spins passes its wall deadline and has time to use up its CPU time, however busy the machine is."""
    monkeypatch.setattr(container, "WATCH_S", 1.0)
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
    with busy_machine(docker_client, task_image, num_processes=NUM_PROCESSES):
        idle_before_s, began = idle_s(), time.monotonic()
        *zeros, paid = await asyncio.gather(*(grade(name) for name in CODE), grader.grade(claim(), FIX))
        assert idle_s() - idle_before_s < IDLE_SHARE * (time.monotonic() - began)
    watching.cancel()
    assert {name: reward.value for name, reward in zip(CODE, zeros, strict=True)} == dict.fromkeys(CODE, 0.0)
    assert zeros[-1].decided_by == "cpu time used up"
    assert paid.value == 1.0
