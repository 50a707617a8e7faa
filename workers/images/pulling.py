"""Pulls images, from proxies first, then from the registry in the name, and builds images that no registry has from task directories. Each
image gets the name that tasks use.

An image that is present is not changed. One that arrives for another platform or with another digest is removed again. A permanent failure
is reported at once; others are retried after growing pauses. A killed pull leaves no image under a task's name, and the next pull continues
with the layers that arrived.

A task directory holds a Dockerfile and a task.json; the image is named by the image_name in task.json. The label CONTENT contains a digest
of all inputs of the build, so that a second run builds only images whose inputs have changed. The log of a build that fails is kept.
"""

import hashlib
import json
import random
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from docker.utils.build import exclude_paths

from workers.images.api import ImageApi, ImageError, OnProgress, Present, PullStopped
from workers.images.eviction import Shelf, evict
from workers.images.names import Name, Proxy, parse_name, show_bytes

State = Literal["pulled", "built", "present", "failed"]


@dataclass(frozen=True, slots=True)
class ImageResult:
    """The result for one image. `via` is the name under which it was pulled. `seconds` is the duration, including pauses."""

    image: str
    state: State
    reason: str = ""  # why it failed
    via: str = ""
    size_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """`pulled   NAME  1.2 GB  34 s  by MIRROR/NAME`"""
        words = [f"{self.state:<8}", self.image]
        if self.size_bytes:
            words.append(show_bytes(self.size_bytes))
        if self.state != "present":
            words.append(f"{self.seconds:.1f} s")
        if self.via and self.via != self.image:
            words.append(f"by {self.via}")
        if self.reason:
            words.append(f"({self.reason})")
        return "  ".join(words)


class ImageObserver(Protocol):
    """Receives the progress, from several threads."""

    def began(self, image: str) -> None: ...
    def progress(self, image: str, done_bytes: int, total_bytes: int) -> None: ...
    def remark(self, image: str, text: str) -> None: ...
    def ended(self, result: ImageResult) -> None: ...


class Unobserved:
    """An observer that ignores everything."""

    def began(self, image: str) -> None: ...
    def progress(self, image: str, done_bytes: int, total_bytes: int) -> None: ...
    def remark(self, image: str, text: str) -> None: ...
    def ended(self, result: ImageResult) -> None: ...


PAUSE_S = 1.0  # pause before the second round; doubles with every further one
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class PullPlan:
    """The settings for pulling.

    `platform` is "os/architecture". The budget is for all images that Swerve manages on the Docker host; None: no limit.
    """

    platform: str
    proxies: tuple[Proxy, ...] = ()
    retries: int = 5  # rounds after the first
    budget_bytes: int | None = None
    keep: frozenset[str] = frozenset()  # names that must not be evicted to make room


