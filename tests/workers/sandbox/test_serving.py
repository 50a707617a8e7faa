"""Programs in a container without a network talk to a server in the worker; nothing they do there reaches a command or a verdict."""

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import docker
import pytest
from aiohttp import web

from pipeline.errors import SandboxError
from pipeline.task import File
from tests.workers.busy import busy_machine
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from workers.docker.host import FLEET
from workers.sandbox.docker import DockerSandbox, DockerSandboxes
from workers.sandbox.first_process import built_init
from workers.sandbox.protocol import CannotServe, is_starved

pytestmark = pytest.mark.docker

ROOT = Path(__file__).parents[3]
PORT = 8123
ENOUGH_S = 120.0
MIB = 1024**2
OTHER_PROCESSOR = b"\x7fELF" + bytes(1000)
# What the clients in the container begin with.
CLIENT = f"""
import hashlib, http.client, os, socket, struct, sys, threading, time
def connect():
    return socket.create_connection(('127.0.0.1', {PORT}))
def ask(connection, body=b'', path='/echo'):
    connection.request('POST', path, body)
    return connection.getresponse().read()
def keeping():
    return http.client.HTTPConnection('127.0.0.1', {PORT})
def reset(one):
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    one.close()
def end_of(one):
    try:
        while one.recv(65536): pass
        return 'closed'
    except ConnectionResetError:
        return 'reset'
"""
# Tells what a new connection comes to, for scripts that cannot rely on a file.
CONNECT = f"""python3 -c "import socket
try:
    one = socket.create_connection(('127.0.0.1', {PORT}))
    print('connected')
except ConnectionRefusedError:
    print('refused')"
"""


class Recorder(asyncio.Protocol):
    """A protocol that does nothing but note what happens to it; some behaviour is added by its maker."""

    def __init__(self, *, greeting: bytes = b"", takes: bool = True, keeps_half: bool = False) -> None:
        self.greeting, self.takes, self.keeps_half = greeting, takes, keeps_half
        self.received = bytearray()
        self.ended = asyncio.Event()
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.is_held_back = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if not self.takes:
            transport.pause_reading()
        if self.greeting:
            transport.write(self.greeting)

    def data_received(self, data: bytes) -> None:
        self.received += data

    def eof_received(self) -> bool:
        self.ended.set()
        return self.keeps_half

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)

    def pause_writing(self) -> None:
        self.is_held_back = True

    def resume_writing(self) -> None:
        self.is_held_back = False


class Recorders:
    """All that were made, in order."""

    def __init__(self, **how: object) -> None:
        self.made: list[Recorder] = []
        self._how = how

    def __call__(self) -> Recorder:
        self.made.append(Recorder(**self._how))  # type: ignore[arg-type]
        return self.made[-1]


@pytest.fixture
def init(request: pytest.FixtureRequest) -> bytes:
    return getattr(request, "param", built_init())


@pytest.fixture
async def sandbox(sandboxes: DockerSandboxes, repo_image: RepoImage) -> AsyncIterator[DockerSandbox]:
    async with sandboxes.open(make_claim(make_task(repo_image.tag)), role="grade") as sandbox:
        yield sandbox


