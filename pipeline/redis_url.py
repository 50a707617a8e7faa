"""What a Redis URL may say, the connection settings that it stands for, and how messages show it.

One string holds all of it, so that it fits into an environment variable and on a command line:

    redis://[user:password@]host:port/db        unix:///path.sock?db=0
    rediss://[user:password@]host:port/db?ssl_ca_certs=CA&ssl_certfile=CERTIFICATE&ssl_keyfile=KEY

The parameters have redis-py's names, and their values are files in PEM. Without `ssl_ca_certs` the system's
authorities are trusted. The certificate of the server must name the host, unless `ssl_check_hostname=false`. User and
password are percent-encoded where they hold characters that a URL reserves.
"""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from arq.connections import RedisSettings

FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
CHECK_HOSTNAME = "ssl_check_hostname"


def connection_settings(url: str) -> RedisSettings:
    """The settings with which arq connects to `url`. Raises ValueError for what is no Redis URL, and for TLS
    parameters that cannot work; the message never holds the password.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError(
            f"Redis URL with scheme {parts.scheme!r}: it must begin with redis://, rediss:// or unix://"
        )
    if _place(parts) is None:
        raise ValueError(
            f"Redis URL {masked(url)} cannot be read: percent-encode the characters / # ? of the password"
        )
    try:
        settings = RedisSettings.from_dsn(url)
    except ValueError as error:
        raise ValueError(f"Redis URL {masked(url)}: the database must be a whole number") from error
    settings.username = None if parts.username is None else unquote(parts.username)
    settings.password = None if parts.password is None else unquote(parts.password)
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    parameters.pop("db", None)
    place = f"Redis URL {masked(url)}"
    unknown = sorted({*parameters} - {*FILES, CHECK_HOSTNAME})
    if unknown:
        known = ", ".join(("db", *FILES, CHECK_HOSTNAME))
        raise ValueError(f"{place}: unknown parameter {unknown[0]!r}; known are {known}")
    if parameters and parts.scheme != "rediss":
        raise ValueError(f"{place}: {min(parameters)} is of use with rediss:// only")
    _apply_tls(settings, parameters, place)
    return settings


def masked(url: str) -> str:
    """`url` as messages show it: without its password and its parameters."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        place = _place(parts)
        return f"{parts.scheme}://{'***' if place is None else place}"
    named = parts.username is not None and parts.password is not None
    login = f"{parts.username}:***" if named else "***"  # a lone user name is a password without its colon
    return f"{parts.scheme}://{login}@{_place(parts) or '***'}"


def _place(parts: SplitResult) -> str | None:
    """Host, port and path. None if the URL does not tell them apart from an unencoded password."""
    try:
        _ = parts.port
    except ValueError:
        return None
    after = f"{parts.path}{parts.fragment}{'' if '=' in parts.query else parts.query}"
    if parts.scheme != "unix" and "@" in after:
        return None
    return f"{parts.netloc.rpartition('@')[2]}{parts.path}"


def _apply_tls(settings: RedisSettings, parameters: Mapping[str, str], place: str) -> None:
    """Raises ValueError naming the parameter that cannot work."""
    for name in FILES:
        if name in parameters and not Path(parameters[name]).is_file():
            raise ValueError(f"{place}: {name}={parameters[name]!r} is no file; give one in PEM")
    if ("ssl_certfile" in parameters) != ("ssl_keyfile" in parameters):
        raise ValueError(f"{place}: ssl_certfile and ssl_keyfile go together; give both or neither")
    checked = parameters.get(CHECK_HOSTNAME, "true")
    if checked not in ("true", "false"):
        raise ValueError(f"{place}: {CHECK_HOSTNAME}={checked!r}; give true or false")
    settings.ssl_ca_certs = parameters.get("ssl_ca_certs")
    settings.ssl_certfile = parameters.get("ssl_certfile")
    settings.ssl_keyfile = parameters.get("ssl_keyfile")
    settings.ssl_check_hostname = settings.ssl and checked == "true"
