"""The receivers beside the engines as the trainer sees them (`infra/serving/receiver`): one on each engine host, at one port."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import aiohttp

from pipeline.message import MalformedMessage, decode
from pipeline.weight_patch import HeldVersions, VersionReference
from trainer.weights.engines import CONTROL_S, EngineFailure


class PatchRefused(EngineFailure):
    """The receiver cannot apply this patch, but could make the version from a whole one."""


class Receivers:
    """An async context manager around the connections; holds no state about receivers.

    A call that moves no weights has a deadline; that of the others is the caller's.
    """

    def __init__(self, port: int, *, control_s: float = CONTROL_S) -> None:
        self._port = port
        self._control_s = control_s

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(sock_connect=self._control_s),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    def url_beside(self, engine_url: str) -> str:
        """The receiver on an engine's host."""
        host = urlsplit(engine_url).hostname or ""
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    async def held(self, receiver_url: str) -> tuple[VersionReference, ...]:
        """The versions that the receiver has in whole."""
        status, answer = await self._call("GET", f"{receiver_url}/versions")
        if status != 200:
            raise _failure(receiver_url, status, answer)
        try:
            return decode(answer, HeldVersions).versions
        except MalformedMessage as error:
            raise EngineFailure(f"{receiver_url} answered something unexpected: {error}") from error

    async def directory_of(self, receiver_url: str, run_id: str, version: int) -> str | None:
        """Where the engines of the host find a version; None if the receiver does not have it."""
        status, answer = await self._call("GET", _address(receiver_url, run_id, version))
        if status == 404:
            return None
        if status != 200:
            raise _failure(receiver_url, status, answer)
        return answer.decode()

    async def send_file(self, receiver_url: str, run_id: str, version: int, patch: Path) -> None:
        """Send a patch that has a base. Raises PatchRefused if the receiver's base is not the patch's."""
        with patch.open("rb") as file:
            status, answer = await self._call("PUT", _address(receiver_url, run_id, version), data=file)
        if status in (409, 422):
            raise PatchRefused(answer.decode(errors="replace"))
        if status != 201:
            raise _failure(receiver_url, status, answer)

    async def send_whole(
        self, receiver_url: str, run_id: str, version: int, num_bytes: int, pieces: Iterator[bytes]
    ) -> None:
        status, answer = await self._call(
            "PUT",
            _address(receiver_url, run_id, version),
            data=_sent(pieces),
            headers={"Content-Length": str(num_bytes)},
        )
        if status != 201:
            raise _failure(receiver_url, status, answer)

    async def _call(
        self, method: str, url: str, data: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """The status and the body of the answer. The one place where aiohttp's errors become ours."""
        timeout_s = self._control_s if data is None else None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.request(method, url, data=data, headers=headers) as response,
            ):
                return response.status, await response.read()
        except TimeoutError as error:
            raise EngineFailure(f"{method} {url}: no answer within {timeout_s} s") from error
        except aiohttp.ClientConnectorError as error:
            raise EngineFailure(
                f"{method} {url}: {error}; start python -m infra.serving.receiver on that host, or set another weights.transport"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailure(f"{method} {url}: {error}") from error


def _address(receiver_url: str, run_id: str, version: int) -> str:
    return f"{receiver_url}/versions/{quote(run_id, safe='')}/{version}"


def _failure(receiver_url: str, status: int, answer: bytes) -> EngineFailure:
    return EngineFailure(f"{receiver_url}: {status} {answer[:500].decode(errors='replace')}")


async def _sent(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Pieces that are read from disk, in a thread."""
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece
