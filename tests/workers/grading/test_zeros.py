"""What a patch or its code brings about is a 0; what others do to the grading container is no reward at all."""

import asyncio
import textwrap
from collections.abc import Callable

import docker
import pytest
from msgspec.structs import replace

from pipeline import task as tasks
from pipeline.errors import GraderError
from pipeline.task import Resources, Task
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import FILES, RepoImage
from tests.workers.grading.patches import FIX, NOTE, edited, new_file
from workers.docker.host import FLEET
from workers.grading import steps
from workers.grading.defence.before import BeforeTests
from workers.grading.grade import Grader
from workers.sandbox import disk, protocol
from workers.sandbox.disk import DiskWatch
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import CommandResult
from workers.settings import DiskSettings

pytestmark = [pytest.mark.docker, pytest.mark.alone]

SMALL = Resources(memory_bytes=96 * 1024**2, cpus=1.5, pids=48)
MAX_WRITTEN_BYTES = 16_000_000
FAR_S = 100.0  # limits that are not reached

# Code that the hidden tests import. It ends with tests that fail or with a container that is gone.
FILL_MEMORY = """
import ctypes
open("/proc/1/oom_score_adj", "w").write("1000")
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(100):
    at = libc.shmat(libc.shmget(0, 16 << 20, 0o1600), None, 0)
    ctypes.memset(at, 1, 16 << 20)
    libc.shmdt(ctypes.c_void_p(at))
"""
CODE = {
    "notes that never stop": """
import os
for _ in range(4):
    if not os.fork():
        notes = open("/dev/swerve-notes", "wb")
        while True:
            notes.write(b"\\nend 0 1 0\\n" * 1000)
os.write(os.open("/dev/swerve-notes", os.O_WRONLY), bytes(100 * 1000 * 1000))
""",
    "a forged end": """
import os
open("/dev/swerve-notes", "w").write("\\nend 0 1 0\\n")
os._exit(0)
""",
    "a forged end, then no memory": 'open("/dev/swerve-notes", "w").write("\\nend 0 1 0\\n")\n' + FILL_MEMORY,
    "output that never stops": """
import os
for _ in range(2):
    if not os.fork():
        while True:
            os.write(1, bytes(65536))
""",
    "the stream closed": "import os\nfor number in range(100):\n    try: os.close(number)\n    except OSError: pass",
    "no more processes": """
import os, time
while True:
    try:
        if not os.fork():
            time.sleep(1000)
    except OSError:
        break
""",
    "process 1 stopped and traced": """
import ctypes, os, resource, signal
for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGSEGV, signal.SIGUSR2):
    os.kill(1, number)
libc = ctypes.CDLL(None, use_errno=True)
for request in (16, 0x4206):
    libc.ptrace(request, 1, None, None)
try: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))
except OSError: pass
""",
    "nothing left to run": "import subprocess; subprocess.run(['rm', '-rf', '/bin/bash', '/usr/bin', '/workspace', '/dev/shm'])",
    "everything mounted anew": "import os\nfor flags in ('remount,ro', 'bind'): os.system(f'mount -o {flags} / / 2>&1')",
    "everybody killed": "import os, signal\nos.kill(-1, signal.SIGKILL)",
}  # fmt: skip


def at_import(code: str) -> bytes:
    return edited("calc.py", "def add", f"{code}\ndef add")


@pytest.mark.slow_but_for("a forged end", "everybody killed", "no more processes")
@pytest.mark.parametrize("name", CODE)
async def test_what_code_under_test_does_is_a_zero(grader: Grader, task: Task, name: str) -> None:
    claim = make_claim(replace(task, resources=SMALL), grade_wall_s=FAR_S, grade_cpu_s=FAR_S)
    reward = await grader.grade(claim, at_import(CODE[name]))
    assert (reward.value, reward.resolved) == (0.0, False)
    assert reward.decided_by


async def test_who_uses_up_the_memory_earns_nothing(grader: Grader, task: Task) -> None:
    reward = await grader.grade(make_claim(replace(task, resources=SMALL)), at_import(FILL_MEMORY))
    assert reward.value == 0.0
    assert reward.decided_by.startswith(("memory used up", "exit status 137"))


