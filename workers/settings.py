"""Settings of the machine of a worker or a command, read from the environment once per process.

Every reader raises ValueError that names the variable and the fix.
"""

import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.settings import check_variables
from workers.docker.host import AUTHORITY, CERTIFICATE, KEY, DockerHost
from workers.images.names import Proxy, parse_bytes, parse_proxy

RUNTIME_VARIABLE = "SWERVE_CONTAINER_RUNTIME"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    name: str  # unique in the fleet
    slots: int  # episodes at once
    router_url: str
    max_starting: int  # containers that start at once; beyond about 4 a Docker host only queues them
    reap_every_s: float  # pause between searches for orphan containers
    drain_s: float  # grace after SIGTERM, before unfinished episodes return to the queue


@dataclass(frozen=True, slots=True)
class ImageSettings:
    state_dir: Path  # holds the record of images of each Docker host, shared by the workers of this machine
    proxies: tuple[Proxy, ...]  # tried in turn before the registry itself
    budget_bytes: int | None  # bytes for all images that Swerve manages on a Docker host
    prefetch: bool  # whether this worker may pull


@dataclass(frozen=True, slots=True)
class DiskSettings:
    min_free_bytes: int  # a Docker host with less free gets no claims; 0: no limit
    max_written_bytes: int  # limit for one container, and to one file; 0: no limit


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """The machines of a worker's sandboxes, and the limits of these."""

    hosts: tuple[DockerHost, ...]  # one or more
    runtime: str  # container runtime by its name on the Docker hosts; "": each host's default
    disk: DiskSettings
    images: ImageSettings


def worker_settings() -> WorkerSettings:
    check_variables()
    return WorkerSettings(
        name=os.environ.get("SWERVE_WORKER_NAME", f"{socket.gethostname()}/{os.getpid()}"),
        slots=positive("SWERVE_SLOTS", 4),
        router_url=os.environ.get("SWERVE_ROUTER_URL", "http://127.0.0.1:30000").rstrip("/"),
        max_starting=positive("SWERVE_MAX_STARTING", 4),
        reap_every_s=float(positive("SWERVE_REAP_EVERY_S", 15)),
        drain_s=float(positive("SWERVE_DRAIN_S", 5)),
    )


def image_settings() -> ImageSettings:
    default = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state", "swerve")
    prefetch = os.environ.get("SWERVE_PREFETCH", "0")
    if prefetch not in ("0", "1"):
        raise ValueError(f"SWERVE_PREFETCH={prefetch!r}: give 1 to pull images ahead, or 0")
    proxies, budget = os.environ.get("SWERVE_IMAGE_PROXIES", ""), os.environ.get("SWERVE_IMAGE_BUDGET", "")
    try:
        return ImageSettings(
            state_dir=Path(os.environ.get("SWERVE_STATE_DIR") or default),
            proxies=tuple(parse_proxy(each) for each in proxies.split()),
            budget_bytes=parse_bytes(budget) if budget else None,
            prefetch=prefetch == "1",
        )
    except ValueError as error:
        raise ValueError(
            f"SWERVE_IMAGE_PROXIES={proxies!r}, SWERVE_IMAGE_BUDGET={budget!r}: {error}"
        ) from error


def disk_settings() -> DiskSettings:
    return DiskSettings(
        min_free_bytes=_bytes("SWERVE_MIN_FREE_BYTES", "2GB"),
        max_written_bytes=_bytes("SWERVE_MAX_WRITTEN_BYTES", "10GB"),
    )


def sandbox_settings() -> SandboxSettings:
    check_variables()
    return SandboxSettings(
        hosts=docker_hosts(), runtime=container_runtime(), disk=disk_settings(), images=image_settings()
    )


def container_runtime() -> str:
    """Name of the container runtime (runc, crun, runsc, kata, ...), "" for the Docker host's default.

    Only the Docker host knows its registered names: `Sandboxes.check` compares.
    """
    return os.environ.get(RUNTIME_VARIABLE, "").strip()


def docker_hosts() -> tuple[DockerHost, ...]:
    """The Docker hosts that a worker uses, at least one."""
    variable = "SWERVE_DOCKER_HOSTS"
    entries = os.environ.get(variable, "").split()
    if not entries:
        return (docker_host(),)
    hosts = tuple(_secured(_host(variable, entry)) for entry in entries)
    urls = [host.url for host in hosts]
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if twice:
        raise ValueError(f"{variable}: {', '.join(twice)} is given twice: name each Docker host once")
    return hosts


def docker_host() -> DockerHost:
    """The Docker host for commands that use only one."""
    url = os.environ.get("DOCKER_HOST")
    host = _host("DOCKER_HOST", url) if url else DockerHost()
    if host.slots is not None:
        raise ValueError(f"DOCKER_HOST={url!r}: give the address alone; SWERVE_SLOTS limits episodes")
    return _secured(host)


def _host(variable: str, entry: str) -> DockerHost:
    try:
        return DockerHost.parse(entry)
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from error


def _secured(host: DockerHost) -> DockerHost:
    """`host` with its certificates: those in its folder in SWERVE_DOCKER_CERTS, otherwise those that Docker's own clients would use."""
    if host.socket_path:
        return host
    name, _ = host.name_and_port
    folders = os.environ.get("SWERVE_DOCKER_CERTS")
    verify, shared = bool(os.environ.get("DOCKER_TLS_VERIFY")), os.environ.get("DOCKER_CERT_PATH")
    if folders and Path(folders, name).is_dir():
        return _with_certificates(host, Path(folders, name), "SWERVE_DOCKER_CERTS", verify=True)
    if shared or verify:
        folder = Path(shared) if shared else Path.home() / ".docker"
        return _with_certificates(host, folder, "DOCKER_CERT_PATH", verify=verify)
    if folders:
        raise ValueError(f"SWERVE_DOCKER_CERTS={folders}: has no folder {name}, for {host.url}: create it")
    return host


def _with_certificates(host: DockerHost, folder: Path, variable: str, *, verify: bool) -> DockerHost:
    wanted = (AUTHORITY, CERTIFICATE, KEY) if verify else (CERTIFICATE, KEY)
    missing = [file for file in wanted if not (folder / file).is_file()]
    if missing:
        raise ValueError(f"{variable}: {folder} lacks {', '.join(missing)}, which TLS to {host.url} needs")
    return replace(host, certificates=folder, verify=verify)


def _bytes(variable: str, default: str) -> int:
    text = os.environ.get(variable) or default
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{variable}={text!r}: {error}") from error


def positive(variable: str, default: int) -> int:
    """A whole number of at least 1. Raises ValueError naming the variable."""
    text = os.environ.get(variable, str(default))
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{variable}={text!r}: give a whole number of at least 1")
    return int(text)
