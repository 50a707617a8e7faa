"""The calls to a Docker host about images, and the threads that make them. Every failed call raises ImageError.

The calls block, so callers make them from threads. Nothing here pulls, tags or removes an image that the caller does not name.

The threads are daemon threads, so that an interrupted command need not wait for a Docker host that does not answer. That is safe because
all of their work may be killed at any moment.
"""

import asyncio
import contextlib
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import requests
from docker import auth
from docker import errors as docker_errors

from workers.docker.client import DockerFailure, docker_client, translated
from workers.docker.host import DockerHost
from workers.images.names import Name

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(work: Callable[[T], R], items: Sequence[T], *, jobs: int) -> list[R]:
    """Runs `work` for each item, `jobs` at a time; results in the order of `items`. Raises the error of the first failing call."""
    waiting: queue.SimpleQueue[tuple[int, T]] = queue.SimpleQueue()
    results: queue.SimpleQueue[tuple[int, R] | BaseException] = queue.SimpleQueue()
    for numbered in enumerate(items):
        waiting.put(numbered)

    def take() -> None:
        try:
            while True:
                number, item = waiting.get_nowait()
                results.put((number, work(item)))
        except queue.Empty:
            return
        except BaseException as error:  # the caller gets every error
            results.put(error)

    for _ in range(min(jobs, len(items))):
        threading.Thread(target=take, daemon=True).start()
    done: dict[int, R] = {}
    while len(done) < len(items):
        result = results.get()
        if isinstance(result, BaseException):
            raise result
        done[result[0]] = result[1]
    return [done[number] for number in range(len(items))]


async def in_daemon(work: Callable[[], T]) -> T:
    """Runs `work` in a daemon thread. If the caller is cancelled, it returns at once; the thread continues and its result is dropped."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(cast(T, result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # the caller gets every error
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop may have ended in the meantime
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await answer


class ImageError(Exception):
    """An image operation failed. `transient`: trying again later may help. The message is one line."""

    def __init__(self, reason: str, *, transient: bool = False) -> None:
        super().__init__(" ".join(reason.split()))
        self.transient = transient


class NoSuchImage(ImageError):
    """No image has this name, on the Docker host or in the registry."""


class ImageInUse(ImageError):
    """A container, running or not, uses it."""


class PullStopped(ImageError):
    """The caller stopped the pull."""


CALL_S = 120
CONNECT_S = 10
STALL_S = 180  # a pull is given up after this long without an event; Docker sends two a second
NUM_CONNECTIONS = 64
CONFLICT = 409  # HTTP statuses
NOT_FOUND = 404
PERMANENT = (400, 401, 403, 404, 405)
# Messages of registries and Docker hosts that mean that another try would not help. The stream that contains them has no HTTP status.
PERMANENT_WORDS = re.compile(
    r"manifest unknown|name unknown|pull access denied|repository does not exist|unauthorized|denied:|forbidden"
    r"|no matching manifest|manifest verification failed|invalid reference|unsupported media|x509:"
    r"|no space left on device|gave http response to https",
    re.IGNORECASE,
)

OnProgress = Callable[[int, int], None]  # bytes downloaded, bytes known to be needed


@dataclass(frozen=True, slots=True)
class Present:
    """One image on the Docker host, with all its names."""

    id: str
    tags: tuple[str, ...]
    digests: tuple[str, ...]  # "repository@sha256:..."
    size_bytes: int  # size of all its layers, shared or not
    created_at: float  # Unix seconds
    labels: Mapping[str, str]
    platform: str = ""  # "linux/amd64"; "" in listings


@dataclass(slots=True)
class _Transfer:
    """The bytes of a pull, layer by layer, and the manifest's digest once Docker has reported it."""

    digest: str = ""
    layers: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def note(self, event: Mapping[str, Any]) -> bool:
        """Processes the event; returns whether it changed a number of bytes."""
        status, layer = str(event.get("status", "")), str(event.get("id", ""))
        if status.startswith("Digest: "):
            self.digest = status.removeprefix("Digest: ")
        detail: dict[str, Any] = event.get("progressDetail") or {}
        if status == "Downloading" and "current" in detail:
            self.layers[layer] = int(detail["current"]), int(detail.get("total", detail["current"]))
        elif status in ("Download complete", "Pull complete") and layer in self.layers:
            self.layers[layer] = self.layers[layer][1], self.layers[layer][1]
        else:
            return False
        return True

    def bytes(self) -> tuple[int, int]:
        return sum(done for done, _ in self.layers.values()), sum(total for _, total in self.layers.values())


