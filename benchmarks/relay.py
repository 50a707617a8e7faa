"""What a program in a container waits for an answer of the worker, beyond what a server beside it would take.

A client in the container sends 40 kB and gets 2 kB on one kept-alive connection, from the worker and from a server in the same container,
which runs the same protocol. A round has a block for each, in random order. Also: the memory of process 1 while 64 connections hold all
that they may, and how long a program that sends single bytes on all of them holds the worker's event loop.

`python -m benchmarks.relay [--json] [--short]`
"""

import asyncio
import contextlib
import inspect
import json
import secrets
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from benchmarks import bug, hold
from benchmarks.report import Comparison, Statistic, compared, main, p50, p95, shuffled
from pipeline.task import File
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import Sandbox

RELAYED_PORT, NEARBY_PORT = 8123, 8124
REQUEST_BYTES, REPLY_BYTES = 40_000, 2_000
ENOUGH_S = 600.0
ALLOWED_MS = {"p50": 2.0, "p95": 5.0}
ALLOWED_MB = 2.0
NUM_CONNECTIONS = 64
FLOOD_S = 3.0


class Answering(asyncio.Protocol):
    """Answers every request of REQUEST_BYTES; also runs in the container, so it uses nothing of this module but these numbers."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.missing_bytes = transport, REQUEST_BYTES

    def data_received(self, data: bytes) -> None:
        self.missing_bytes -= len(data)
        if self.missing_bytes <= 0:
            self.missing_bytes += REQUEST_BYTES
            self.transport.write(bytes(REPLY_BYTES))  # type: ignore[attr-defined]


class Deaf(asyncio.Protocol):
    """Writes more than is read, and reads nothing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        transport.write(bytes(1024**2))


SERVER = f"""
import asyncio
REQUEST_BYTES, REPLY_BYTES = {REQUEST_BYTES}, {REPLY_BYTES}
{inspect.getsource(Answering)}
async def serve():
    server = await asyncio.get_running_loop().create_server(Answering, '127.0.0.1', {NEARBY_PORT})
    open('/up', 'w').close()
    await server.serve_forever()
asyncio.run(serve())
"""
# Arguments: the port, the number of requests. Prints what each took, in seconds.
CLIENT = f"""
import json, socket, sys, time
one = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def ask():
    began = time.perf_counter()
    one.sendall(bytes({REQUEST_BYTES}))
    missing = {REPLY_BYTES}
    while missing: missing -= len(one.recv(missing))
    return time.perf_counter() - began
ask()
print(json.dumps([ask() for _ in range(int(sys.argv[2]))]))
"""
# Arguments: "fill", which sends as much as is taken, or "drip", which sends single bytes.
HOSTILE = f"""
import socket, sys
many = [socket.create_connection(('127.0.0.1', {RELAYED_PORT})) for _ in range({NUM_CONNECTIONS})]
for one in many:
    one.setblocking(False)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
piece = bytes(65536 if sys.argv[1] == 'fill' else 1)
while True:
    for one in many:
        try: one.send(piece)
        except BlockingIOError: pass
"""


@dataclass(frozen=True, slots=True)
class RelayPlan:
    num_rounds: int
    num_requests: int  # of a block


LONG, SHORT = RelayPlan(num_rounds=10, num_requests=500), RelayPlan(num_rounds=2, num_requests=30)


async def relay(short: bool) -> list[Comparison]:
    plan = SHORT if short else LONG
    with bug.image():
        async with container() as sandbox:
            relayed, nearby = await latencies(sandbox, plan)
            more_mb = await memory_mb(sandbox)
            held_ms = await longest_hold_ms(sandbox)
    found: list[Comparison] = []
    for word, statistic in (("p50", p50), ("p95", p95)):
        unit = f"ms for {REQUEST_BYTES // 1000} kB in and {REPLY_BYTES // 1000} kB out, {word}"
        found.append(
            compared("relay", relayed, nearby, statistic, rival_name="same container", unit=unit, scale=1e3)
        )
        found.append(added(relayed, nearby, statistic, word))
    unit = f"MB more of process 1 for {NUM_CONNECTIONS} connections that nobody reads"
    found.append(Comparison("relay", more_mb, ALLOWED_MB, f"{ALLOWED_MB:g} MB", unit))
    unit = f"ms that the event loop is held by single bytes on {NUM_CONNECTIONS} connections, longest"
    found.append(Comparison("relay", held_ms, hold.ALLOWED_MS, hold.RIVAL, unit))
    return found


