"""Docker's HTTP API over its socket, with no client library in between: the floor for anything that uses Docker."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp

SOCKET = "/var/run/docker.sock"
VERSION = "v1.41"
NO_LIMIT = 0  # of concurrent connections
GONE = (404, 409)  # HTTP status


class DockerApi:
    """Use it as a context manager. Raises RuntimeError for what Docker refuses."""

    def __init__(self) -> None:
        connector = aiohttp.UnixConnector(path=SOCKET, limit=NO_LIMIT)
        self._http = aiohttp.ClientSession(base_url=f"http://docker/{VERSION}/", connector=connector)

    async def create(self, config: dict[str, Any]) -> str:
        answer = await self._json("POST", "containers/create", config)
        return str(answer["Id"])

    async def start(self, container: str) -> None:
        await self._raw("POST", f"containers/{container}/start")

    async def execute(self, container: str, words: Sequence[str]) -> tuple[int, bytes]:
        """Status and framed output of a command: three requests."""
        wanted = {"AttachStdout": True, "AttachStderr": True, "Cmd": list(words)}
        created = await self._json("POST", f"containers/{container}/exec", wanted)
        output = await self._raw("POST", f"exec/{created['Id']}/start", {"Detach": False, "Tty": False})
        ended = await self._json("GET", f"exec/{created['Id']}/json")
        return int(ended["ExitCode"]), output

    async def inspect(self, container: str) -> dict[str, Any]:
        return await self._json("GET", f"containers/{container}/json")

    async def labelled(self, label: str) -> list[str]:
        filters = f'{{"label":["{label}"]}}'
        found: Any = await self._json("GET", f"containers/json?all=1&filters={filters}")
        return [one["Id"] for one in found]

    async def remove(self, container: str) -> None:
        """A container that is gone, or being removed, is no error."""
        async with self._http.delete(f"containers/{container}?force=1&v=1") as answer:
            if answer.status not in GONE:
                await _check(answer)

    async def _json(self, method: str, path: str, body: object = None) -> Any:
        async with self._http.request(method, path, json=body) as answer:
            await _check(answer)
            return await answer.json()

    async def _raw(self, method: str, path: str, body: object = None) -> bytes:
        async with self._http.request(method, path, json=body) as answer:
            await _check(answer)
            return await answer.read()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status >= 400:
        raise RuntimeError(f"{answer.method} {answer.url.path}: {answer.status} {await answer.text()}")
