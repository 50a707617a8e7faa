"""Where a Docker engine is and how to reach it: one value for everybody who talks to it.

Made from what people write, strictly: an address that Docker's own clients would take another way is refused, not guessed at.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

HERE = "unix:///var/run/docker.sock"
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"


@dataclass(frozen=True, slots=True)
class DockerHost:
    """One engine's address."""

    url: str = HERE  # unix:///PATH or tcp://HOST:PORT
    certificates: Path | None = None  # folder with ca.pem, cert.pem and key.pem; None: no TLS
    verify: bool = True  # whether the engine must show a certificate of that authority for its name
    slots: int | None = None  # most episodes at once; None: as many as the worker has

    @classmethod
    def parse(cls, text: str) -> Self:
        """`URL`, or `URL=N` for at most N episodes at once. Raises ValueError saying what to write instead."""
        url, equals, slots = text.partition("=")
        if equals and not (slots.isdecimal() and int(slots) > 0):
            raise ValueError(f"{text!r}: after the = comes the most episodes at once, a whole number from 1")
        if not _is_address(url):
            raise ValueError(f"{text!r}: give unix:///PATH or tcp://HOST:PORT")
        return cls(url, slots=int(slots) if equals else None)

    @property
    def socket_path(self) -> str:
        """Of a local engine; "" for one that is reached over TCP."""
        return self.url.removeprefix("unix://") if self.url.startswith("unix://") else ""

    @property
    def name_and_port(self) -> tuple[str, int]:
        """Of an engine that is reached over TCP."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def tls(self) -> ssl.SSLContext | None:
        """None: the engine is talked to in the clear. Raises OSError if a certificate cannot be used."""
        if self.certificates is None:
            return None
        authority = self.certificates / AUTHORITY if self.verify else None
        context = ssl.create_default_context(cafile=authority)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        context.load_cert_chain(self.certificates / CERTIFICATE, self.certificates / KEY)
        return context


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    if parts.query or parts.fragment or parts.username is not None:
        return False
    if parts.scheme == "unix":
        return not parts.netloc and len(parts.path) > 1
    return parts.scheme == "tcp" and bool(parts.hostname and port) and parts.path in ("", "/")