def added(
    relayed: Sequence[Sequence[float]], nearby: Sequence[Sequence[float]], statistic: Statistic, word: str
) -> Comparison:
    """What the relay adds, against what we allow. On a busy machine it may even be less than nothing, which counts as nothing."""
    allowed_ms = ALLOWED_MS[word]

    def added_ms(ours: Sequence[float], rival: Sequence[float]) -> float:
        return max(0.0, 1e3 * (statistic(ours) - statistic(rival)))

    whole = added_ms(*([sample for one in blocks for sample in one] for blocks in (relayed, nearby)))
    rounds = tuple(added_ms(*pair) / allowed_ms for pair in zip(relayed, nearby, strict=True))
    return Comparison("relay", whole, allowed_ms, f"{allowed_ms:g} ms", f"ms added, {word}", rounds)


@contextlib.asynccontextmanager
async def container() -> AsyncGenerator[Sandbox]:
    fleet = DockerSandboxes(fleet=f"bench-{secrets.token_hex(4)}")
    try:
        async with fleet.open(bug.claim(), role="agent") as sandbox:
            texts = {"/server.py": SERVER, "/client.py": CLIENT, "/hostile.py": HOSTILE}
            await sandbox.put([File(path=path, content=text.encode()) for path, text in texts.items()])
            yield sandbox
    finally:
        await fleet.close()


async def latencies(sandbox: Sandbox, plan: RelayPlan) -> tuple[list[list[float]], list[list[float]]]:
    """The latencies of each round: those of the worker, and those of the server in the container."""
    found: dict[int, list[list[float]]] = {RELAYED_PORT: [], NEARBY_PORT: []}
    await output(sandbox, "python3 /server.py >/dev/null 2>&1 & until [ -e /up ]; do sleep 0.01; done")
    async with sandbox.serve(RELAYED_PORT, Answering):
        for _ in range(plan.num_rounds):
            for port in shuffled(found):
                printed = await output(sandbox, f"python3 /client.py {port} {plan.num_requests}")
                found[port].append(json.loads(printed))
    return found[RELAYED_PORT], found[NEARBY_PORT]


async def memory_mb(sandbox: Sandbox) -> float:
    before_mb = await resident_mb(sandbox)
    async with sandbox.serve(RELAYED_PORT, Deaf):
        await output(sandbox, "python3 /hostile.py fill >/dev/null 2>&1 & sleep 3")
        after_mb = await resident_mb(sandbox)
    await sandbox.interrupt()
    return after_mb - before_mb


async def resident_mb(sandbox: Sandbox) -> float:
    """Memory of process 1."""
    return int((await output(sandbox, "grep VmRSS /proc/1/status")).split()[1]) * 1024 / 1e6


async def longest_hold_ms(sandbox: Sandbox) -> float:
    async with sandbox.serve(RELAYED_PORT, asyncio.Protocol):
        await output(sandbox, "python3 /hostile.py drip >/dev/null 2>&1 & sleep 1")
        async with hold.ticking() as ticker:
            await asyncio.sleep(FLOOD_S)
    return 1e3 * ticker.longest_s


async def output(sandbox: Sandbox, command: str) -> str:
    done = await sandbox.run(command, timeout_s=ENOUGH_S)
    assert done.exit_code == 0, f"{command}: {done}"
    return done.output.decode()


if __name__ == "__main__":
    sys.exit(main("relay", __doc__, relay))
