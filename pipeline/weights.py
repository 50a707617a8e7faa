"""Weight versions: which one the trainer published last, and which one the engines serve.

A version never changes, and its directory is complete before it is made known here. Only the trainer writes.
"""

from redis.asyncio import Redis

from pipeline import keys
from pipeline.commands import put
from pipeline.message import Message, UnixSeconds, decode, encode


class WeightVersion(Message, frozen=True, kw_only=True):
    run_id: str
    version: int  # 0 = initial; +1 per publication, never used twice, not even after a resume
    step: int  # optimizer steps taken
    directory: str  # HF layout
    num_bytes: int
    published_at: UnixSeconds


class ServedWeights(Message, frozen=True, kw_only=True):
    """The version that the engines confirmed to serve."""

    version: int
    engines: tuple[str, ...]
    quarantined: tuple[str, ...] = ()  # failed to take the version and are out of routing
    confirmed_at: UnixSeconds = 0.0


def version_name(run_id: str, version: int) -> str:
    """What an engine is told, and reports with every token: no two runs share a name."""
    return f"{run_id}@{version}"


def parse_version_name(name: str) -> tuple[str, int]:
    """Inverse of `version_name`. Raises ValueError for weights that no run has published."""
    run_id, at, version = name.rpartition("@")
    if not at or not version.isdecimal():
        raise ValueError(f"{name!r} is not a published weight version, as in demo-20260101-120000@3")
    return run_id, int(version)


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
