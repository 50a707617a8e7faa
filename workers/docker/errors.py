"""The one translation of the errors of docker-py, requests, urllib3 and sockets.

Each becomes a DockerFailure, of which the caller makes an error of its own: `sandbox_error` here, `ImageError` in workers/images.
"""

import asyncio
import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass

import requests
import urllib3
from docker import errors as docker_errors

from pipeline.errors import ImageMissing, SandboxError

LIBRARY_ERRORS = (
    docker_errors.DockerException,
    docker_errors.StreamParseError,
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    OSError,
    EOFError,
    asyncio.LimitOverrunError,
)


@dataclass(frozen=True, slots=True)
class DockerFailure:
    """A call to a Docker host that failed."""

    doing: str  # what we were doing, e.g. "starting swerve-agent-1f"
    reason: str  # in the words of the Docker host, if it said any
    status: int | None = None  # HTTP status, if it answered
    image_missing: bool = False

    def __str__(self) -> str:
        return f"{self.doing}: {self.reason}"


@contextlib.contextmanager
def translated(doing: str, into: Callable[[DockerFailure], Exception]) -> Generator[None]:
    """Raise `into(failure)` in place of any library's error that leaves the block."""
    try:
        yield
    except LIBRARY_ERRORS as error:
        raise into(_failure(doing, error)) from error


def sandbox_error(failure: DockerFailure) -> SandboxError:
    """For calls made on behalf of a sandbox."""
    return ImageMissing(str(failure)) if failure.image_missing else SandboxError(str(failure))


def _failure(doing: str, error: BaseException) -> DockerFailure:
    if isinstance(error, docker_errors.APIError):
        return DockerFailure(
            doing,
            str(error.explanation or error),
            status=error.status_code,
            image_missing=isinstance(error, docker_errors.ImageNotFound),
        )
    return DockerFailure(doing, str(error) or f"no answer ({type(error).__name__})")
