"""The HTTP session of a judge process: everything that it asks engines and endpoints goes through it."""

import aiohttp


def http_session() -> aiohttp.ClientSession:
    """An async context manager without limits of its own: `votes.py` bounds the votes under way, and their time."""
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
