"""Volumes that hold agent programs: one for each program and Docker host, filled from the program's image and mounted read-only.

A volume is named after its content, and its content decides whether it may be used: each process compares it with its manifest once,
before the first episode that needs it. So the next process finds an interrupted fill, and repeats it.

Docker fills an empty volume while it creates a container of the image, and lists that container when it has finished. The container has the
volume's name, so only one fill runs at a time, even if processes of several machines want it; and a container that a killed process has
left is as good for the others as one of their own. A volume that is removed and made again has another GENERATION.
"""

import asyncio
import contextlib
import functools
import secrets
import tarfile
import time
from collections import defaultdict

import urllib3
from docker import errors as docker_errors
from docker.types import Mount

from pipeline.errors import HarnessError, HarnessMissing, ImageMissing
from pipeline.harness import HARNESS_DIR, Harness, UnequalContent, check_archive
from workers.docker.client import Client
from workers.docker.host import CONTENT, CREATED, DEADLINE, FILLER, GENERATION, HARNESS, HARNESS_VERSION
from workers.sandbox.containers import CONFLICT, ContainerApi

PREFIX = "swerve-harness-"
FILL_S = 900.0  # limit of one fill, and of one comparison
PAUSE_S = 0.5  # pause before another look at a fill that is in progress
NUM_FILLS = 3  # number of fills with the wrong content after which the image counts as faulty
# Age of a volume from which it is removed when no container uses it. Filling it again takes seconds.
KEEP_S = 7 * 86_400.0

Labels = dict[str, str]


class HarnessVolumes:
    """The volumes of one Docker host, for one process."""

    def __init__(self, api: ContainerApi) -> None:
        self._api = api
        # Manifests by image: a tag means the same image for as long as the process lives.
        self._contents = dict[str, str]()
        self._compared: dict[str, str] = {}  # generation of each volume that was found equal to its manifest
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def ready(self, harness: Harness) -> str:
        """The name of the volume with `harness`, completely filled. Raises HarnessMissing, HarnessError, SandboxError."""
        content = await self._content(harness)
        volume = f"{PREFIX}{harness.name}-{content.removeprefix('sha256:')[:16]}"
        async with self._locks[volume]:
            if not await self.is_the_same(volume):
                await self._fill(volume, harness, content)
        return volume

    async def is_the_same(self, volume: str) -> bool:
        """Whether the volume is the one that was compared. Somebody may have removed that, and a new one may be empty."""
        labels = await self._api.call(f"inspecting volume {volume}", lambda client: _labels(client, volume))
        return GENERATION in labels and self._compared.get(volume) == labels[GENERATION]

    async def _content(self, harness: Harness) -> str:
        if harness.image not in self._contents:
            try:
                found = await self._api.inspect_image(harness.image)
            except ImageMissing as error:
                raise HarnessMissing(
                    f"this Docker host has no image {harness.image}: `swerve harness build {harness.name}` makes it, or load it there"
                ) from error
            labels: Labels = found["Config"]["Labels"] or {}
            if CONTENT not in labels:
                raise HarnessMissing(
                    f"{harness.image} is not an image of `swerve harness build`: it has no label {CONTENT}"
                )
            self._contents[harness.image] = labels[CONTENT]
        content = self._contents[harness.image]
        if harness.content not in ("", content):
            raise HarnessMissing(
                f"{harness.image} holds {content} on this Docker host, but the request wants {harness.content}: give all hosts one image"
            )
        return content

    async def _fill(self, volume: str, harness: Harness, content: str) -> None:
        wrong: list[str] = []
        give_up_at = time.monotonic() + FILL_S
        while len(wrong) < NUM_FILLS and time.monotonic() < give_up_at:
            labels = {
                HARNESS: harness.name,
                HARNESS_VERSION: harness.version,
                CONTENT: content,
                CREATED: str(int(time.time())),
                GENERATION: secrets.token_hex(8),
            }
            fill = functools.partial(_filled, volume=volume, image=harness.image, labels=labels)
            try:
                generation = await self._api.call(f"filling volume {volume}", fill)
            except UnequalContent as error:
                wrong.append(str(error))
                continue
            if generation:
                self._compared[volume] = generation
                return
            await asyncio.sleep(PAUSE_S)
        reason = (
            f"it was wrong {len(wrong)} times: {wrong[-1]}" if wrong else f"it took more than {FILL_S:.0f} s"
        )
        raise HarnessError(f"volume {volume} cannot be filled from {harness.image}: {reason}")


