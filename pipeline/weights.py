"""Weight versions: which one the trainer published last, which one the engines serve, and who may publish.

A version never changes, and its directory is complete before it is made known here. Only the trainer writes.

There is one policy per fleet: the process that publishes weights to the engines of this Redis holds a lease, and renews it. Two trainers
would overwrite each other's weights, and no trajectory could say which policy sampled it. The lease belongs to a run: a trainer that was
killed takes its run's lease over when it is started again. A holder whose lease was taken by another run, after an outage longer than the
lease, learns so at its next renewal, and must publish no more.
"""

import os
import secrets
import socket
from dataclasses import dataclass, field

from redis.asyncio import Redis

from pipeline import keys
from pipeline.message import Message, UnixSeconds, decode, encode
from pipeline.redis_calls import put, script


class WeightVersion(Message, frozen=True, kw_only=True):
    run_id: str
    version: int  # 0 = initial; +1 per publication, never used twice, not even after a resume
    step: int  # optimizer steps taken
    directory: str  # HF layout
    num_bytes: int
    published_at: UnixSeconds
    # The directory holds adapters in PEFT's format, which engines load beside the base: the weights that the run started with.
    is_adapter: bool = False

    @property
    def name(self) -> str:
        return version_name(self.run_id, self.version)


class ServedWeights(Message, frozen=True, kw_only=True):
    """The version that the engines confirmed to serve."""

    version: int
    engines: tuple[str, ...]
    quarantined: tuple[str, ...] = ()  # failed to take the version and are out of routing
    confirmed_at: UnixSeconds = 0.0


def version_name(run_id: str, version: int) -> str:
    """The name that an engine is given, and reports with every token: no two runs share a name."""
    return f"{run_id}@{version}"


def parse_version_name(name: str) -> tuple[str, int]:
    """Inverse of `version_name`. Raises ValueError for weights that no run has published."""
    run_id, at, version = name.rpartition("@")
    if not at or not version.isdecimal():
        raise ValueError(f"{name!r} is not a published weight version, as in demo-20260101-120000@3")
    return run_id, int(version)


BASE = "-base"
"""Suffix of a run's id in the name of the weights that its adapters belong to, which are version 0 of that."""


def base_run(run_id: str) -> str:
    return run_id + BASE


def base_name(run_id: str) -> str:
    """The name of the whole weights of an engine that samples with a run's adapters."""
    return version_name(base_run(run_id), 0)


def run_of(name: str) -> str:
    """The run that published weights of this name, or the base of its adapters. Raises ValueError like `parse_version_name`."""
    return parse_version_name(name)[0].removesuffix(BASE)


async def announce(redis: Redis, weights: WeightVersion) -> None:
    """Make a complete version known as the newest. Raises ValueError if it is not above the newest known."""
    newest = await newest_version(redis, weights.run_id)
    if newest is not None and weights.version <= newest.version:
        raise ValueError(
            f"weight version {weights.version} is not above the newest announced, {newest.version}"
        )
    await put(redis, keys.weights(weights.run_id), encode(weights))


async def newest_version(redis: Redis, run_id: str) -> WeightVersion | None:
    data = await redis.get(keys.weights(run_id))
    return None if data is None else decode(data, WeightVersion)


async def record_served(redis: Redis, run_id: str, served: ServedWeights) -> None:
    await put(redis, keys.served(run_id), encode(served))


async def served_weights(redis: Redis, run_id: str) -> ServedWeights | None:
    data = await redis.get(keys.served(run_id))
    return None if data is None else decode(data, ServedWeights)


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
    """Lets the next run begin at once. Does nothing if another process holds the lease by now."""
    await script(redis, _RELEASE, [holder.token], wanted=[keys.policy_lease()])


async def _hold(redis: Redis, source: str, holder: PolicyHolder) -> PolicyHolder | None:
    arguments = [holder.run_id, holder.token, holder.host, holder.pid, int(1000 * LEASE_S)]
    found: list[bytes | None] | None = await script(redis, source, arguments, wanted=[keys.policy_lease()])
    if found is None:
        return None
    run_id, token, host, pid = (value.decode(errors="replace") if value else "" for value in found)
    return PolicyHolder(run_id=run_id, host=host, pid=int(pid) if pid.isdigit() else 0, token=token)
