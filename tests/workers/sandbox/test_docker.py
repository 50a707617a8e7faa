import asyncio
import contextlib
import hashlib
import sys
from collections.abc import AsyncIterator

import docker
import pytest
import requests
from docker.errors import NotFound

from pipeline.errors import ImageMissing, SandboxError
from pipeline.task import File, Resources
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from workers.sandbox import docker as docker_sandbox
from workers.sandbox.docker import DockerSandbox, DockerSandboxes
from workers.sandbox.first_process import built_init
from workers.sandbox.shell import fits, writing

pytestmark = pytest.mark.docker

OTHER_PROCESSOR = b"\x7fELF" + bytes(1000)
LEAVE_DAEMONS = """
setsid sleep 1000 &
nohup sleep 1000 >/dev/null 2>&1 &
(setsid bash -c 'trap "" TERM INT HUP; while :; do sleep 1; done' &)
python3 -c 'import os,time
if not os.fork():
    os.setsid()
    if not os.fork(): time.sleep(1000)'
sleep 1000
"""


@pytest.fixture(params=[built_init(), b"", OTHER_PROCESSOR], ids=["init", "bash", "init_cannot_run"])
def init(request: pytest.FixtureRequest) -> bytes:
    """Every promise holds for each way that a container may be spoken to."""
    return request.param


@pytest.fixture
async def sandbox(sandboxes: DockerSandboxes, repo_image: RepoImage) -> AsyncIterator[DockerSandbox]:
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
        yield sandbox


async def test_each_command_gets_a_fresh_shell_in_the_workdir(sandbox: DockerSandbox) -> None:
    first = await sandbox.run("cd /; export LEFT=over; set -e; pwd; echo err >&2; exit 3", timeout_s=240)
    second = await sandbox.run('pwd; echo "[$LEFT]"; false; echo still here', timeout_s=240)
    assert (first.exit_code, first.output) == (3, b"/\nerr\n")
    assert (second.exit_code, second.output) == (0, b"/workspace\n[]\nstill here\n")


async def test_a_command_finds_stdin_closed_and_signals_as_usual(sandbox: DockerSandbox) -> None:
    result = await sandbox.run(
        "cat; python3 -c 'from signal import *; print(getsignal(SIGINT) is default_int_handler)'",
        timeout_s=240,
    )
    assert result.output == b"True\n"


async def test_the_tasks_variables_win_over_ours(sandboxes: DockerSandboxes, repo_image: RepoImage) -> None:
    task = make_task(repo_image.tag, env={"PAGER": "less", "EXTRA": "a b"})
    async with sandboxes.open(make_claim(task), role="agent") as sandbox:
        result = await sandbox.run('echo "$PAGER,$EXTRA,$MANPAGER"', timeout_s=240)
    assert result.output == b"less,a b,cat\n"


