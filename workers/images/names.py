"""Parses image names and sizes. Names are parsed like Docker does, and translated for a registry mirror.

An image always gets the name that the task uses, whatever its name on a proxy.
"""

import re
from dataclasses import dataclass

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS[_letter] = _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def parse_bytes(text: str) -> int:
    """`300GB`, `1.5TiB` or a plain number of bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r}: give a size such as 300GB, 1.5TiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def show_bytes(num_bytes: float) -> str:
    """Three digits and a decimal unit, as in Docker's own listings."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


HUB = "docker.io"
_HUB_ALIASES = ("index.docker.io", "registry-1.docker.io", "registry.hub.docker.com")
_PATH = re.compile(r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")


@dataclass(frozen=True, slots=True)
class Name:
    """The parts of a name such as docker.io/library/python:3.11. With a digest, Docker ignores the tag."""

    registry: str
    path: str
    tag: str  # "" if there is a digest
    digest: str  # "sha256:..." or ""

    @property
    def repository(self) -> str:
        """Registry and path in Docker's form, without docker.io."""
        if self.registry != HUB:
            return f"{self.registry}/{self.path}"
        return self.path.removeprefix("library/") if self.path.count("/") == 1 else self.path

    @property
    def version(self) -> str:
        """The digest, or otherwise the tag."""
        return self.digest or self.tag

    def __str__(self) -> str:
        """The name as Docker lists it, so that two spellings of one image become equal."""
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag}"


def parse_name(text: str) -> Name:
    """The parsed name. Raises ValueError naming the malformed part of `text`."""
    rest, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise ValueError(f"image {text!r}: a digest is sha256: and 64 hexadecimal digits, or sha512: and 128")
    head, slash, path = rest.partition("/")
    if not slash or not ("." in head or ":" in head or head == "localhost"):
        head, path = HUB, rest
    path, colon, tag = path.partition(":")
    if head == HUB or head in _HUB_ALIASES:
        head, path = HUB, path if "/" in path else f"library/{path}"
    if not _PATH.fullmatch(path):
        raise ValueError(
            f"image {text!r}: {path!r} is not a repository name; use lower-case letters and digits with . _ - / between them"
        )
    if colon and not _TAG.fullmatch(tag):
        raise ValueError(f"image {text!r}: {tag!r} is not a tag")
    return Name(head, path, "" if digest else tag or "latest", digest)


@dataclass(frozen=True, slots=True)
class Proxy:
    """A mirror: names that begin with `source` are pulled as `prefix` instead. Both end in a slash."""

    source: str
    prefix: str

    def name_of(self, name: Name) -> Name | None:
        """The proxy's name for the image; None if the proxy mirrors another registry, or if the name has a digest.

        Docker gives a name with a digest only to an image that it pulled under exactly that name.
        """
        full = f"{name.registry}/{name.path}"
        if name.digest or not full.startswith(self.source):
            return None
        return parse_name(f"{self.prefix}{full.removeprefix(self.source)}:{name.tag}")


def parse_proxy(text: str) -> Proxy:
    """`mirror.local:5000` for all of docker.io, or `ghcr.io/team=mirror.local:5000/team`. Raises ValueError."""
    source, equals, prefix = text.rpartition("=")
    source = source if equals else HUB
    if not source.strip("/") or not prefix.strip("/"):
        raise ValueError(
            f"proxy {text!r}: give PREFIX, or SOURCE=PREFIX such as ghcr.io=mirror.local:5000/ghcr"
        )
    proxy = Proxy(f"{source.rstrip('/')}/", f"{prefix.rstrip('/')}/")
    try:
        parse_name(f"{proxy.prefix}probe")
    except ValueError as error:
        raise ValueError(f"proxy {text!r}: it cannot begin an image name: {error}") from error
    return proxy
