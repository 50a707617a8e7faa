"""Replies as JSON."""

from typing import Any

import msgspec
from aiohttp import web


def json_reply(value: Any, *, status: int = 200) -> web.Response:
    """Numbers that are not finite become null."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


def refusal(status: int, sentence: str) -> web.Response:
    """What is wrong with a request."""
    return json_reply({"error": sentence}, status=status)