class Site:
    """An aiohttp application that says what it was sent, and notes which connections it was asked on."""

    def __init__(self) -> None:
        self.connections: list[object] = []
        self.wait_for = asyncio.Event()
        self.is_asked = asyncio.Event()

    async def echo(self, request: web.Request) -> web.Response:
        self.connections.append(request.transport)
        body = await request.read()
        return web.Response(text=f"{len(body)} {hashlib.sha256(body).hexdigest()}")

    async def slow(self, request: web.Request) -> web.Response:
        self.is_asked.set()
        await self.wait_for.wait()
        return web.Response(text="at last")

    async def big(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(512):
            await answer.write(bytes(64 * 1024))
        await answer.write_eof()
        return answer

    @asynccontextmanager
    async def server(self) -> AsyncIterator[web.Server]:
        app = web.Application(client_max_size=64 * MIB)
        for name in ("echo", "slow", "big"):
            app.router.add_post(f"/{name}", getattr(self, name))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        assert runner.server is not None
        yield runner.server
        self.wait_for.set()
        await runner.cleanup()


@pytest.fixture
async def site(sandbox: DockerSandbox) -> AsyncIterator[Site]:
    """Already served to the container."""
    site = Site()
    async with site.server() as server, sandbox.serve(PORT, server):
        yield site


def echoed(body: bytes) -> str:
    return f"{len(body)} {hashlib.sha256(body).hexdigest()}"


async def client(sandbox: DockerSandbox, code: str) -> list[str]:
    """The lines that a program in the container prints."""
    result = await sandbox.run(f"python3 - <<'END'\n{CLIENT}{code}\nEND", timeout_s=ENOUGH_S)
    assert result.exit_code == 0, result.output.decode()
    return result.output.decode().splitlines()


async def in_background(sandbox: DockerSandbox, code: str) -> None:
    """Starts a program in the container that outlives its command."""
    await sandbox.put([File(path="/client.py", content=(CLIENT + code).encode())])
    assert (await sandbox.run("python3 /client.py >/client.log 2>&1 &", timeout_s=ENOUGH_S)).exit_code == 0


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_an_aiohttp_app_answers_a_program_without_a_network_while_it_runs_as_a_command(
    sandbox: DockerSandbox, site: Site
) -> None:
    lines = await client(
        sandbox, "print(*os.listdir('/sys/class/net'))\nprint(ask(keeping(), b'word').decode())"
    )
    assert lines == ["lo", echoed(b"word")]


async def test_a_program_that_outlives_its_command_is_answered_between_commands(
    sandbox: DockerSandbox, site: Site
) -> None:
    await in_background(sandbox, "print(ask(keeping(), b'later', '/slow').decode())")
    await site.is_asked.wait()
    site.wait_for.set()
    log = b""
    while log != b"at last\n":
        log = (await sandbox.run("cat /client.log", timeout_s=ENOUGH_S)).output


async def test_a_connection_is_kept_alive(sandbox: DockerSandbox, site: Site) -> None:
    lines = await client(
        sandbox, "one = keeping()\nfor n in range(50): print(ask(one, b'x' * n * 1000).decode())"
    )
    assert lines == [echoed(b"x" * n * 1000) for n in range(50)]
    assert len(set(map(id, site.connections))) == 1


async def test_eight_connections_at_once_get_their_own_answers(sandbox: DockerSandbox, site: Site) -> None:
    code = """
def talk(name):
    one = keeping()
    for n in range(25):
        body = f'{name}-{n}'.encode() * 5000
        expected = f'{len(body)} {hashlib.sha256(body).hexdigest()}'
        sys.stdout.write(f'{ask(one, body).decode() == expected}\\n')
threads = [threading.Thread(target=talk, args=(name,)) for name in range(8)]
for one in threads: one.start()
for one in threads: one.join()
"""
    assert await client(sandbox, code) == ["True"] * 200
    assert len(set(map(id, site.connections))) == 8


async def test_the_65th_connection_is_reset_and_one_that_ends_makes_room(sandbox: DockerSandbox) -> None:
    recorders = Recorders(greeting=b"!")
    code = """
many = [connect() for _ in range(64)]
print(*{one.recv(1) for one in many})
print(end_of(connect()))
many[30].close()
while True:
    try:
        print(connect().recv(1)); break
    except ConnectionResetError:
        pass
"""
    async with sandbox.serve(PORT, recorders):
        assert await client(sandbox, code) == ["b'!'", "reset", "b'!'"]
    assert len(recorders.made) == 65


async def test_a_body_of_32_mib_is_carried(sandbox: DockerSandbox, site: Site) -> None:
    body = bytes(range(256)) * 4 * 1024 * 32
    code = "print(ask(keeping(), bytes(range(256)) * 4 * 1024 * 32).decode())"
    assert await client(sandbox, code) == [echoed(body)]


async def test_neither_a_program_nor_a_handler_that_does_not_read_delays_a_command(
    sandbox: DockerSandbox,
) -> None:
    deaf = Recorders(takes=False, greeting=bytes(4 * MIB))
    code = "many = [connect() for _ in range(20)]\nfor one in many: one.setblocking(False)\n"
    code += "while True:\n  for one in many:\n    try: one.send(bytes(65536))\n    except BlockingIOError: time.sleep(0.01)\n"
    async with sandbox.serve(PORT, deaf):
        await in_background(sandbox, code)
        await until(lambda: len(deaf.made) == 20)
        much = await sandbox.run("head -c 3000000 /dev/zero", timeout_s=ENOUGH_S, keep_bytes=2_000_000)
        assert much.output == bytes(3_000_000)
        assert all(one.is_held_back and not one.received for one in deaf.made)
        await sandbox.put([File(path="/last.sh", content=b"exit 7\n")])
        assert (await sandbox.finish("/last.sh", timeout_s=ENOUGH_S, keep_bytes=1000)).exit_code == 7


async def test_a_program_that_stops_reading_holds_back_its_own_handler_until_it_reads_again(
    sandbox: DockerSandbox, site: Site
) -> None:
    code = """
one = connect()
one.sendall(b'POST /big HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n')
print(ask(keeping(), b'another').decode())
length = 0
while data := one.recv(65536): length += len(data)
print(length > 32 * 1024 ** 2)
"""
    assert await client(sandbox, code) == [echoed(b"another"), "True"]


async def test_a_connection_that_the_program_cuts_is_lost_to_its_protocol(sandbox: DockerSandbox) -> None:
    recorders = Recorders(greeting=b"!")
    async with sandbox.serve(PORT, recorders):
        await client(
            sandbox,
            "one = connect()\none.recv(1)\none.send(b'half a req')\nother = connect()\nother.recv(1)\nreset(other)",
        )
        ended, was_reset = recorders.made
        assert await ended.lost is None
        assert isinstance(await was_reset.lost, ConnectionResetError)
        assert ended.received == b"half a req"


async def test_a_connection_that_the_worker_cuts_is_reset_and_one_that_it_closes_gets_everything_first(
    sandbox: DockerSandbox,
) -> None:
    class Closing(Recorder):
        def data_received(self, data: bytes) -> None:
            if data == b"abort":
                self.transport.write(bytes(MIB))
                self.transport.abort()
            else:
                self.transport.write(bytes(4 * MIB))
                self.transport.close()

    code = """
one = connect(); one.send(b'abort'); print(end_of(one))
two = connect(); two.send(b'close'); time.sleep(0.2)
length = 0
while data := two.recv(65536): length += len(data)
print(length)
"""
    async with sandbox.serve(PORT, Closing):
        assert await client(sandbox, code) == ["reset", str(4 * MIB)]


async def test_each_end_may_stop_sending_and_go_on_reading(sandbox: DockerSandbox) -> None:
    recorders = Recorders(keeps_half=True)
    await sandbox.put(
        [
            File(
                path="/half.py",
                content=(
                    CLIENT
                    + """
one = connect()
one.send(b'question'); one.shutdown(socket.SHUT_WR)
print(one.recv(100), one.recv(100))
"""
                ).encode(),
            )
        ]
    )
    async with sandbox.serve(PORT, recorders):
        asking = asyncio.create_task(sandbox.run("python3 /half.py", timeout_s=ENOUGH_S))
        await until(lambda: recorders.made)
        (one,) = recorders.made
        await one.ended.wait()
        assert one.received == b"question"
        one.transport.write(b"answer")
        one.transport.write_eof()
        assert (await asking).output == b"b'answer' b''\n"


@pytest.mark.slow
@pytest.mark.alone
async def test_a_flood_of_output_beside_a_thousand_requests_loses_nothing(
    sandbox: DockerSandbox, site: Site
) -> None:
    code = """
one = keeping()
for n in range(1000):
    body = str(n).encode() * 2000
    assert ask(one, body).decode() == f'{len(body)} {hashlib.sha256(body).hexdigest()}'
"""
    await sandbox.put([File(path="/client.py", content=(CLIENT + code).encode())])
    command = (
        "python3 /client.py & for n in {1..40}; do head -c 5000000 /dev/zero; done; wait $! && echo all right"
    )
    result = await sandbox.run(command, timeout_s=300)
    assert result.output.endswith(b"\0all right\n")
    assert len(result.output) + result.dropped_bytes == 200_000_000 + len("all right\n")
    assert len(site.connections) == 1000


async def test_frames_that_a_command_prints_are_its_output(sandbox: DockerSandbox, site: Site) -> None:
    def frame(kind: bytes, body: bytes) -> bytes:
        return kind + len(body).to_bytes(4, "little") + body

    forged = frame(b"e", bytes(12)) + frame(b"b", bytes(8)) + frame(b"x", b"\0\1") + frame(b"l", b"")
    forged += frame(b"n", b"\5" + bytes(6)) + frame(b"d", b"\0forged") + frame(b"o", b"x" * 7)
    code = f"""
one = keeping()
ask(one)
sys.stdout.buffer.write({forged!r}); sys.stdout.flush()
print(ask(one, b'still there').decode())
sys.exit(5)
"""
    await sandbox.put([File(path="/client.py", content=(CLIENT + code).encode())])
    result = await sandbox.run("python3 /client.py", timeout_s=ENOUGH_S)
    assert (result.exit_code, result.output) == (5, forged + echoed(b"still there").encode() + b"\n")
    assert (await sandbox.run("echo alive", timeout_s=ENOUGH_S)).output == b"alive\n"


async def test_once_the_last_script_begins_nobody_is_connected_and_the_status_is_the_scripts(
    sandbox: DockerSandbox,
) -> None:
    recorders = Recorders(greeting=b"!")
    script = f"cat /told\n{CONNECT}\nprintf 'b\\x08\\0\\0\\0\\xbb\\x1f\\0\\0\\0\\0\\1\\0'\nexit 7\n"
    async with sandbox.serve(PORT, recorders):
        code = "one = connect(); one.recv(1); open('/up', 'w')\nwhile True:\n  open('/told', 'w').write(end_of(one)); time.sleep(1000)"
        await in_background(sandbox, code)
        await until(lambda: recorders.made)
        await sandbox.run("until [ -e /up ]; do sleep 0.01; done", timeout_s=ENOUGH_S)
        await sandbox.put(
            [File(path="/last.sh", content=b"until [ -s /told ]; do sleep 0.01; done\n" + script.encode())]
        )
        last = await sandbox.finish("/last.sh", timeout_s=ENOUGH_S, keep_bytes=MIB)
        assert await recorders.made[0].lost is None
    assert last.exit_code == 7
    assert last.output.startswith(b"resetrefused\n")
    assert len(recorders.made) == 1


async def test_after_the_context_nobody_can_connect_until_somebody_serves_again(
    sandbox: DockerSandbox,
) -> None:
    for greeting in (b"first", b"second"):
        recorders = Recorders(greeting=greeting)
        async with sandbox.serve(PORT, recorders):
            assert await client(sandbox, "print(connect().recv(9))") == [f"{greeting!r}"]
            await in_background(sandbox, "print(end_of(connect()))")
            await until(lambda made=recorders.made: len(made) == 2)
        assert await recorders.made[1].lost is None
        assert (await sandbox.run(CONNECT, timeout_s=ENOUGH_S)).output == b"refused\n"
        await sandbox.run("until [ -s /client.log ]; do sleep 0.01; done", timeout_s=ENOUGH_S)
        assert (await sandbox.run("cat /client.log", timeout_s=ENOUGH_S)).output == b"reset\n"


@pytest.mark.parametrize("way", ["timeout", "interrupt", "diff"])
async def test_killing_the_programs_resets_their_connections_and_the_port_goes_on(
    sandbox: DockerSandbox, way: str
) -> None:
    recorders = Recorders(greeting=b"!")
    async with sandbox.serve(PORT, recorders):
        await in_background(sandbox, "one = connect(); one.recv(1); one.send(b'x'); time.sleep(1000)")
        await until(lambda: recorders.made and recorders.made[0].received)
        if way == "timeout":
            assert (await sandbox.run("sleep 1000", timeout_s=0.5)).exit_code is None
        elif way == "interrupt":
            await sandbox.interrupt()
        else:
            await sandbox.diff()
        assert isinstance(await recorders.made[0].lost, ConnectionResetError)
        assert await client(sandbox, "print(connect().recv(1))") == ["b'!'"]


@pytest.mark.slow
async def test_what_a_killed_program_had_sent_reaches_nobody_later(sandbox: DockerSandbox) -> None:
    deaf = Recorders(takes=False)
    code = "one = connect(); one.setblocking(False)\ntry:\n  while True: one.send(bytes(65536))\n"
    code += "except BlockingIOError: open('/full', 'w')\ntime.sleep(1000)"
    async with sandbox.serve(PORT, deaf):
        await in_background(sandbox, code)
        await sandbox.run("until [ -e /full ]; do sleep 0.01; done", timeout_s=ENOUGH_S)
        await until(lambda: deaf.made)
        assert (await sandbox.run("sleep 1000", timeout_s=0.5)).exit_code is None
        (one,) = deaf.made
        one.transport.resume_reading()
        await one.lost
        assert not one.received


async def test_a_container_that_is_removed_loses_all_connections(
    sandbox: DockerSandbox, docker_client: docker.DockerClient
) -> None:
    recorders = Recorders(greeting=b"!")
    async with sandbox.serve(PORT, recorders):
        await in_background(sandbox, "one = connect(); time.sleep(1000)")
        await until(lambda: recorders.made)
        await asyncio.to_thread(docker_client.api.remove_container, sandbox.id, force=True)
        assert isinstance(await recorders.made[0].lost, ConnectionResetError)
        with pytest.raises(SandboxError):
            await sandbox.run("true", timeout_s=ENOUGH_S)
    with pytest.raises(SandboxError):
        async with sandbox.serve(PORT, recorders):
            pass


WORKER = """
import asyncio, sys
from tests.workers.busy import busy_machine
from tests.workers.claims import make_claim, make_task
from workers.sandbox.docker import DockerSandboxes
class Told(asyncio.Protocol):
    def connection_made(self, transport): print("connected", flush=True)
async def main():
    async with DockerSandboxes(fleet=sys.argv[2]).open(make_claim(make_task(sys.argv[1])), role="grade") as sandbox:
        async with sandbox.serve(8123, Told):
            await sandbox.run("exec 5<>/dev/tcp/127.0.0.1/8123; sleep 1000", timeout_s=1000)
asyncio.run(main())
"""


async def test_with_a_worker_that_is_killed_the_container_and_its_programs_end(
    sandboxes: DockerSandboxes, repo_image: RepoImage, docker_client: docker.DockerClient
) -> None:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, repo_image.tag, sandboxes.fleet),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert worker.stdout is not None
    assert await worker.stdout.readline() == b"connected\n"
    worker.kill()
    await worker.communicate()
    labels = {"label": f"{FLEET}={sandboxes.fleet}"}

    def containers() -> list[object]:
        return docker_client.containers.list(all=True, ignore_removed=True, filters=labels)

    while await asyncio.to_thread(containers):  # noqa: ASYNC110
        await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_two_thousand_connections_leave_no_descriptor_open(sandbox: DockerSandbox, site: Site) -> None:
    """Descriptors of process 1 cannot be listed from within; how large their table has become can be read."""
    code = """
for n in range(2000):
    if n % 4 == 0: ask(keeping(), b'x')
    elif n % 4 == 1: reset(connect())
    elif n % 4 == 2:
        one = connect(); one.send(b'half a request'); one.close()
    else:
        one = connect(); one.send(b'nonsense\\r\\n\\r\\n'); one.shutdown(socket.SHUT_WR); one.recv(1)
print(ask(keeping(), b'end').decode())
"""
    assert await client(sandbox, code) == [echoed(b"end")]
    table = await sandbox.run("grep FDSize /proc/1/status", timeout_s=ENOUGH_S)
    assert int(table.output.split()[1]) <= 128


