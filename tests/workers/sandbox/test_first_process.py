"""What code in a container can do to its first process: nothing but use up the container's memory, which the Docker host sees."""

import asyncio
from collections.abc import AsyncIterator

import docker
import pytest

from pipeline.errors import SandboxError, SandboxRuined
from pipeline.task import File, Resources
from tests.workers.busy import busy_machine, idle_s
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from workers.sandbox.docker import DockerSandbox, DockerSandboxes
from workers.sandbox.first_process import built_init
from workers.sandbox.protocol import is_starved

pytestmark = [pytest.mark.docker, pytest.mark.alone]

SMALL = Resources(memory_bytes=96 * 1024**2, cpus=1.5, pids=48)
ENOUGH_S = 240.0
KEEP_BYTES = 1024**2
LITTLE_S = 0.05  # of idle time: the kernel's own accounting of a core that always had something to do

# Each prints the error, or the name of what it did to process 1.
INTO_PROCESS_1 = {
    "its limits": "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))",
    "its memory": "open('/proc/1/mem', 'rb')",
    "its streams": "open('/proc/1/fd/1', 'wb')",
    "its notes": "open('/proc/1/fd/9', 'wb')",
    "tracing it": "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
    "if libc.ptrace(16, 1, None, None): raise PermissionError(ctypes.get_errno())",
}

# Memory of no process, so that there is nothing to kill but the first one.
SHARED_MEMORY = """python3 - <<'EOF'
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(100):
    at = libc.shmat(libc.shmget(0, 16 << 20, 0o1600), None, 0)
    ctypes.memset(at, 1, 16 << 20)
    libc.shmdt(ctypes.c_void_p(at))
EOF
"""
FLOOD = """
flood() { while :; do printf '\\nend 0 1 0\\n'; done >/dev/swerve-notes; }
for i in 1 2 3; do flood & done
head -c 50000000 /dev/zero >/dev/swerve-notes
exit 7
"""


@pytest.fixture(params=[built_init(), b""], ids=["init", "bash"])
def init(request: pytest.FixtureRequest) -> bytes:
    return request.param


@pytest.fixture
async def sandbox(sandboxes: DockerSandboxes, repo_image: RepoImage) -> AsyncIterator[DockerSandbox]:
    async with sandboxes.open(
        make_claim(make_task(repo_image.tag, resources=SMALL)), role="agent"
    ) as sandbox:
        yield sandbox


@pytest.mark.parametrize("init", [built_init()], ids=["init"], indirect=True)
@pytest.mark.parametrize("door", INTO_PROCESS_1)
async def test_root_cannot_reach_into_the_first_process(sandbox: DockerSandbox, door: str) -> None:
    await sandbox.put([File(path="/attack.py", content=INTO_PROCESS_1[door].encode())])
    during = await sandbox.run("python3 /attack.py", timeout_s=ENOUGH_S)
    assert during.output.splitlines()[-1].startswith(b"PermissionError")
    await sandbox.put([File(path="/last.sh", content=b"python3 /attack.py\nexit 5\n")])
    last = await sandbox.finish("/last.sh", timeout_s=ENOUGH_S, keep_bytes=KEEP_BYTES)
    assert last.output.splitlines()[-1].startswith(b"PermissionError")
    assert last.exit_code == 5


# Quick: code in a sandbox cannot hide how its script ended.
@pytest.mark.parametrize("init", [built_init()], ids=["init"], indirect=True)
async def test_notes_that_never_stop_do_not_hide_the_end(sandbox: DockerSandbox) -> None:
    await sandbox.put([File(path="/last.sh", content=FLOOD.encode())])
    result = await sandbox.finish("/last.sh", timeout_s=ENOUGH_S, keep_bytes=KEEP_BYTES)
    assert result.exit_code == 7
    assert result.cpu_s > 0
    assert len(result.notes) > 1_000_000


async def test_who_uses_up_the_memory_has_ruined_the_sandbox(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    claim = make_claim(make_task(repo_image.tag, resources=SMALL))

    async def episode() -> None:
        async with sandboxes.open(claim, role="agent") as sandbox:
            await sandbox.run(SHARED_MEMORY, timeout_s=ENOUGH_S)
            await sandbox.run(f"true {'x' * 50_000_000}", timeout_s=ENOUGH_S)

    with pytest.raises(SandboxRuined, match="memory used up"):
        await episode()


async def test_a_container_that_others_end_is_not_ruined_whatever_ran_in_it(
    sandboxes: DockerSandboxes, repo_image: RepoImage, docker_client: docker.DockerClient
) -> None:
    """It ran out of memory once, too."""
    claim = make_claim(make_task(repo_image.tag, resources=SMALL))

    async def episode() -> None:
        async with sandboxes.open(claim, role="agent") as sandbox:
            await sandbox.run("python3 -c 'bytearray(2 * 1024**3)'", timeout_s=ENOUGH_S)
            running = asyncio.create_task(sandbox.run("sleep 1000", timeout_s=ENOUGH_S))
            await asyncio.sleep(0.2)
            await asyncio.to_thread(docker_client.api.remove_container, sandbox.id, force=True)
            await running

    with pytest.raises(SandboxError) as caught:
        await episode()
    assert not isinstance(caught.value, SandboxRuined)


@pytest.mark.slow
async def test_the_machine_is_to_blame_only_while_it_has_no_cpu(
    sandbox: DockerSandbox, docker_client: docker.DockerClient, task_image: str
) -> None:
    asleep = await sandbox.run("sleep 1000", timeout_s=3.0)
    assert not is_starved(asleep)
    with busy_machine(docker_client, task_image):
        asleep = await sandbox.run("sleep 1000", timeout_s=3.0)
        idle_before_s = idle_s()
        busy = await sandbox.run("while :; do :; done", timeout_s=3.0)
        # Nothing is concluded from a machine that had CPU to give.
        assert idle_s() - idle_before_s < LITTLE_S
    assert (is_starved(asleep), is_starved(busy)) == (False, True)


async def test_a_first_process_that_is_held_up_for_two_minutes_still_ends_a_command(
    sandbox: DockerSandbox, docker_client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside hundreds of busy processes, where killing a fork bomb takes that long. The clock of the loop is put forward."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    running = asyncio.create_task(sandbox.run("sleep 1000", timeout_s=1.0))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(docker_client.api.kill, sandbox.id, "SIGSTOP")
    try:
        await asyncio.sleep(2.0)
        monkeypatch.setattr(loop, "time", lambda: clock() + 120)
        await asyncio.sleep(0.3)
    finally:
        await asyncio.to_thread(docker_client.api.kill, sandbox.id, "SIGCONT")
    assert (await running).exit_code is None
