"""Access control, and the form and headers of every reply.

On loopback the Host header has to name this machine: otherwise a page of somebody else's could have its name resolve to 127.0.0.1 and read
everything through the visitor's browser (DNS rebinding). On any other address a token is needed, which a browser sends once in the URL and
from then on as a cookie. Rollouts hold text that models and repositories wrote: the Content-Security-Policy allows only our own scripts,
even if a page had a defect. Actions are off unless asked for, and then come from our own pages only.
"""

import hmac
import ipaddress
import re
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from yarl import URL

ACTION_HEADER = "X-Swerve-Action"
READ_ONLY = "this server is read-only: start it with --allow-actions to change anything"
COOKIE, PARAMETER = "swerve_token", "token"
MIN_TOKEN_CHARS = 16
_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(?::[0-9]+)?")  # a name or address, with an optional port
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # The pages' own files are not cached either, because they change with a release.
    "Cache-Control": "no-cache",
    "Server": "swerve",
}


def json_reply(value: Any, *, status: int = 200) -> web.Response:
    """The value as JSON, in which numbers that are not finite become null."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


def refusal(status: int, sentence: str) -> web.Response:
    """A reply that explains what is wrong with a request."""
    return json_reply({"error": sentence}, status=status)


def is_loopback(host: str) -> bool:
    """Whether a server that listens on this host is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def token_from(path: Path | None, host: str) -> str | None:
    """The token in the file; None if no token is needed. Raises ValueError with the fix."""
    if path is None:
        if is_loopback(host):
            return None
        raise ValueError(
            f"--host {host} can be reached from elsewhere: give --token-file FILE, whose text visitors need"
        )
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--token-file {path} cannot be read: {error}") from error
    if (
        len(token) < MIN_TOKEN_CHARS
        or not token.isascii()
        or not token.isprintable()
        or set(token) & set(' ;,"\\')
    ):
        raise ValueError(
            f"--token-file {path}: a token has at least {MIN_TOKEN_CHARS} letters and digits; "
            "`openssl rand -hex 16` makes one"
        )
    return token


def guard(*, token: str | None, checks_host: bool, allows_actions: bool) -> Middleware:
    """Refuses requests without permission, and turns refusals into JSON."""
    methods = {"GET", "HEAD", "POST"} if allows_actions else {"GET", "HEAD"}

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in methods:
            return refusal(405, "no such method" if allows_actions else READ_ONLY)
        if checks_host and not _names_this_machine(request.host):
            return refusal(
                403, "the Host header does not name this machine: use http://127.0.0.1 or localhost"
            )
        if token is not None and not _is(token, request.cookies.get(COOKIE)):
            if not _is(token, request.query.get(PARAMETER)):
                return refusal(401, f"open this address with ?{PARAMETER}=TOKEN once")
            return _with_cookie(request, token)
        if request.method == "POST" and (why := _why_not_ours(request)):
            return refusal(403, why)
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return refusal(error.status, error.text or error.reason)

    return guarded


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Runs before any reply is sent, as a signal handler of aiohttp."""
    response.headers.update(HEADERS)


def _why_not_ours(request: web.Request) -> str:
    """The reason why an action was not requested by one of our pages; "": it was.

    A page from elsewhere may send a form or a plain text with the visitor's cookie, but neither JSON nor a header of its own, unless
    this server permits it beforehand, which it does not: it answers OPTIONS with 405.
    """
    if request.content_type != "application/json" or ACTION_HEADER not in request.headers:
        return f"an action is JSON with the header {ACTION_HEADER}"
    origin = request.headers.get("Origin")
    if origin is not None and URL(origin).authority != request.host:
        return "the Origin header names another server"
    if request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
        return "the request comes from another site"
    return ""


def _with_cookie(request: web.Request, token: str) -> web.Response:
    """Redirects the visitor to the same page without the token in its address."""
    rest = [(name, value) for name, value in request.query.items() if name != PARAMETER]
    # Only the path is compared: a path such as //elsewhere would be the address of another host.
    place = request.rel_url.with_query(rest)
    target = "/" + str(place).lstrip("/")
    response = web.Response(status=303, headers={"Location": target})
    response.set_cookie(COOKIE, token, httponly=True, samesite="Strict", path="/")
    return response


def _is(token: str, given: str | None) -> bool:
    return given is not None and hmac.compare_digest(token.encode(), given.encode(errors="replace"))


def _names_this_machine(host: str) -> bool:
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback(found[1])
