"""One policy per fleet: whoever publishes weights to the engines behind this Redis holds a lease, and renews it.

Two trainers would push their weights against each other, and no trajectory could say by which policy it was sampled. The lease
belongs to a run: a trainer that was killed takes its run's lease over when it is started again. A holder whose lease was taken
by another run, after an outage longer than the lease, learns so at its next renewal, and must publish no more.
"""

import os
import secrets
import socket
from dataclasses import dataclass, field

from redis.asyncio import Redis

from pipeline import keys
from pipeline.commands import script

LEASE_S = 15.0

# A full Redis has room for the lease. KEYS: the lease. ARGV: run, token, host, process id, milliseconds.
_WRITE = """
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'run', ARGV[1], 'token', ARGV[2], 'host', ARGV[3], 'pid', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return false
"""

_ACQUIRE = f"""#!lua flags=allow-oom
local run = redis.call('HGET', KEYS[1], 'run')
if run and run ~= ARGV[1] then return redis.call('HMGET', KEYS[1], 'run', 'token', 'host', 'pid') end
{_WRITE}
"""

_RENEW = f"""#!lua flags=allow-oom
local token = redis.call('HGET', KEYS[1], 'token')
if token and token ~= ARGV[2] then return redis.call('HMGET', KEYS[1], 'run', 'token', 'host', 'pid') end
{_WRITE}
"""

_RELEASE = """#!lua flags=allow-oom
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""

_RUN = """#!lua flags=no-writes
return redis.call('HGET', KEYS[1], 'run')
"""


@dataclass(frozen=True, slots=True)
class PolicyHolder:
    """A process that publishes the weights of a run."""

    run_id: str
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    # Tells this process from a later one with the same pid.
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def __str__(self) -> str:
        return f"run {self.run_id} (process {self.pid} on {self.host})"


async def acquire(redis: Redis, holder: PolicyHolder) -> PolicyHolder | None:
    """Take the lease if nobody holds it, or an earlier process of the same run. Returns the other run's holder if not."""
    return await _hold(redis, _ACQUIRE, holder)


async def renew(redis: Redis, holder: PolicyHolder) -> PolicyHolder | None:
    """Keep the lease, or take it again if it expired and nobody took it. Returns the process that did, if one did."""
    return await _hold(redis, _RENEW, holder)


async def publishing_run(redis: Redis) -> str:
    """The run that holds the lease; empty if none does."""
    run_id: bytes | None = await script(redis, _RUN, [], wanted=[keys.policy_lease()])
    return "" if run_id is None else run_id.decode(errors="replace")


async def release(redis: Redis, holder: PolicyHolder) -> None:
    """Let the next run begin at once. Does nothing if another process holds the lease by now."""
    await script(redis, _RELEASE, [holder.token], wanted=[keys.policy_lease()])


async def _hold(redis: Redis, source: str, holder: PolicyHolder) -> PolicyHolder | None:
    arguments = [holder.run_id, holder.token, holder.host, holder.pid, int(1000 * LEASE_S)]
    found: list[bytes | None] | None = await script(redis, source, arguments, wanted=[keys.policy_lease()])
    if found is None:
        return None
    run_id, token, host, pid = (value.decode(errors="replace") if value else "" for value in found)
    return PolicyHolder(run_id=run_id, host=host, pid=int(pid) if pid.isdigit() else 0, token=token)