class ImageApi:
    """Safe to use from several threads. The constructor raises ImageError if no Docker host answers."""

    def __init__(self, host: DockerHost) -> None:
        with _translated("connecting to the Docker host"):
            self._client = docker_client(host, timeout_s=CALL_S, num_connections=NUM_CONNECTIONS)
            self.id: str = self._client.info()["ID"]
            about = self._client.version()
            self.platform = f"{about['Os']}/{about['Arch']}"

    def close(self) -> None:
        self._client.close()

    def find(self, name: str) -> Present | None:
        """The image with this name or id, or None."""
        try:
            with _translated(f"looking for {name}"):
                found = self._client.inspect_image(name)
        except NoSuchImage:
            return None
        variant = found.get("Variant")
        return Present(
            id=found["Id"],
            tags=tuple(found["RepoTags"] or ()),
            digests=tuple(found["RepoDigests"] or ()),
            size_bytes=found["Size"],
            created_at=0.0,
            labels=found["Config"]["Labels"] or {},
            platform=f"{found['Os']}/{found['Architecture']}" + (f"/{variant}" if variant else ""),
        )

    def images(self, *, label: str = "") -> list[Present]:
        """All images, or those with `label` ("key=value")."""
        with _translated("listing images"):
            listed = self._client.images(filters={"label": label} if label else None)
        return [
            Present(
                id=one["Id"],
                tags=tuple(tag for tag in one["RepoTags"] or () if tag != "<none>:<none>"),
                digests=tuple(each for each in one["RepoDigests"] or () if not each.startswith("<none>")),
                size_bytes=one["Size"],
                created_at=float(one["Created"]),
                labels=one["Labels"] or {},
            )
            for one in listed
        ]

    def used_ids(self) -> set[str]:
        """Ids of images that some container uses, running or not."""
        with _translated("listing containers"):
            return {container["ImageID"] for container in self._client.containers(all=True)}

    def layers(self, image_id: str) -> list[tuple[str, int]]:
        """(command that made the layer, its bytes) from the bottom up, according to the image's history; may be empty."""
        with _translated(f"reading the history of {image_id}"):
            history = self._client.history(image_id)
        return [
            (f"{one['Created']} {one['CreatedBy']} {one['Size']}", one["Size"]) for one in reversed(history)
        ]

    def pull(self, name: Name, *, platform: str, on_progress: OnProgress, stopping: threading.Event) -> str:
        """Pull the layers that are missing; returns the manifest's digest, "" if Docker does not report it.

        Raises PullStopped soon after `stopping` is set. Docker then stops too, because the connection is closed.
        """
        transfer = _Transfer()
        with _translated(f"pulling {name}"), contextlib.closing(self._create(name, platform)) as response:
            for event in self._client._stream_helper(response, decode=True):
                if stopping.is_set():
                    raise PullStopped(f"pulling {name}: stopped")
                if "error" in event:
                    raise docker_errors.APIError(event["error"], explanation=event["error"])
                if transfer.note(event):
                    on_progress(*transfer.bytes())
        return transfer.digest

    def _create(self, name: Name, platform: str) -> requests.Response:
        """Sends the request for a pull. docker-py's own `pull` waits without limit if a registry stops sending."""
        client = self._client
        registry = auth.resolve_repository_name(name.repository)[0]
        header = cast(Any, auth).get_config_header(client, registry)
        response = client._post(
            client._url("/images/create"),
            params={"fromImage": name.repository, "tag": name.version}
            | ({} if platform == self.platform else {"platform": platform}),
            headers={"X-Registry-Auth": header} if header else {},
            stream=True,
            timeout=(CONNECT_S, STALL_S),
        )
        client._raise_for_status(response)
        return response

    def tag(self, image_id: str, name: Name) -> None:
        with _translated(f"naming {image_id} {name}"):
            self._client.tag(image_id, name.repository, name.tag)

    def remove(self, name: str) -> bool:
        """Removes the name, and with its last name the image; returns False if it was gone. Raises ImageInUse."""
        try:
            with _translated(f"removing {name}"):
                self._client.remove_image(name)
        except NoSuchImage:
            return False
        return True

    def build(
        self,
        context: Path,
        name: Name,
        *,
        build_args: Mapping[str, str],
        labels: Mapping[str, str],
        network: str | None,
        on_line: Callable[[str], None],
    ) -> None:
        """Build `context`/Dockerfile as `name`; the build's output goes to `on_line`."""
        with _translated(f"building {name}"):
            events = self._client.build(
                path=str(context),
                tag=str(name),
                buildargs=dict(build_args),
                labels=dict(labels),
                network_mode=network,
                rm=True,
                forcerm=True,
                decode=True,
            )
            for event in events:
                if "error" in event:
                    on_line(f"{event['error']}\n")
                    raise docker_errors.APIError(event["error"], explanation=event["error"])
                if "stream" in event:
                    on_line(event["stream"])


def _translated(doing: str) -> contextlib.AbstractContextManager[None]:
    return translated(doing, _image_error)


def _image_error(failure: DockerFailure) -> ImageError:
    if failure.status == NOT_FOUND:
        return NoSuchImage(str(failure))
    if failure.status == CONFLICT:
        return ImageInUse(str(failure))
    permanent = failure.status in PERMANENT or PERMANENT_WORDS.search(failure.reason) is not None
    return ImageError(str(failure), transient=not permanent)
