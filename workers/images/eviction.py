"""Which images on a Docker host are Swerve's, how much space they take, and which to remove when they take too much.

It removes only what Swerve pulled or built, or what carries the label AGENT_IMAGE; never the image of a container, running or not; never
what an episode holds; never what the caller wants kept. The least recently used image goes first. Layers that several of our images share
count once, and are free only when the last of these images is removed.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from workers.docker.labels import AGENT_IMAGE, SOURCE
from workers.images.api import ImageApi, Present
from workers.images.errors import ImageInUse
from workers.images.names import parse_name
from workers.images.shelf import Entry, Shelf

log = logging.getLogger(__name__)

Chain = list[tuple[str, int]]
"""Layers from the bottom up: a name that identifies the layer and all below it, and the layer's bytes."""


@dataclass(frozen=True, slots=True)
class OurImage:
    """An image that Swerve manages."""

    id: str
    names: tuple[str, ...]  # none: an agents' image without a tag
    source: str  # the task's image, of an agents' image, which counts as used when that is; else ""
    chain: Chain
    size_bytes: int  # with shared layers
    used_at: float  # Unix seconds; of an image built on it, if that is later
    in_use: bool  # a container was made of it, or an episode holds it


@dataclass(frozen=True, slots=True)
class Eviction:
    """Images that were removed, or would be, and the bytes that our images take before and after."""

    evicted: tuple[OurImage, ...]
    before_bytes: int
    after_bytes: int
    budget_bytes: int

    @property
    def within(self) -> bool:
        return self.after_bytes <= self.budget_bytes


def evict(
    api: ImageApi,
    shelf: Shelf,
    budget_bytes: int,
    *,
    keep: Collection[str] = (),
    dry_run: bool = False,
) -> Eviction:
    """Remove images until ours take at most `budget_bytes`, or no other may be removed. One process does this at a time.

    `keep` holds names. Raises ImageError if the Docker host or the shelf fails halfway; what was removed stays removed.
    """
    with shelf.alone("evicting", wait=True):  # two at once would both see too much, and remove twice as much
        images = our_images(api, shelf)
        before_bytes = taken_bytes(images)
        evicted: list[OurImage] = []
        for image in _plan(images, budget_bytes, {str(parse_name(name)) for name in keep}):
            if dry_run or _remove(api, shelf, image):
                evicted.append(image)
        left = [image for image in images if image not in evicted]
    return Eviction(tuple(evicted), before_bytes, taken_bytes(left), budget_bytes)


def our_images(api: ImageApi, shelf: Shelf) -> list[OurImage]:
    """All images that we manage on this Docker host, least recently used first; of equals, an image before the one it is built on."""
    entries, uses, held = shelf.entries(), shelf.uses(), shelf.held()
    labelled = {image.id for image in api.images(label=f"{AGENT_IMAGE}=1")}
    ours = [image for image in api.images() if image.id in labelled or _all_ours(image, entries)]
    used_ids = api.used_ids()
    chains = _chains(api, shelf, ours)
    images: list[OurImage] = []
    for image in ours:
        names, source = _names(image), _source(image)
        used_at = max((uses.get(name, 0.0) for name in (*names, source)), default=0.0)
        images.append(
            OurImage(
                id=image.id,
                names=names,
                source=source,
                chain=chains[image.id],
                size_bytes=image.size_bytes,
                used_at=used_at or image.created_at,
                in_use=image.id in used_ids or not held.isdisjoint((*names, source)),
            )
        )
    return sorted(_as_foundations(images), key=lambda image: (image.used_at, -len(image.chain)))


def taken_bytes(images: Iterable[OurImage]) -> int:
    """Bytes of all their layers, each layer once."""
    return sum({layer: size for image in images for layer, size in image.chain}.values())


def _all_ours(image: Present, entries: dict[str, Entry]) -> bool:
    """Whether all its names are ours. A name that somebody else gave makes it theirs too, as does our name on an image we did not put
    there.
    """
    found = [entries.get(name) for name in _names(image)]
    return bool(found) and all(entry is not None and entry.id in ("", image.id) for entry in found)


def _names(image: Present) -> tuple[str, ...]:
    """Its tags, or its digests if it has no tag: Docker gives every pulled tag a digest."""
    return tuple(str(parse_name(name)) for name in image.tags or image.digests)


def _source(image: Present) -> str:
    return str(parse_name(image.labels[SOURCE])) if SOURCE in image.labels else ""


def _chains(api: ImageApi, shelf: Shelf, images: Sequence[Present]) -> dict[str, Chain]:
    """Layers by image id. We ask the Docker host once per image, because an id stands for its content."""
    known = shelf.chains()
    new = {image.id: _chain(api, image) for image in images if image.id not in known}
    present = {image.id for image in images}
    if new or known.keys() - present:
        shelf.remember_chains(new, present=present)
    return known | new


def _chain(api: ImageApi, image: Present) -> Chain:
    """One layer for everything if the history does not account for every byte, because then we do not know what is shared."""
    chain: Chain = []
    below = ""
    for made_by, size_bytes in api.layers(image.id):
        below = hashlib.sha256(f"{below}\n{made_by}".encode()).hexdigest()
        chain.append((below, size_bytes))
    if not chain or sum(size_bytes for _, size_bytes in chain) != image.size_bytes:
        return [(image.id, image.size_bytes)]
    return chain


def _as_foundations(images: Sequence[OurImage]) -> Iterator[OurImage]:
    """`images`, where an image that another is built on counts as used when that is, because it cannot be freed before."""
    used_at: dict[str, float] = {}
    in_use: set[str] = set()
    for image in images:
        for layer, _ in image.chain:
            used_at[layer] = max(used_at.get(layer, 0.0), image.used_at)
            if image.in_use:
                in_use.add(layer)
    for image in images:
        top = image.chain[-1][0]
        yield replace(image, used_at=used_at[top], in_use=top in in_use)


def _plan(images: Sequence[OurImage], budget_bytes: int, keep: Set[str]) -> Iterator[OurImage]:
    """Images to remove, in the order given, until the rest is within the budget."""
    holders = Counter(layer for image in images for layer, _ in set(image.chain))
    taken = taken_bytes(images)
    for image in images:
        if taken <= budget_bytes:
            return
        if image.in_use or not keep.isdisjoint((*image.names, image.source)):
            continue
        for layer, size_bytes in set(image.chain):
            holders[layer] -= 1
            if holders[layer] == 0:
                taken -= size_bytes
        yield image


def _remove(api: ImageApi, shelf: Shelf, image: OurImage) -> bool:
    """False if a container was made of it in the meantime."""
    try:
        for name in image.names or (image.id,):
            api.remove(name)
            shelf.forget(name)
    except ImageInUse as error:
        log.info("not evicted: %s", error)
        return False
    return True
