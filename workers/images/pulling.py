"""Pulls: from proxies first, then from where the name says; each image ends up under the name that tasks use.

Promises. What is there is left alone. An image that arrived for another platform or with another digest is taken away
again. A failure that asking again would not mend is told at once, with the reason; others are asked again after a
growing pause. A killed pull leaves no image under a task's name, and the next one goes on with the layers that arrived.
"""

import random
import threading
import time
from dataclasses import dataclass, field, replace

from workers.images.docker_images import ImageEngine, OnProgress, Present
from workers.images.errors import ImageError, Stopped
from workers.images.eviction import evict
from workers.images.names import Name, Proxy, parse_name
from workers.images.outcome import Outcome, State, Unwatched, Watch
from workers.images.shelf import Shelf
from workers.images.sizes import show_bytes

PAUSE_S = 1.0  # before the second round; doubles with every further one
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class PullPlan:
    """`platform` is "os/architecture". The budget is for all images that Swerve manages on the engine; None: no limit."""

    platform: str
    proxies: tuple[Proxy, ...] = ()
    retries: int = 5  # rounds after the first
    budget_bytes: int | None = None
    keep: frozenset[str] = frozenset()  # names that must not go to make room


@dataclass(slots=True)
class Puller:
    """Pulls by one plan. Setting `stopping` ends pulls and pauses soon, with Stopped."""

    engine: ImageEngine
    shelf: Shelf
    plan: PullPlan
    watch: Watch = field(default_factory=Unwatched)
    stopping: threading.Event = field(default_factory=threading.Event)
    full: str = ""  # why nothing more fits, once that was found

    def pull(self, image: str) -> Outcome:
        """Sees to it that `image` is there. Raises ValueError for what is no name, Stopped; all else is a result."""
        name = parse_name(image)
        began_at = time.monotonic()
        self.watch.began(image)
        try:
            state, present, via = self._ensure(image, name)
            outcome = Outcome(image, state, via=via, size_bytes=present.size_bytes)
        except Stopped:
            raise
        except ImageError as error:
            outcome = Outcome(image, "failed", reason=str(error))
        outcome = replace(outcome, seconds=time.monotonic() - began_at)
        self.watch.ended(outcome)
        return outcome

    def _ensure(self, image: str, name: Name) -> tuple[State, Present, str]:
        present = self.engine.find(str(name))
        if present is not None:
            _check_platform("what is there", present, self.plan.platform)
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
        """Asks each source in turn; a source that says no for good is asked once."""
        sources = [*dict.fromkeys(filter(None, (proxy.name_of(name) for proxy in self.plan.proxies))), name]
        reasons: dict[Name, str] = {}
        for round_number in range(self.plan.retries + 1):
            if round_number:
                self._pause(image, round_number, "; ".join(reasons[source] for source in sources))
            for source in tuple(sources):
                try:
                    return *self._pull_from(image, name, source), str(source)
                except Stopped:
                    raise
                except ImageError as error:
                    reasons[source] = str(error)
                    if not error.transient:
                        sources.remove(source)
            if not sources:
                break
        if name.digest and self.plan.proxies:
            reasons[name] += (
                " (no proxy was asked: an engine gives a digest only to what it pulled by that name)"
            )
        raise ImageError("; ".join(reasons.values()), transient=bool(sources))

    def _pause(self, image: str, round_number: int, reason: str) -> None:
        pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (round_number - 1)) * random.uniform(0.5, 1.5)
        self.watch.says(image, f"{reason}; asking again in {pause_s:.1f} s")
        if self.stopping.wait(pause_s):
            raise Stopped(f"{image}: stopped")

    def _pull_from(self, image: str, name: Name, source: Name) -> tuple[Present, str]:
        """One pull by the name `source`, checked, and named `name`. Returns it and its manifest's digest."""

        def on_progress(done_bytes: int, total_bytes: int) -> None:
            self.watch.progress(image, done_bytes, total_bytes)

        digest = self._fetch(source, on_progress)
        arrived = self.engine.find(str(source)) or self.engine.find(str(name))  # another process was quicker
        if arrived is None:
            raise ImageError(f"{source}: it was pulled, and is not there", transient=True)
        try:
            _check_platform("what arrived", arrived, self.plan.platform)
            _check_digest(arrived, name)
        except ImageError:
            self.engine.remove(str(source))
            raise
        if source != name:
            self.engine.tag(arrived.id, name)
            self.engine.remove(str(source))
        return arrived, digest

    def _fetch(self, source: Name, on_progress: OnProgress) -> str:
        return self.engine.pull(
            source, platform=self.plan.platform, on_progress=on_progress, stopping=self.stopping
        )

    def _refuse_if_full(self) -> None:
        """Nothing is fetched only to be thrown away: what may not go already takes the whole budget."""
        budget_bytes = self.plan.budget_bytes
        if budget_bytes is not None and not self.full:
            least = evict(self.engine, self.shelf, 0, keep=self.plan.keep, dry_run=True)
            if least.after_bytes >= budget_bytes:
                self.full = _full(budget_bytes, least.after_bytes)
        if self.full:
            raise ImageError(self.full)

    def _make_room(self, name: Name) -> None:
        """Evicts others; if that is not enough, the newcomer itself. Raises ImageError in that case."""
        if self.plan.budget_bytes is None:
            return
        found = evict(self.engine, self.shelf, self.plan.budget_bytes, keep=[*self.plan.keep, str(name)])
        if not found.within:
            self.full = _full(self.plan.budget_bytes, found.after_bytes)
            self.engine.remove(str(name))
            self.shelf.forget(str(name))
            raise ImageError(self.full)


def _full(budget_bytes: int, taken_bytes: int) -> str:
    return (
        f"the budget of {show_bytes(budget_bytes)} is full: this image, what is in use and what is to be kept"
        f" take {show_bytes(taken_bytes)}"
    )


def _check_platform(what: str, image: Present, platform: str) -> None:
    """A variant that only one of the two names does not set them apart."""
    pairs = zip(image.platform.split("/"), platform.split("/"), strict=False)
    if any(found != wanted for found, wanted in pairs):
        raise ImageError(f"{what} is for {image.platform}, not for {platform}")


def _check_digest(image: Present, name: Name) -> None:
    if name.digest and not any(digest.endswith(name.digest) for digest in image.digests):
        raise ImageError(
            f"what arrived is {', '.join(image.digests) or 'without a digest'}, not {name.digest}"
        )
