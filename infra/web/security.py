"""Who may ask, and the headers of every reply.

On loopback the Host header has to name this machine: otherwise a page of somebody else's could have its name resolve to 127.0.0.1
and read everything through the visitor's browser (DNS rebinding). On any other address a token is needed, which a browser brings once
in the URL and from then on as a cookie. Rollouts hold text that models and repositories wrote: the Content-Security-Policy lets no
script run but ours, even if a page had a defect. Actions are off unless asked for, and then come from our own pages only.
"""

import hmac
import ipaddress
import re
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from yarl import URL

from infra.web.replies import refusal

ACTION_HEADER = "X-Swerve-Action"
READ_ONLY = "this server is read-only: start it with --allow-actions to change anything"
COOKIE, PARAMETER = "swerve_token", "token"
MIN_TOKEN_CHARS = 16
_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(?::[0-9]+)?")  # a name or address, and perhaps a port
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
    # Also of the pages' own files, which change with a release.
    "Cache-Control": "no-cache",
    "Server": "swerve",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def token_from(path: Path | None, host: str) -> str | None:
    """The token in the file; None where none is needed. Raises ValueError with the fix."""
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
    """Lets nobody through who may not ask, and turns refusals into JSON."""
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
    """A signal handler: before any reply is sent."""
    response.headers.update(HEADERS)


def _why_not_ours(request: web.Request) -> str:
    """Why an action was not asked for by one of our pages; "": it was.

    A page from elsewhere may send a form or a plain text with the visitor's cookie, but neither JSON nor a header of its own, unless
    this server agrees beforehand, which it does not: it answers OPTIONS with 405.
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
    """Sends the visitor to the same place without the token in its address."""
    rest = [(name, value) for name, value in request.query.items() if name != PARAMETER]
    # The path alone: a path such as //elsewhere would be an address of somebody else's.
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
