"""The verbs of `python -m workers.harness`, and their output."""

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Iterator

import msgspec
from docker import errors as docker_errors

from pipeline.commandline import FAILED, MISUSE
from pipeline.errors import HarnessError, ImageMissing, SandboxError, describe_error
from pipeline.harness import HARNESS_DIR, UNTESTED, HarnessFile, read_harness, shipped, untested
from pipeline.message import json_line
from pipeline.screen import visible_line
from workers.docker.client import Client
from workers.docker.host import CONTENT, HARNESS
from workers.harness.building import PackageError, build, write_lock
from workers.harness.volumes import HarnessVolumes
from workers.images.names import show_bytes
from workers.sandbox.containers import ContainerApi, harness_mount
from workers.settings import docker_host

START_S = 300  # limit for a program to print its version


class ListedHarness(msgspec.Struct, frozen=True, kw_only=True):
    """One program on the Docker host."""

    name: str
    version: str
    licence: str
    dialect: str
    image: str
    size_bytes: int = 0  # 0: its image has not been made
    content: str = ""
    volumes: tuple[str, ...] = ()  # volumes of any version
    is_tested: bool = True  # False: it was never built, or never played an episode


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit status."""
    verb: str = arguments.verb
    try:
        names = arguments.names or (shipped() + untested() if verb == "ls" else shipped())
        files = [_read(verb, name) for name in names]
        if verb == "lock":
            return _lock(files)
        return asyncio.run(_on_docker_host(arguments, files))
    except (ValueError, OSError) as error:
        print(describe_error(error), file=sys.stderr)
        return MISUSE
    except (PackageError, HarnessError, SandboxError) as error:
        print(visible_line(str(error)), file=sys.stderr)
        return FAILED


def _read(verb: str, name: str) -> HarnessFile:
    """The file. A file without a lock can be locked and listed; it has no image."""
    file = read_harness(name, locked=False)
    is_locked = file.lock is None or file.lock.is_file()
    return file if verb == "lock" or (verb == "ls" and not is_locked) else read_harness(name)


def _lock(files: list[HarnessFile]) -> int:
    for file in files:
        print(f"{write_lock(file)} is written")
    return 0


async def _on_docker_host(arguments: argparse.Namespace, files: list[HarnessFile]) -> int:
    api = ContainerApi(docker_host())
    try:
        match arguments.verb:
            case "build":
                return await _build(api, files, force=arguments.force)
            case "ls":
                return await _ls(api, files, as_json=arguments.json)
            case _:
                return await _check(api, files, arguments.image)
    finally:
        await api.close()


async def _build(api: ContainerApi, files: list[HarnessFile], *, force: bool) -> int:
    for file in files:
        began_at = time.monotonic()
        made = await build(api, file, force=force)
        size_bytes, content = await _image(api, file.harness.image)
        seconds = time.monotonic() - began_at
        state = f"made in {seconds:.0f} s" if made else "is there"
        print(f"{file.harness.image} {state}: {show_bytes(size_bytes)}, {content}")
    return 0


async def _image(api: ContainerApi, image: str) -> tuple[int, str]:
    """Size and content of the image; 0 and "" if it is missing."""
    try:
        found = await api.inspect_image(image)
    except ImageMissing:
        return 0, ""
    labels: dict[str, str] = found["Config"]["Labels"] or {}
    return found["Size"], labels.get(CONTENT, "")


async def _ls(api: ContainerApi, files: list[HarnessFile], *, as_json: bool) -> int:
    volumes: dict[str, str] = await api.call("listing volumes", _volumes)
    for file in files:
        harness = file.harness
        size_bytes, content = await _image(api, harness.image)
        row = ListedHarness(
            name=harness.name,
            version=harness.version,
            licence=file.licence,
            dialect=harness.dialect,
            image=harness.image,
            size_bytes=size_bytes,
            content=content,
            volumes=tuple(sorted(volume for volume, name in volumes.items() if name == harness.name)),
            is_tested=file.path.parent != UNTESTED,
        )
        print(json_line(row) if as_json else "\n".join(_lines(row)))
    return 0


def _volumes(client: Client) -> dict[str, str]:
    """The harness of each volume."""
    found = client.volumes(filters={"label": HARNESS})["Volumes"] or ()
    return {volume["Name"]: volume["Labels"][HARNESS] for volume in found}


def _lines(row: ListedHarness) -> Iterator[str]:
    size = show_bytes(row.size_bytes) if row.size_bytes else "not made"
    yield f"{row.name:<14}{row.version:<12}{size:>9}  {row.dialect:<10} {row.licence:<12} {row.image}"
    if not row.is_tested:
        yield f"{'':<14}not tested: docs/harnesses.md says what is known of it"
    if row.content:
        yield f"{'':<14}content {row.content}"
    yield from (f"{'':<14}volume {volume}" for volume in row.volumes)


async def _check(api: ContainerApi, files: list[HarnessFile], image: str) -> int:
    volumes, num_failed = HarnessVolumes(api), 0
    for file in files:
        volume = await volumes.ready(file.harness)
        began_at = time.monotonic()
        status, output = await api.call(
            f"starting {file.harness.name}",
            lambda client, file=file, volume=volume: _start(client, file, image, volume),
        )
        fault = _fault(file, image, status, output)
        num_failed += bool(fault)
        seconds = time.monotonic() - began_at
        print(f"{file.harness.name} {file.harness.version} in {image}: {fault or f'runs ({seconds:.1f} s)'}")
    return FAILED if num_failed else 0


def _start(client: Client, file: HarnessFile, image: str, volume: str) -> tuple[int, str]:
    """Exit status and output of the command that prints the version."""
    command = [word.replace("{harness}", HARNESS_DIR) for word in file.version_command]
    container = client.create_container_from_config(
        client.create_container_config(
            image=image,
            # The command runs without a shell, which an image may lack.
            entrypoint=command[:1],
            command=command[1:],
            environment={"HOME": "/tmp"},
            network_disabled=True,
            host_config=client.create_host_config(mounts=[harness_mount(volume)], network_mode="none"),
        )
    )
    try:
        try:
            client.start(container)
        except docker_errors.APIError as error:
            return 127, str(error.explanation)
        status = client.wait(container, timeout=START_S)["StatusCode"]
        return status, client.logs(container).decode("utf-8", "replace")
    finally:
        client.remove_container(container, force=True)


def _fault(file: HarnessFile, image: str, status: int, output: str) -> str:
    """The reason why the program does not run; "" if it does."""
    if status == 0 and file.harness.version in output:
        return ""
    if file.glibc and re.search(r"GLIBC|not found|no such file|symbol", output):
        return f"does not run: it needs glibc {file.glibc} or newer, and {image} has an older one or none ({_last(output)})"
    if status == 0:
        return f"prints {_last(output)!r} in place of its version"
    return f"ends with status {status}: {_last(output)}"


def _last(output: str) -> str:
    return visible_line(next(reversed(output.strip().splitlines()), "it says nothing")[-300:])