@pytest.mark.slow
async def test_the_first_process_holds_no_more_than_two_megabytes_for_all_connections(
    sandbox: DockerSandbox,
) -> None:
    async def resident_kib() -> int:
        result = await sandbox.run("grep VmRSS /proc/1/status", timeout_s=ENOUGH_S)
        return int(result.output.split()[1])

    before_kib = await resident_kib()
    deaf = Recorders(takes=False, greeting=bytes(4 * MIB))
    async with sandbox.serve(PORT, deaf):
        await in_background(
            sandbox,
            "many = [connect() for _ in range(64)]\n"
            "for one in many: one.setblocking(False)\n"
            "while True:\n  for one in many:\n    try: one.send(bytes(65536))\n    except BlockingIOError: time.sleep(0.01)\n",
        )
        await until(lambda: len(deaf.made) == 64)
        await asyncio.sleep(1.0)
        assert await resident_kib() - before_kib < 2048


async def test_programs_that_connect_and_hang_up_without_end_keep_nobody_from_anything(
    sandbox: DockerSandbox, site: Site
) -> None:
    await in_background(
        sandbox,
        "import itertools\nfor n in itertools.count():\n  one = connect()\n  reset(one) if n % 2 else one.close()",
    )
    for _ in range(5):
        assert (await sandbox.run("echo alive", timeout_s=ENOUGH_S)).output == b"alive\n"
        code = (
            "while True:\n  try: print(ask(keeping(), b'x').decode()); break\n  except ConnectionError: pass"
        )
        assert await client(sandbox, code) == [echoed(b"x")]


