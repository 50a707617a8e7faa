"""Which runs a command line means."""

from redis.asyncio import Redis

from pipeline import census


async def chosen(redis: Redis, only: str | None) -> list[str]:
    """Ids of the runs to look at. Raises LookupError if there is no run of that name."""
    known = await census.run_ids(redis)
    if only is not None and only not in known:
        raise LookupError(f"no run {only}; there is {', '.join(known) or 'none at all'}")
    return known if only is None else [only]