@dataclass(slots=True)
class Puller:
    """Pulls images according to one plan. Setting `stopping` soon ends pulls and pauses with PullStopped."""

    api: ImageApi
    shelf: Shelf
    plan: PullPlan
    observer: ImageObserver = field(default_factory=Unobserved)
    stopping: threading.Event = field(default_factory=threading.Event)
    full: str = ""  # why no further image fits; "" until that is known

    def pull(self, image: str) -> ImageResult:
        """Pulls `image` unless it is present. Raises ValueError for a malformed name, and PullStopped; other failures are results."""
        name = parse_name(image)
        began_at = time.monotonic()
        self.observer.began(image)
        try:
            state, present, via = self._ensure(image, name)
            result = ImageResult(image, state, via=via, size_bytes=present.size_bytes)
        except PullStopped:
            raise
        except ImageError as error:
            result = ImageResult(image, "failed", reason=str(error))
        result = replace(result, seconds=time.monotonic() - began_at)
        self.observer.ended(result)
        return result

    def _ensure(self, image: str, name: Name) -> tuple[State, Present, str]:
        present = self.api.find(str(name))
        if present is not None:
            _check_platform("the image that is there", present, self.plan.platform)
            return "present", present, ""
        self._refuse_if_full()
        self.shelf.expect(str(name), "pulled")
        try:
            present, digest, via = self._rounds(image, name)
        except ImageError:
            self.shelf.forget(str(name))
            raise
        self.shelf.arrived(str(name), "pulled", present.id, digest=digest)
        self._make_room(name)
        return "pulled", present, via

    def _rounds(self, image: str, name: Name) -> tuple[Present, str, str]:
        """Try each source in turn, in rounds. A source that fails permanently is not tried again."""
        sources = [*dict.fromkeys(filter(None, (proxy.name_of(name) for proxy in self.plan.proxies))), name]
        reasons: dict[Name, str] = {}
        for round_number in range(self.plan.retries + 1):
            if round_number:
                self._pause(image, round_number, "; ".join(reasons[source] for source in sources))
            for source in tuple(sources):
                try:
                    return *self._pull_from(image, name, source), str(source)
                except PullStopped:
                    raise
                except ImageError as error:
                    reasons[source] = str(error)
                    if not error.transient:
                        sources.remove(source)
            if not sources:
                break
        if name.digest and self.plan.proxies:
            reasons[name] += (
                " (no proxy was tried: Docker gives a digest only to what it pulled by exactly that name)"
            )
        raise ImageError("; ".join(reasons.values()), transient=bool(sources))

    def _pause(self, image: str, round_number: int, reason: str) -> None:
        pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (round_number - 1)) * random.uniform(0.5, 1.5)
        self.observer.remark(image, f"{reason}; trying again in {pause_s:.1f} s")
        if self.stopping.wait(pause_s):
            raise PullStopped(f"{image}: stopped")

    def _pull_from(self, image: str, name: Name, source: Name) -> tuple[Present, str]:
        """Pulls under the name `source`, checks the image, and tags it `name`. Returns it and its manifest's digest."""

        def on_progress(done_bytes: int, total_bytes: int) -> None:
            self.observer.progress(image, done_bytes, total_bytes)

        digest = self._fetch(source, on_progress)
        # Another process may have renamed it already.
        arrived = self.api.find(str(source)) or self.api.find(str(name))
        if arrived is None:
            raise ImageError(f"{source}: it was pulled, but it is not on the Docker host", transient=True)
        try:
            _check_platform("the image that arrived", arrived, self.plan.platform)
            _check_digest(arrived, name)
        except ImageError:
            self.api.remove(str(source))
            raise
        if source != name:
            self.api.tag(arrived.id, name)
            self.api.remove(str(source))
        return arrived, digest

    def _fetch(self, source: Name, on_progress: OnProgress) -> str:
        return self.api.pull(
            source, platform=self.plan.platform, on_progress=on_progress, stopping=self.stopping
        )

    def _refuse_if_full(self) -> None:
        """Raises ImageError if the images that may not be evicted take the whole budget, before anything is downloaded."""
        budget_bytes = self.plan.budget_bytes
        if budget_bytes is not None and not self.full:
            least = evict(self.api, self.shelf, 0, keep=self.plan.keep, dry_run=True)
            if least.after_bytes >= budget_bytes:
                self.full = _full(budget_bytes, least.after_bytes)
        if self.full:
            raise ImageError(self.full)

    def _make_room(self, name: Name) -> None:
        """Evict other images. If that is not enough, remove the new one and raise ImageError."""
        if self.plan.budget_bytes is None:
            return
        found = evict(self.api, self.shelf, self.plan.budget_bytes, keep=[*self.plan.keep, str(name)])
        if not found.within:
            self.full = _full(self.plan.budget_bytes, found.after_bytes)
            self.api.remove(str(name))
            self.shelf.forget(str(name))
            raise ImageError(self.full)


def _full(budget_bytes: int, taken_bytes: int) -> str:
    return (
        f"the budget of {show_bytes(budget_bytes)} is full: this image, those in use and those to be kept take"
        f" {show_bytes(taken_bytes)}"
    )


def _check_platform(what: str, image: Present, platform: str) -> None:
    """Raises ImageError for another platform. A variant counts only if both name one."""
    pairs = zip(image.platform.split("/"), platform.split("/"), strict=False)
    if any(found != wanted for found, wanted in pairs):
        raise ImageError(f"{what} is for {image.platform}, not for {platform}")


def _check_digest(image: Present, name: Name) -> None:
    if name.digest and not any(digest.endswith(name.digest) for digest in image.digests):
        raise ImageError(
            f"the image that arrived has {', '.join(image.digests) or 'no digest'}, not {name.digest}"
        )


CONTENT = "swerve.content"


@dataclass(frozen=True, slots=True)
class BuildDirectory:
    """A task directory, and the name of the image to build from it."""

    name: Name
    directory: Path


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """The settings for building. `network` is for RUN commands: "none", "host", ... or None for the Docker host's default."""

    logs: Path
    build_args: Mapping[str, str]
    network: str | None = None
    force: bool = False


def read_build_directories(directory: Path, *, only: Collection[str] | None = None) -> list[BuildDirectory]:
    """The task directories under `directory`, in order of their paths; with `only`, only those of the named images.

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
    """Paths that a build sends to the Docker host; docker-py interprets .dockerignore."""
    ignore = directory / ".dockerignore"
    lines = [line.strip() for line in ignore.read_text().splitlines()] if ignore.exists() else []
    return sorted(
        exclude_paths(str(directory), [line for line in lines if line and not line.startswith("#")])
    )


@dataclass(slots=True)
class Builder:
    """Builds images according to one plan."""

    api: ImageApi
    shelf: Shelf
    plan: BuildPlan
    observer: ImageObserver

    def build(self, source: BuildDirectory) -> ImageResult:
        """Builds the image unless it is up to date. A failure is a result, too."""
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
        """Runs one build. Its log is removed if it succeeds."""
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