@pytest.mark.slow
@pytest.mark.alone
async def test_a_busy_machine_is_seen_while_programs_talk(
    sandbox: DockerSandbox, site: Site, docker_client: docker.DockerClient, task_image: str
) -> None:
    await in_background(sandbox, "one = keeping()\nwhile True: ask(one, b'x')")
    with busy_machine(docker_client, task_image):
        busy = await sandbox.run("while :; do :; done", timeout_s=3.0)
    assert is_starved(busy)


async def test_a_port_that_a_program_has_cannot_be_served(sandbox: DockerSandbox) -> None:
    await in_background(
        sandbox, f"one = socket.create_server(('', {PORT})); print('up', flush=True); one.accept()"
    )
    await sandbox.run("until [ -s /client.log ]; do sleep 0.01; done", timeout_s=ENOUGH_S)
    with pytest.raises(CannotServe, match=f"port {PORT} of the container: Address already in use"):
        async with sandbox.serve(PORT, Recorder):
            pass
    async with sandbox.serve(PORT + 1, Recorder):
        pass
    with pytest.raises(ValueError, match="ports are 1 to 65535"):
        async with sandbox.serve(0, Recorder):
            pass


@pytest.mark.parametrize(
    ("init", "why"),
    [(b"", "make setup"), (OTHER_PROCESSOR, "another processor")],
    ids=["absent", "alien"],
    indirect=["init"],
)
async def test_a_container_whose_first_process_is_the_bash_says_why_it_cannot_serve(
    sandbox: DockerSandbox, why: str
) -> None:
    with pytest.raises(CannotServe, match=f"carries no connections.*{why}.*workers/README.md"):
        async with sandbox.serve(PORT, Recorder):
            pass
    assert (await sandbox.run("echo alive", timeout_s=ENOUGH_S)).output == b"alive\n"


async def test_containers_that_serve_the_same_port_do_not_meet(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(
                sandboxes.open(make_claim(make_task(repo_image.tag)), role="grade")
            )
            for _ in range(2)
        ]
        for number, one in enumerate(opened):
            await stack.enter_async_context(one.serve(PORT, Recorders(greeting=b"%d" % number)))
        for number, one in enumerate(opened):
            assert isinstance(one, DockerSandbox)
            assert await client(one, "print(connect().recv(9))") == [f"b'{number}'"]


def test_the_first_process_compiles_without_a_warning(tmp_path: Path) -> None:
    words = ["bash", str(ROOT / "infra/setup/init.sh"), str(tmp_path / "init")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
