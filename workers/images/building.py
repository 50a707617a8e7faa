"""Builds the images of task directories, where no registry has them.

A task directory holds a Dockerfile and task.json, whose image_name the image gets. The label CONTENT keeps a digest of
all that went into the build, so that a second run builds only what has changed. The build's log is kept if it fails.
"""

import hashlib
import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from docker.utils.build import exclude_paths

from workers.images.docker_images import ImageEngine
from workers.images.errors import ImageError
from workers.images.names import Name, parse_name
from workers.images.outcome import Outcome, Watch
from workers.images.shelf import Shelf

CONTENT = "swerve.content"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One image to build, and the directory that says how."""

    name: Name
    directory: Path


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """`network` is that of RUN commands: "none", "host", ... or None for the engine's default."""

    logs: Path
    build_args: Mapping[str, str]
    network: str | None = None
    force: bool = False


def read_recipes(directory: Path, *, only: Collection[str] | None = None) -> list[Recipe]:
    """The recipes under `directory`, in order of their paths; with `only`, those of the images named there.

    Raises ValueError naming the file for a task without an image name or a Dockerfile, for two that would build one
    image from different directories, and if there are none.
    """
    wanted = None if only is None else {str(parse_name(name)) for name in only}
    recipes: dict[str, Recipe] = {}
    for path in sorted(directory.rglob("task.json")):
        name = _image_name(path)
        if wanted is not None and str(name) not in wanted:
            continue
        if not (path.parent / "Dockerfile").is_file():
            raise ValueError(f"{path.parent}: there is no Dockerfile to build {name} from")
        if str(name) in recipes:
            other = recipes[str(name)].directory
            raise ValueError(
                f"{path}: image_name: {name} is also that of {other / 'task.json'}; names must differ"
            )
        recipes[str(name)] = Recipe(name, path.parent)
    if not recipes:
        raise ValueError(
            f"{directory}: no task.json under it" + (" names any of these images" if only else "")
        )
    return list(recipes.values())


def _image_name(path: Path) -> Name:
    try:
        found: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    text = cast(dict[str, Any], found).get("image_name") if isinstance(found, dict) else None
    if not isinstance(text, str) or not text:
        raise ValueError(f"{path}: image_name: give the name that the image is to have")
    try:
        name = parse_name(text)
    except ValueError as error:
        raise ValueError(f"{path}: image_name: {error}") from error
    if name.digest:
        raise ValueError(
            f"{path}: image_name: {text!r} has a digest, which nothing that is built here can have"
        )
    return name


def content_digest(directory: Path, build_args: Mapping[str, str], network: str | None) -> str:
    """Changes with the Dockerfile, any file that it may copy, its mode, and how the build is run; not with times."""
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
    """Paths that the engine would be sent, by the SDK's own reading of .dockerignore."""
    ignore = directory / ".dockerignore"
    lines = [line.strip() for line in ignore.read_text().splitlines()] if ignore.exists() else []
    return sorted(
        exclude_paths(str(directory), [line for line in lines if line and not line.startswith("#")])
    )


@dataclass(slots=True)
class Builder:
    """Builds by one plan."""

    engine: ImageEngine
    shelf: Shelf
    plan: BuildPlan
    watch: Watch

    def build(self, recipe: Recipe) -> Outcome:
        """Sees to it that the image is there as its directory says. What fails is an outcome."""
        image, began_at = str(recipe.name), time.monotonic()
        self.watch.began(image)
        log = self.plan.logs / f"{image.replace('/', '_').replace(':', '_')}.log"
        try:
            outcome = self._ensure(recipe, image, log)
        except ImageError as error:
            outcome = Outcome(image, "failed", reason=f"{error}; log: {log}" if log.exists() else str(error))
        outcome = replace(outcome, seconds=time.monotonic() - began_at)
        self.watch.ended(outcome)
        return outcome

    def _ensure(self, recipe: Recipe, image: str, log: Path) -> Outcome:
        content = content_digest(recipe.directory, self.plan.build_args, self.plan.network)
        present = self.engine.find(image)
        if present is not None and not self.plan.force:
            known = present.labels.get(CONTENT)
            if known is None:
                self.watch.says(image, "is there, and was not built by this command; --force builds it anew")
            if known in (None, content):
                return Outcome(image, "present", size_bytes=present.size_bytes)
        if present is None:
            self.shelf.expect(image, "built")
        try:
            self._run(recipe, content, log)
        except ImageError:
            if present is None:
                self.shelf.forget(image)
            raise
        built = self.engine.find(image)
        if built is None:
            raise ImageError("it was built, and is not there", transient=True)
        self.shelf.arrived(image, "built", built.id)
        return Outcome(image, "built", size_bytes=built.size_bytes)

    def _run(self, recipe: Recipe, content: str, log: Path) -> None:
        """One build. Its log goes when it succeeds."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as lines:

            def on_line(text: str) -> None:
                lines.write(text)
                lines.flush()
                if text.startswith("Step "):
                    self.watch.says(str(recipe.name), text.strip())

            self.engine.build(
                recipe.directory,
                recipe.name,
                build_args=self.plan.build_args,
                labels={CONTENT: content},
                network=self.plan.network,
                on_line=on_line,
            )
        log.unlink()