@pytest.mark.slow_but_for("init")
async def test_pip_does_not_wait_for_a_network_that_is_not_there(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    retries = []
    for network in (False, True):
        task = make_task(repo_image.tag, resources=Resources(network=network))
        async with sandboxes.open(make_claim(task), role="agent") as sandbox:
            retries.append((await sandbox.run('echo "${PIP_RETRIES-as ever}"', timeout_s=240)).output)
    assert retries == [b"0\n", b"as ever\n"]


@pytest.mark.slow
async def test_a_timeout_leaves_no_process_but_the_first(
    sandbox: DockerSandbox, docker_client: docker.DockerClient
) -> None:
    result = await sandbox.run(f"echo begun; {LEAVE_DAEMONS}", timeout_s=10)
    assert (result.exit_code, result.output) == (None, b"begun\n")
    first = docker_client.api.inspect_container(sandbox.id)["State"]["Pid"]
    processes = docker_client.api.top(sandbox.id, "-eo pid,args")["Processes"]
    others = [args for pid, args in processes if int(pid) != first]
    # a bash that stayed keeps time with a child and its sleep
    guards = [args for args in others if args.startswith(("bash -p", "sleep ")) and "1000" not in args]
    assert others == guards
    assert (await sandbox.run("echo alive", timeout_s=240)).output == b"alive\n"


# Quick: a fork bomb ends at its deadline, and the sandbox lives on.
@pytest.mark.slow_but_for("init")
@pytest.mark.alone
async def test_a_fork_bomb_ends_at_the_timeout(sandbox: DockerSandbox) -> None:
    result = await sandbox.run("bomb() { while :; do bomb & done; }; bomb 2>/dev/null", timeout_s=1)
    assert result.exit_code is None
    assert (await sandbox.run("echo alive", timeout_s=240)).output == b"alive\n"


async def test_the_agent_cannot_kill_its_own_container(sandbox: DockerSandbox) -> None:
    await sandbox.run("for s in TERM INT HUP STOP KILL; do kill -$s 1; done; kill -9 -1", timeout_s=240)
    await sandbox.run("for p in /proc/[0-9]*; do kill -9 ${p#/proc/}; done", timeout_s=240)
    assert (await sandbox.run("echo alive", timeout_s=240)).output == b"alive\n"


@pytest.mark.slow_but_for("init")
async def test_a_signal_to_kill_everything_between_two_commands_is_no_harm(sandbox: DockerSandbox) -> None:
    await sandbox.run("(sleep 0.3; kill -USR1 1) &", timeout_s=240)
    await asyncio.sleep(1)
    assert (await sandbox.run("echo alive", timeout_s=240)).output == b"alive\n"


@pytest.mark.parametrize("init", [built_init()], ids=["init"], indirect=True)
@pytest.mark.parametrize("door", ["fd/0", "fd/1", "mem", "environ", "root"])
async def test_the_agent_cannot_reach_into_the_first_process(sandbox: DockerSandbox, door: str) -> None:
    opened = await sandbox.run(
        f"python3 -c 'import os; os.open(\"/proc/1/{door}\", os.O_RDONLY | os.O_NONBLOCK)'", timeout_s=240
    )
    assert b"PermissionError" in opened.output


@pytest.mark.slow_but_for("init")
async def test_a_background_process_neither_delays_nor_joins_later_answers(sandbox: DockerSandbox) -> None:
    first = await sandbox.run("(while :; do echo noise; sleep 0.01; done) & echo started", timeout_s=240)
    assert first.exit_code == 0
    await asyncio.sleep(0.2)
    await sandbox.run("kill %1; pkill -f noise; kill -9 -1", timeout_s=240)
    assert (await sandbox.run("echo quiet", timeout_s=240)).output == b"quiet\n"


@pytest.mark.slow_but_for("init-echo a*", "bash-echo a*")
@pytest.mark.parametrize(
    ("command", "exit_code", "output"),
    [
        ("echo a\0b", 126, b"bash: a command cannot contain a NUL byte\n"),
        (r"printf '\377\376\000\200'", 0, b"\xff\xfe\x00\x80"),
        ("printf '%s' 'é\udcff\U0001f40d'", 0, "é\udcff\U0001f40d".encode("utf-8", "surrogateescape")),
        ("printf '%s' '\ud800'", 0, b"?"),
        ("printf '%s' 'a\x01\x1b\r\n\x7f'", 0, b"a\x01\x1b\r\n\x7f"),
        (
            "echo 0123456789abcdef0123456789abcdef:end 0 0; exit 4",
            4,
            b"0123456789abcdef0123456789abcdef:end 0 0\n",
        ),
        ("cat <<'EOF'\n$HOME\nEOF", 0, b"$HOME\n"),
        ("echo 'unfinished", 2, b"bash: -c: line 1: unexpected EOF while looking for matching `''\n"),
        ("", 0, b""),
    ],
)
async def test_any_bytes_survive(sandbox: DockerSandbox, command: str, exit_code: int, output: bytes) -> None:
    result = await sandbox.run(command, timeout_s=240)
    assert (result.exit_code, result.output) == (exit_code, output)


async def test_a_command_longer_than_an_argument_may_be_runs(sandbox: DockerSandbox) -> None:
    text = "0123456789abcde\n" * 20_000
    result = await sandbox.run(f"sha256sum <<'END'\n{text}END\nexit 7", timeout_s=240)
    assert result.exit_code == 7
    assert result.output.split()[0].decode() == hashlib.sha256(text.encode()).hexdigest()


async def test_a_megabyte_in_one_line_keeps_its_ends(sandbox: DockerSandbox) -> None:
    command = "printf first; head -c 1048576 /dev/zero | tr '\\0' x; printf last"
    result = await sandbox.run(command, timeout_s=240)
    assert result.exit_code == 0
    assert result.output.startswith(b"firstx")
    assert result.output.endswith(b"xlast")
    assert len(result.output) == 2 * docker_sandbox.OUTPUT_KEEP_BYTES
    assert result.dropped_bytes + len(result.output) == 1048576 + len("firstlast")


async def test_the_limits_are_set(
    sandboxes: DockerSandboxes, repo_image: RepoImage, docker_client: docker.DockerClient
) -> None:
    resources = Resources(memory_bytes=128 * 1024**2, cpus=0.5, pids=50)
    claim = make_claim(make_task(repo_image.tag, resources=resources), request_id="r7", attempt=2)
    async with sandboxes.open(claim, role="agent") as sandbox:
        inspected = docker_client.api.inspect_container(sandbox.id)
        interfaces = await sandbox.run("tail -n +3 /proc/net/dev | cut -d: -f1", timeout_s=240)
        status = await sandbox.run("grep -E 'NoNewPrivs|CapEff' /proc/self/status", timeout_s=240)
    host = inspected["HostConfig"]
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (128 * 1024**2, 128 * 1024**2, 50)
    assert host["CpuQuota"] / host["CpuPeriod"] == 0.5
    assert (host["NetworkMode"], host["CapDrop"], host["LogConfig"]["Type"]) == ("none", ["ALL"], "none")
    assert interfaces.output.split() == [b"lo"]
    # CHOWN 0, DAC_OVERRIDE 1, FOWNER 3, KILL 5, SETGID 6, SETUID 7
    assert status.output.split() == [b"CapEff:", b"00000000000000eb", b"NoNewPrivs:", b"1"]
    labels = inspected["Config"]["Labels"]
    assert {labels[f"swerve.{key}"] for key in ("run", "request", "attempt", "worker", "role")} == {
        "run", "r7", "2", "test/1", "agent",
    }  # fmt: skip


@pytest.mark.slow_but_for("init_cannot_run")
async def test_more_memory_than_allowed_ends_the_command_only(sandbox: DockerSandbox) -> None:
    result = await sandbox.run("python3 -c 'x = bytearray(2 * 1024**3)'", timeout_s=240)
    assert result.exit_code not in (0, None)
    assert (await sandbox.run("echo alive", timeout_s=240)).output == b"alive\n"


@pytest.mark.slow_but_for("init")
async def test_without_a_network_there_is_a_loopback_of_ones_own(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    listen = "import socket, time; s = socket.create_server(('localhost', 8080)); print('up', flush=True); s.accept()"
    connect = (
        "python3 -c \"import socket; print(socket.create_connection(('localhost', 8080)).getpeername())\""
    )
    claim = make_claim(make_task(repo_image.tag))
    async with sandboxes.open(claim, role="agent") as one, sandboxes.open(claim, role="grade") as other:
        assert (await one.run("echo $(ls /sys/class/net)", timeout_s=240)).output == b"lo\n"
        await one.run(
            f'python3 -c "{listen}" >/tmp/up & until [ -s /tmp/up ]; do sleep 0.01; done', timeout_s=240
        )
        assert (await other.run(connect, timeout_s=240)).exit_code == 1, "it is nobody else's"
        assert (await one.run(connect, timeout_s=240)).output == b"('127.0.0.1', 8080)\n"
        lookup = "python3 -c \"import socket; socket.gethostbyname('example.org')\""
        assert b"gaierror" in (await one.run(lookup, timeout_s=240)).output


@pytest.mark.slow_but_for("init")
async def test_a_task_may_ask_for_the_network(
    sandboxes: DockerSandboxes, repo_image: RepoImage, docker_client: docker.DockerClient
) -> None:
    claim = make_claim(make_task(repo_image.tag, resources=Resources(network=True, memory_bytes=2**28)))
    async with sandboxes.open(claim, role="agent") as sandbox:
        mode = docker_client.api.inspect_container(sandbox.id)["HostConfig"]["NetworkMode"]
    assert mode == "bridge"


async def test_a_missing_image_is_told_apart(sandboxes: DockerSandboxes) -> None:
    with pytest.raises(ImageMissing, match="swerve-test:never"):
        async with sandboxes.open(make_claim(make_task("swerve-test:never")), role="agent"):
            pass


async def test_a_docker_host_that_is_not_there_is_a_sandbox_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    sandboxes = DockerSandboxes()
    with pytest.raises(SandboxError, match=r"nobody listens at unix:///nonexistent/docker\.sock"):
        await sandboxes.check()
    await sandboxes.close()


@pytest.mark.slow_but_for("init-sleep 1000", "init-yes")
@pytest.mark.parametrize("command", ["sleep 1000", "yes"])
async def test_a_container_that_vanishes_is_never_an_observation(
    sandbox: DockerSandbox, docker_client: docker.DockerClient, command: str
) -> None:
    running = asyncio.create_task(sandbox.run(command, timeout_s=240))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(docker_client.api.remove_container, sandbox.id, force=True)
    with pytest.raises(SandboxError):
        await running
    with pytest.raises(SandboxError):
        await sandbox.run("true", timeout_s=240)
    with pytest.raises(SandboxError):
        await sandbox.diff()


@pytest.mark.slow_but_for("init", "bash")
async def test_a_container_that_is_killed_is_never_an_observation(
    sandbox: DockerSandbox, docker_client: docker.DockerClient
) -> None:
    running = asyncio.create_task(sandbox.run("sleep 1000", timeout_s=240))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(docker_client.api.kill, sandbox.id)
    with pytest.raises(SandboxError):
        await running


@pytest.mark.slow
async def test_a_container_ends_at_its_deadline_even_within_a_command(
    sandboxes: DockerSandboxes, repo_image: RepoImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_sandbox, "DEADLINE_GRACE_S", 1.0)
    claim = make_claim(make_task(repo_image.tag), grade_wall_s=5.0)
    async with sandboxes.open(claim, role="grade") as sandbox:  # a grader's is open sooner than an agent's
        with pytest.raises(SandboxError):
            await sandbox.run("sleep 1000", timeout_s=240)


@pytest.mark.slow
async def test_a_cancelled_caller_leaves_no_container(
    sandboxes: DockerSandboxes, repo_image: RepoImage, docker_client: docker.DockerClient
) -> None:
    opened: asyncio.Queue[str] = asyncio.Queue()

    async def episode() -> None:
        async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent") as sandbox:
            opened.put_nowait(sandbox.id)
            await sandbox.run("sleep 1000", timeout_s=1000)

    running = asyncio.create_task(episode())
    name = await opened.get()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(NotFound):
        docker_client.api.inspect_container(name)


@pytest.mark.slow_but_for("init", "init-*")
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.3])
async def test_cancelling_while_a_container_starts_leaves_none(
    sandboxes: DockerSandboxes, repo_image: RepoImage, after_s: float
) -> None:
    async def episode() -> None:
        async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="agent"):
            await asyncio.sleep(1000)

    running = asyncio.create_task(episode())
    await asyncio.sleep(after_s)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_the_containers_of_a_killed_worker_end_by_themselves(
    repo_image: RepoImage, docker_client: docker.DockerClient
) -> None:
    script = f"""
import asyncio
from tests.workers.claims import make_claim, make_task
from workers.sandbox.docker import DockerSandboxes

async def main():
    async with DockerSandboxes().open(make_claim(make_task({repo_image.tag!r})), role="agent") as sandbox:
        print(sandbox.id, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    name = (await worker.stdout.readline()).decode().strip()
    docker_client.api.inspect_container(name)
    worker.kill()
    await worker.wait()
    async with asyncio.timeout(240):
        with contextlib.suppress(NotFound):
            while True:
                docker_client.api.inspect_container(name)
                await asyncio.sleep(0.1)


async def test_files_are_put_where_they_belong(sandbox: DockerSandbox) -> None:
    large = bytes(range(256)) * 1024
    await sandbox.put(
        [File(path="it's/a b", content=b"\0\xff", mode=0o600), File(path="/opt/x/run", content=b"")]
    )
    await sandbox.put([File(path="deep/large", content=large, mode=0o755), File(path="/opt/y", content=b"")])
    result = await sandbox.run(
        """stat -c '%a %s %U' "it's/a b" /opt/x/run deep/large /opt/y; sha256sum deep/large | cut -c1-64""",
        timeout_s=240,
    )
    assert result.output.decode().splitlines() == [
        "600 2 root",
        "644 0 root",
        f"755 {len(large)} root",
        "644 0 root",
        hashlib.sha256(large).hexdigest(),
    ]


@pytest.mark.slow_but_for("init")
async def test_files_too_many_for_one_command_are_put_all_the_same(sandbox: DockerSandbox) -> None:
    files = [File(path=f"many/{'x' * 150}{number}", content=b"x") for number in range(500)]
    assert not fits(writing(files, sandbox.workdir))
    await sandbox.put(files)
    result = await sandbox.run("cat many/* | wc -c", timeout_s=240)
    assert result.output.strip() == b"500"


@pytest.mark.slow_but_for("init_cannot_run")
async def test_cpu_time_is_that_of_the_container(sandbox: DockerSandbox) -> None:
    before = await sandbox.cpu_s()
    await sandbox.run("python3 -c 'import time\nwhile time.process_time() < 0.5: pass'", timeout_s=240)
    assert await sandbox.cpu_s() - before >= 0.5


@pytest.mark.parametrize("init", [built_init()], ids=["init"], indirect=True)
async def test_cpu_time_may_be_asked_for_before_the_last_script_starts(
    sandboxes: DockerSandboxes, sandbox: DockerSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy Docker host takes its time before it watches for the container's end."""
    watch, asking = sandboxes.api.watch, asyncio.Event()

    async def watch_late(name: str) -> requests.Response:
        response = await watch(name)
        await asking.wait()
        return response

    monkeypatch.setattr(sandboxes.api, "watch", watch_late)
    await sandbox.put([File(path="/last.sh", content=b"sleep 1000\n")])
    last = asyncio.create_task(sandbox.finish("/last.sh", timeout_s=600, keep_bytes=1000))
    await asyncio.sleep(0)
    cpu_s = asyncio.create_task(sandbox.cpu_s())
    await asyncio.sleep(0)
    asking.set()
    assert await cpu_s > 0
    while not last.done():
        with contextlib.suppress(SandboxError):  # of a container that has just ended
            await sandbox.interrupt()
        await asyncio.wait({last}, timeout=0.5)
    assert (await last).exit_code == 137
