"""Pulls images: from proxies first, then from the registry in the name. Each image ends up under the name that tasks use.

An image that is there is left alone. One that arrives for another platform or with another digest is removed again. A permanent failure is
reported at once; others are retried after growing pauses. A killed pull leaves no image under a task's name, and the next pull continues
with the layers that arrived.
"""

import random
import threading
import time
from dataclasses import dataclass, field, replace

from workers.images.api import ImageApi, OnProgress, Present
from workers.images.errors import ImageError, PullStopped
from workers.images.eviction import evict
from workers.images.names import Name, Proxy, parse_name
from workers.images.result import ImageObserver, ImageResult, State, Unobserved
from workers.images.shelf import Shelf
from workers.images.sizes import show_bytes

PAUSE_S = 1.0  # before the second round; doubles with every further one
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class PullPlan:
    """`platform` is "os/architecture". The budget is for all images that Swerve manages on the Docker host; None: no limit."""

    platform: str
    proxies: tuple[Proxy, ...] = ()
    retries: int = 5  # rounds after the first
    budget_bytes: int | None = None
    keep: frozenset[str] = frozenset()  # names that must not be evicted to make room


@dataclass(slots=True)
class Puller:
    """Pulls images by one plan. Setting `stopping` soon ends pulls and pauses with PullStopped."""

    api: ImageApi
    shelf: Shelf
    plan: PullPlan
    observer: ImageObserver = field(default_factory=Unobserved)
    stopping: threading.Event = field(default_factory=threading.Event)
    full: str = ""  # why no further image fits, once that is known

    def pull(self, image: str) -> ImageResult:
        """Pull `image` unless it is there. Raises ValueError for a malformed name, and PullStopped; other failures are results."""
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
        """Pull by the name `source`, check the image, and tag it `name`. Returns it and its manifest's digest."""

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
        """Raises ImageError if the images that may not be evicted take the whole budget, so that we download nothing in vain."""
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