async def remove_unused_volumes(api: ContainerApi, *, keep_s: float = KEEP_S) -> list[str]:
    """Remove volumes of harnesses that no container uses, if they are older than `keep_s`, and containers that fills left behind.

    Returns their names. Raises SandboxError.
    """
    return await api.call("removing unused volumes", lambda client: _removed(client, keep_s))


def _filled(client: Client, *, volume: str, image: str, labels: Labels) -> str:
    """Fills `volume` from the image if it is empty, and compares it with its manifest. Returns the volume's generation label, or "" if that
    is not known yet, for example while another caller fills it.

    Raises UnequalContent, after the volume was removed, and HarnessError if it is wrong and cannot be removed.
    """
    client.create_volume(volume, labels=labels)  # a volume that exists already keeps its labels
    filler = f"{volume}-filler"
    is_ours = _create_filler(client, filler, volume, image)
    container_id = ""
    try:
        container_id = client.inspect_container(filler)["Id"]
        found = _labels(client, volume)
        _compare(client, container_id, found, labels[CONTENT])
    except UnequalContent:
        _remove_container(client, container_id)
        _remove_wrong(client, volume)
        raise
    except (docker_errors.NotFound, tarfile.TarError, urllib3.exceptions.HTTPError):
        return ""  # another process creates or removes the container at this moment
    if is_ours:
        _remove_container(client, container_id)
    return found[GENERATION]


def _create_filler(client: Client, name: str, volume: str, image: str) -> bool:
    """Creates a container of `image` that is never started, which fills an empty `volume`; returns False if it exists, or will soon."""
    host_config = client.create_host_config(
        mounts=[Mount(HARNESS_DIR, volume, type="volume")], network_mode="none"
    )
    labels = {FILLER: volume, DEADLINE: str(int(time.time() + FILL_S))}
    config = client.create_container_config(
        image=image, command=["none"], labels=labels, network_disabled=True, host_config=host_config
    )
    try:
        # docker-py's own call is not used, because its time limit is too short for a large program on a slow disk.
        answer = client._post_json(
            client._url("/containers/create"), data=config, params={"name": name}, timeout=FILL_S
        )
        client._raise_for_status(answer)
    except docker_errors.APIError as error:
        if error.status_code != CONFLICT:
            raise
        return False
    return True


def _compare(client: Client, container_id: str, labels: Labels, content: str) -> None:
    """Raises UnequalContent if the volume, as mounted in this container, does not have the content `content`, or is not ours."""
    if GENERATION not in labels or labels.get(CONTENT) != content:
        raise UnequalContent("it has no label of ours")
    url = client._url("/containers/{0}/archive", container_id)
    # The archive is sent uncompressed: compression would cost more than the comparison.
    headers = {"Accept-Encoding": "identity"}
    with client._get(
        url, params={"path": HARNESS_DIR}, headers=headers, stream=True, timeout=FILL_S
    ) as answer:
        client._raise_for_status(answer)
        check_archive(answer.raw, content)


def _remove_wrong(client: Client, volume: str) -> None:
    try:
        client.remove_volume(volume)
    except docker_errors.NotFound:
        return
    except docker_errors.APIError as error:
        if error.status_code != CONFLICT:
            raise
        users = client.containers(all=True, filters={"volume": volume})
        if all(FILLER in user["Labels"] for user in users):
            return  # another process fills it again
        raise HarnessError(
            f"volume {volume} is damaged and {len(users)} containers use it; it is made again when they have ended"
        ) from error


def _removed(client: Client, keep_s: float) -> list[str]:
    removed: list[str] = []
    now = time.time()
    for container in client.containers(all=True, filters={"label": FILLER}):
        if now >= float(container["Labels"].get(DEADLINE, 0)) or not keep_s:
            _remove_container(client, container["Id"])
            removed.append(f"{container['Labels'][FILLER]}-filler")
    for volume in client.volumes(filters={"name": PREFIX, "dangling": True})["Volumes"] or ():
        labels: Labels = volume["Labels"] or {}
        if now >= float(labels.get(CREATED, "0")) + keep_s:
            with contextlib.suppress(docker_errors.APIError):  # it may be in use by now, or gone
                client.remove_volume(volume["Name"])
                removed.append(volume["Name"])
    return removed


def _remove_container(client: Client, container_id: str) -> None:
    with contextlib.suppress(docker_errors.NotFound):
        client.remove_container(container_id, force=True)


def _labels(client: Client, volume: str) -> Labels:
    """The labels of a volume; none if it is missing."""
    try:
        return client.inspect_volume(volume)["Labels"] or {}
    except docker_errors.NotFound:
        return {}
