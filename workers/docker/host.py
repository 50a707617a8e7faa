"""The address of a Docker host and the certificates for it in one value, and the labels of our containers, images and volumes there.

Parsing is strict: an address that Docker's own clients would read differently is refused. By the labels we find our own containers and
images again; each value is text.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

# Labels of every container.
FLEET = "swerve.fleet"  # containers of other fleets on the same Docker host are left alone
RUN = "swerve.run"
REQUEST = "swerve.request"
ATTEMPT = "swerve.attempt"
LEASE = "swerve.lease"  # the Redis key that holds the lease
WORKER = "swerve.worker"
ROLE = "swerve.role"
DEADLINE = "swerve.deadline"  # Unix seconds; the container ends by itself then

# Labels of every image that was made for agents out of a task's image.
AGENT_IMAGE = "swerve.agent-image"  # "1"
SOURCE = "swerve.source"  # name of the task's image

# Labels of every image with an agent program, and of the volumes that are filled from it.
HARNESS = "swerve.harness"  # its name
HARNESS_VERSION = "swerve.harness-version"
CONTENT = "swerve.content"  # "sha256:..." of its manifest
# Labels of the volumes alone.
CREATED = "swerve.created"  # Unix seconds
GENERATION = "swerve.generation"  # random: tells a volume from the one of the same name before it
# Label of the containers that fill them.
FILLER = "swerve.filler"  # name of the volume; DEADLINE is the time after which no process waits for it

LOCAL = "unix:///var/run/docker.sock"
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"


@dataclass(frozen=True, slots=True)
class DockerHost:
    """The address of one Docker daemon that runs containers."""

    url: str = LOCAL  # unix:///PATH or tcp://HOST:PORT
    certificates: Path | None = None  # folder with ca.pem, cert.pem and key.pem; None: no TLS
    verify: bool = True  # whether the Docker host must show a certificate of that authority for its name
    slots: int | None = None  # most episodes at once; None: as many as the worker has slots

    @classmethod
    def parse(cls, text: str) -> Self:
        """`URL`, or `URL=N` for at most N episodes at once. Raises ValueError that says what to write instead."""
        url, equals, slots = text.partition("=")
        if equals and not (slots.isdecimal() and int(slots) > 0):
            raise ValueError(f"{text!r}: after = give the most episodes at once, a whole number from 1")
        if not _is_address(url):
            raise ValueError(f"{text!r}: give unix:///PATH or tcp://HOST:PORT")
        return cls(url, slots=int(slots) if equals else None)

    @property
    def socket_path(self) -> str:
        """The path of a local Docker host's socket; "" for a host that is reached over TCP."""
        return self.url.removeprefix("unix://") if self.url.startswith("unix://") else ""

    @property
    def name_and_port(self) -> tuple[str, int]:
        """Host name and port of a Docker host that is reached over TCP."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def tls(self) -> ssl.SSLContext | None:
        """The TLS settings; None: the connection is not encrypted. Raises OSError if a certificate cannot be used."""
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
