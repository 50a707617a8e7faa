"""The calls to a Docker host that concern images. Every failed call raises ImageError.

The calls block, so callers make them from threads. Nothing here pulls, tags or removes an image that the caller does not name.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import requests
from docker import auth
from docker import errors as docker_errors

from workers.docker.client import docker_client
from workers.docker.errors import DockerFailure, translated
from workers.docker.host import DockerHost
from workers.images.errors import ImageError, ImageInUse, NoSuchImage, PullStopped
from workers.images.names import Name

CALL_S = 120
CONNECT_S = 10
STALL_S = 180  # a pull is given up after so long without an event; Docker sends two a second
NUM_CONNECTIONS = 64
CONFLICT = 409  # HTTP statuses
NOT_FOUND = 404
PERMANENT = (400, 401, 403, 404, 405)
# Messages of registries and Docker hosts, in a stream that has no status any more, after which another try would not help.
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
    size_bytes: int  # of all its layers, shared or not
    created_at: float  # Unix seconds
    labels: Mapping[str, str]
    platform: str = ""  # "linux/amd64"; "" in listings


@dataclass(slots=True)
class _Transfer:
    """Bytes of a pull, layer by layer, and the manifest's digest once Docker has said it."""

    digest: str = ""
    layers: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def note(self, event: Mapping[str, Any]) -> bool:
        """Take the event in; returns whether it changed a number of bytes."""
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
        """Ids of images that some container was made of, running or not."""
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
        """Pull the layers that are missing; returns the manifest's digest, "" if Docker does not say it.

        Raises PullStopped soon after `stopping` is set. Docker stops too, because we close the connection.
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
        """The request for a pull. docker-py's own `pull` waits for ever if a registry stops sending."""
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
        """Remove the name, and the image with its last name; False if it was gone. Raises ImageInUse."""
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
