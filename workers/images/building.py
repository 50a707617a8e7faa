"""Builds the images of task directories, for images that no registry has.

A task directory holds a Dockerfile and a task.json; the image is named by the image_name in task.json. The label CONTENT holds a digest of
all that went into the build, so that a second run builds only what has changed. The log of a build that fails is kept.
"""

import hashlib
import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from docker.utils.build import exclude_paths

from workers.images.api import ImageApi
from workers.images.errors import ImageError
from workers.images.names import Name, parse_name
from workers.images.result import ImageObserver, ImageResult
from workers.images.shelf import Shelf

CONTENT = "swerve.content"


@dataclass(frozen=True, slots=True)
class BuildDirectory:
    """A task directory, and the name of the image to build from it."""

    name: Name
    directory: Path


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """`network` is for RUN commands: "none", "host", ... or None for the Docker host's default."""

    logs: Path
    build_args: Mapping[str, str]
    network: str | None = None
    force: bool = False


def read_build_directories(directory: Path, *, only: Collection[str] | None = None) -> list[BuildDirectory]:
    """The task directories under `directory`, in order of their paths; with `only`, those of the images named there.

    Raises ValueError that names the file if a task has no image name or no Dockerfile, if two directories would build the same image,
    and if there are none.
    """
    wanted = None if only is None else {str(parse_name(name)) for name in only}
    found: dict[str, BuildDirectory] = {}
    for path in sorted(directory.rglob("task.json")):
        name = _image_name(path)
        if wanted is not None and str(name) not in wanted:
            continue
        if not (path.parent / "Dockerfile").is_file():
            raise ValueError(f"{path.parent}: there is no Dockerfile to build {name} from")
        if str(name) in found:
            other = found[str(name)].directory
            raise ValueError(
                f"{path}: image_name: {name} is also that of {other / 'task.json'}; names must differ"
            )
        found[str(name)] = BuildDirectory(name, path.parent)
    if not found:
        raise ValueError(
            f"{directory}: no task.json under it" + (" names any of these images" if only else "")
        )
    return list(found.values())


def _image_name(path: Path) -> Name:
    try:
        found: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    text = cast(dict[str, Any], found).get("image_name") if isinstance(found, dict) else None
    if not isinstance(text, str) or not text:
        raise ValueError(f"{path}: image_name: give the name for the image")
    try:
        name = parse_name(text)
    except ValueError as error:
        raise ValueError(f"{path}: image_name: {error}") from error
    if name.digest:
        raise ValueError(
            f"{path}: image_name: {text!r} has a digest, which an image that is built here cannot have"
        )
    return name


def content_digest(directory: Path, build_args: Mapping[str, str], network: str | None) -> str:
    """A digest of the Dockerfile, of every file that it may copy and its mode, and of the build's options; not of times."""
    digest = hashlib.sha256(json.dumps([sorted(build_args.items()), network]).encode())
    for relative in _context(directory):
        path = directory / relative
        kind = "link" if path.is_symlink() else "file" if path.is_file() else "directory"
        mode = 0 if kind == "link" else path.stat().st_mode & 0o7777
        content = (
            str(path.readlink()).encode() if kind == "link" else path.read_bytes() if kind == "file" else b""
        )
        digest.update(f"{relative}\0{kind}\0{mode:o}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _context(directory: Path) -> list[str]:
    """Paths that a build sends to the Docker host, as docker-py reads .dockerignore."""
    ignore = directory / ".dockerignore"
    lines = [line.strip() for line in ignore.read_text().splitlines()] if ignore.exists() else []
    return sorted(
        exclude_paths(str(directory), [line for line in lines if line and not line.startswith("#")])
    )


@dataclass(slots=True)
class Builder:
    """Builds images by one plan."""

    api: ImageApi
    shelf: Shelf
    plan: BuildPlan
    observer: ImageObserver

    def build(self, source: BuildDirectory) -> ImageResult:
        """Build the image unless it is up to date. A failure is a result too."""
        image, began_at = str(source.name), time.monotonic()
        self.observer.began(image)
        log = self.plan.logs / f"{image.replace('/', '_').replace(':', '_')}.log"
        try:
            result = self._ensure(source, image, log)
        except ImageError as error:
            result = ImageResult(
                image, "failed", reason=f"{error}; log: {log}" if log.exists() else str(error)
            )
        result = replace(result, seconds=time.monotonic() - began_at)
        self.observer.ended(result)
        return result

    def _ensure(self, source: BuildDirectory, image: str, log: Path) -> ImageResult:
        content = content_digest(source.directory, self.plan.build_args, self.plan.network)
        present = self.api.find(image)
        if present is not None and not self.plan.force:
            known = present.labels.get(CONTENT)
            if known is None:
                self.observer.remark(
                    image, "exists, and was not built by this command; --force builds it again"
                )
            if known in (None, content):
                return ImageResult(image, "present", size_bytes=present.size_bytes)
        if present is None:
            self.shelf.expect(image, "built")
        try:
            self._run(source, content, log)
        except ImageError:
            if present is None:
                self.shelf.forget(image)
            raise
        built = self.api.find(image)
        if built is None:
            raise ImageError("it was built, but it is not on the Docker host", transient=True)
        self.shelf.arrived(image, "built", built.id)
        return ImageResult(image, "built", size_bytes=built.size_bytes)

    def _run(self, source: BuildDirectory, content: str, log: Path) -> None:
        """One build. Its log is removed if it succeeds."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as lines:

            def on_line(text: str) -> None:
                lines.write(text)
                lines.flush()
                if text.startswith("Step "):
                    self.observer.remark(str(source.name), text.strip())

            self.api.build(
                source.directory,
                source.name,
                build_args=self.plan.build_args,
                labels={CONTENT: content},
                network=self.plan.network,
                on_line=on_line,
            )
        log.unlink()
