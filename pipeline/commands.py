"""Redis commands by name.

redis-py types many of its methods as perhaps awaitable, or not at all: here is the one place that knows
better.
"""

from typing import Any, cast

from redis.asyncio import Redis

Word = str | bytes | int | float


async def command(redis: Redis, *words: Word) -> Any:
    """One command, spelled as Redis spells it; the reply is parsed as redis-py parses it."""
    client = cast(Any, redis)
    return await client.execute_command(*words)


async def script(redis: Redis, source: str, wanted: list[str], arguments: list[Word]) -> Any:
    """Run Lua over the keys `wanted`.

    Redis keeps scripts by content, so this costs a few hundred bytes on the wire.
    """
    return await command(redis, "EVAL", source, len(wanted), *wanted, *arguments)