async def test_who_writes_too_much_earns_nothing(
    sandboxes: DockerSandboxes, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faster than it is looked at, so that the container is removed."""
    monkeypatch.setattr(disk, "MEASURE_S", 0.0)
    sandboxes.disk = DiskSettings(min_free_bytes=0, max_written_bytes=MAX_WRITTEN_BYTES)
    watch = DiskWatch(sandboxes)

    async def watching() -> None:
        while (  # noqa: ASYNC110 - a container sets no Event
            not (names := sandboxes.open_names())
            or max((await sandboxes.api.written_bytes(names)).values(), default=0) < 2 * MAX_WRITTEN_BYTES
        ):
            await asyncio.sleep(0.1)
        await watch.look()

    fill = "import time\nfor number in range(4):\n    open(str(number), 'wb').write(bytes(10**7))\ntime.sleep(1000)"
    looking = asyncio.create_task(watching())
    reward = await Grader(sandboxes).grade(make_claim(task, grade_wall_s=FAR_S), at_import(fill))
    await looking
    assert reward.value == 0.0
    assert reward.decided_by.startswith("the container was removed: it wrote ")


@pytest.mark.slow
async def test_who_only_waits_earns_nothing(
    grader: Grader, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However busy the machine of this test is: that it had CPU to give is assumed."""
    monkeypatch.setattr(protocol, "STARVED_SHARE", 2.0)
    claim = make_claim(task, grade_cpu_s=FAR_S, grade_wall_s=5.0)
    reward = await grader.grade(claim, at_import("import time; time.sleep(1000)"))
    assert reward.value == 0.0
    assert reward.decided_by.startswith("waited without using CPU: ")


@pytest.mark.slow
async def test_a_patch_too_large_to_be_applied_in_time_earns_nothing(
    grader: Grader, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However busy the machine of this test is: that it had CPU to give is assumed."""
    monkeypatch.setattr(protocol, "STARVED_SHARE", 2.0)
    take = BeforeTests._step

    async def hurried(before: BeforeTests, script: str) -> CommandResult:
        """The step, with a limit for the patch that no machine keeps: the other steps take longer on a busy one."""
        with monkeypatch.context() as shortened:
            if script.endswith("apply_patch\n"):
                shortened.setattr(steps, "STEP_S", 0.2)
            return await take(before, script)

    monkeypatch.setattr(BeforeTests, "_step", hurried)
    huge = b"".join(
        f"diff --git a/x/{number} b/x/{number}\nnew file mode 100644\n"
        f"--- /dev/null\n+++ b/x/{number}\n@@ -0,0 +1 @@\n+x\n".encode()
        for number in range(100_000)
    )
    reward = await grader.grade(make_claim(task), huge)
    assert (reward.value, reward.decided_by) == (0.0, "applying the patch took too long")


async def test_a_settings_file_without_an_end_earns_nothing(grader: Grader, task: Task) -> None:
    lines = FILES["repo/setup.cfg"].splitlines()
    link = b"diff --git a/setup.cfg b/setup.cfg\ndeleted file mode 100644\n--- a/setup.cfg\n+++ /dev/null\n"
    link += f"@@ -1,{len(lines)} +0,0 @@\n".encode()
    link += b"".join(f"-{line}\n".encode() for line in lines)
    link += b"diff --git a/setup.cfg b/setup.cfg\nnew file mode 120000\n--- /dev/null\n+++ b/setup.cfg\n"
    link += b"@@ -0,0 +1 @@\n+/dev/zero\n\\ No newline at end of file\n"
    claim = make_claim(replace(task, resources=SMALL))
    reward = await grader.grade(claim, link)
    assert reward.value == 0.0
    assert reward.decided_by.startswith("putting the runner's files back ")


@pytest.mark.slow
async def test_a_log_that_the_parser_cannot_bear_earns_nothing(
    grader: Grader, repo_image: RepoImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However busy the machine of this test is: that it had CPU to give is assumed."""
    monkeypatch.setattr(protocol, "STARVED_SHARE", 2.0)
    monkeypatch.setattr(steps, "STEP_S", 3.0)
    parser = "import sys, time\nif 'slow' in open(sys.argv[1]).read(): time.sleep(1000)\n"
    verdict = tasks.TestsJson(eval_script="cat NOTE.txt\n", parser=parser, tests=("one",))
    claim = make_claim(make_task(repo_image.tag, verdict=verdict))
    reward = await grader.grade(claim, new_file("NOTE.txt", "slow"))
    assert (reward.value, reward.decided_by) == (0.0, "tests_json: the parser made nothing of the log")


@pytest.mark.parametrize("how", ["remove", "kill"])
async def test_a_container_that_others_end_gives_no_reward_whatever_the_patch_did(
    grader: Grader,
    sandboxes: DockerSandboxes,
    docker_client: docker.DockerClient,
    task: Task,
    how: str,
) -> None:
    """It ran out of memory, forged its end and waits."""
    code = "import os, time\nif not os.fork(): bytearray(2 * 1024**3)\nos.wait()\n" + textwrap.dedent(
        """
        open("/dev/swerve-notes", "w").write("\\nend 1 1 0\\n")
        open("/workspace/reached", "w")
        time.sleep(1000)
        """
    )
    claim = make_claim(replace(task, resources=SMALL), grade_wall_s=FAR_S)
    grading = asyncio.create_task(grader.grade(claim, at_import(code)))
    mine = {"label": f"{FLEET}={sandboxes.fleet}", "status": "running"}
    while not any(  # noqa: ASYNC110 - a container sets no Event
        "/workspace/reached" in {change["Path"] for change in one.diff() or ()}
        for one in docker_client.containers.list(ignore_removed=True, filters=mine)
    ):
        await asyncio.sleep(0.2)
    (victim,) = docker_client.containers.list(ignore_removed=True, filters=mine)
    await asyncio.to_thread(victim.kill if how == "kill" else lambda: victim.remove(force=True))
    with pytest.raises(GraderError, match="grading container failed"):
        await grading


async def test_a_step_that_fails_without_the_patch_too_gives_no_reward(
    grader: Grader, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STEP_S", 0.0)
    with pytest.raises(GraderError, match="took too long"):
        await grader.grade(make_claim(task), FIX)


async def test_tests_that_the_machine_has_no_cpu_for_give_no_reward(
    grader: Grader, scripted: Callable[[str], Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "STARVED_SHARE", 0.0)
    claim = make_claim(scripted("sleep 1000\n"), grade_cpu_s=FAR_S, grade_wall_s=1.0)
    with pytest.raises(GraderError, match="the machine had no CPU for the tests"):
        await grader.grade(claim, NOTE)
