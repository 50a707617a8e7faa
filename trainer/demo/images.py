"""The images of a written family: one per task, the shared base image plus one layer with the repository.

A family is a hundred images that differ by a few kilobytes. They are loaded as one archive whose manifests name the base's
layers without containing them, which takes milliseconds per image where a build takes half a second. A Docker host that
requires every layer in the archive refuses it; then the images are built one by one from the Dockerfiles, which say the same.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, BuildError, DockerException, ImageLoadError, ImageNotFound

from trainer.demo.task_directories import BASE_IMAGE, CREATED_AT, ENVIRONMENT, WORKDIR


def build_images(directory: Path) -> tuple[int, int]:
    """Make every image of the family under `directory` that the Docker host lacks; returns (made, already there).

    Raises ValueError if there are no tasks, no Docker host answers, or the base image is missing.
    """
    tasks = sorted(directory.glob("**/task_*/task.json"))
    if not tasks:
        raise ValueError(f"directory: no task_*/task.json under {directory}; write a family there first")
    wanted = {json.loads(task.read_bytes())["image_name"]: task.parent for task in tasks}
    try:
        client = docker.from_env()
        missing = {name: folder for name, folder in wanted.items() if not _present(client, name)}
        if missing:
            _make(client, missing)
    except (APIError, BuildError, DockerException) as error:
        raise ValueError(f"directory: its images could not be made: {error}") from error
    return len(missing), len(tasks) - len(missing)


def _present(client: docker.DockerClient, name: str) -> bool:
    try:
        client.images.get(name)
    except ImageNotFound:
        return False
    return True


def _make(client: docker.DockerClient, missing: dict[str, Path]) -> None:
    try:
        client.images.load(archive(client.api.inspect_image(BASE_IMAGE), missing))
    except (APIError, ImageLoadError):
        for name, folder in missing.items():
            client.images.build(path=str(folder), tag=name, rm=True)


def archive(base: dict[str, Any], folders: dict[str, Path]) -> bytes:
    """A docker-archive with one image for each (name, task folder), on top of the inspected `base`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        manifest = [dict(entry) for entry in _entries(tar, base, folders)]
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    return buffer.getvalue()


def _entries(
    tar: tarfile.TarFile, base: dict[str, Any], folders: dict[str, Path]
) -> Iterator[dict[str, Any]]:
    beneath = base["RootFS"]["Layers"]
    for name, folder in folders.items():
        layer = _layer(folder / "repo")
        digest = hashlib.sha256(layer).hexdigest()
        config = json.dumps(_config(base, [*beneath, f"sha256:{digest}"])).encode()
        config_name = f"{hashlib.sha256(config).hexdigest()}.json"
        _add(tar, config_name, config)
        _add(tar, f"{digest}/layer.tar", layer)
        layers = [*(f"{each.removeprefix('sha256:')}/layer.tar" for each in beneath), f"{digest}/layer.tar"]
        yield {"Config": config_name, "RepoTags": [name], "Layers": layers}


def _config(base: dict[str, Any], layers: list[str]) -> dict[str, Any]:
    inherited = base["Config"]
    variables = [*(inherited["Env"] or []), *(f"{key}={value}" for key, value in ENVIRONMENT.items())]
    return {
        "architecture": base["Architecture"],
        "os": base["Os"],
        "created": CREATED_AT,
        "config": inherited | {"Env": variables, "WorkingDir": WORKDIR},
        "rootfs": {"type": "layers", "diff_ids": layers},
    }


def _layer(repo: Path) -> bytes:
    """The repository under the working directory, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(repo, arcname=WORKDIR.lstrip("/"), filter=_owned_by_root)
    return buffer.getvalue()


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
