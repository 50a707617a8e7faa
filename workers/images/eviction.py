"""Finds Swerve's images on a Docker host and their size, and removes images when they take too much space.

It removes only images that Swerve pulled or built, or that have the label AGENT_IMAGE; never the image of a container, running or not;
never an image that an episode holds, or that the caller wants kept. The least recently used image goes first. Layers that several of our
images share count once, and are free only when the last of these images is removed.

The shelf is the record of a Docker host's images: those that Swerve added, the last use of each, and those that episodes hold.
It is a small SQLite file per Docker host, shared by every worker and command on this machine. A name is recorded before its pull or build
begins, so that images that a killed process leaves are known to be ours.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from workers.docker.host import AGENT_IMAGE, SOURCE
from workers.images.api import ImageApi, ImageError, ImageInUse, Present
from workers.images.names import parse_name

WAIT_S = 30.0  # wait for another process's write
_TABLES = """
CREATE TABLE IF NOT EXISTS images (name TEXT PRIMARY KEY, origin TEXT, id TEXT, digest TEXT, since REAL);
CREATE TABLE IF NOT EXISTS uses (name TEXT PRIMARY KEY, used_at REAL);
CREATE TABLE IF NOT EXISTS holds (name TEXT, holder TEXT, until REAL, PRIMARY KEY (name, holder));
CREATE TABLE IF NOT EXISTS layers (id TEXT PRIMARY KEY, chain TEXT);
"""

Origin = Literal["pulled", "built"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A name that is ours. `id` is the image's id at its arrival, "" before that."""

    name: str
    origin: Origin
    id: str
    digest: str  # digest of the manifest, if the image was pulled and Docker reported it
    since: float  # Unix seconds


class Shelf:
    """The record. Names are spelled as `names.Name` prints them. Every method raises ImageError if the file cannot be used."""

    def __init__(self, directory: Path, host_id: str) -> None:
        self.path = directory / f"images-{host_id.replace(':', '').lower()}.sqlite"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ImageError(f"SWERVE_STATE_DIR={directory}: cannot be used: {error}") from error
        with self._database() as database:
            database.executescript(_TABLES)

    def expect(self, name: str, origin: Origin) -> None:
        """Records that Swerve is about to pull or build `name`, which does not exist yet."""
        with self._database() as database:
            database.execute(
                "INSERT OR REPLACE INTO images VALUES (?, ?, '', '', ?)", (name, origin, time.time())
            )

    def arrived(self, name: str, origin: Origin, image_id: str, *, digest: str = "") -> None:
        """Records that the image has arrived. This counts as a use, so that an image pulled ahead is not evicted first."""
        row = (name, origin, image_id, digest, time.time())
        with self._database() as database:
            database.execute("INSERT OR REPLACE INTO images VALUES (?, ?, ?, ?, ?)", row)
        self.note_used(name)

    def forget(self, name: str) -> None:
        with self._database() as database:
            database.execute("DELETE FROM images WHERE name = ?", (name,))

    def entries(self) -> dict[str, Entry]:
        with self._database() as database:
            rows = database.execute("SELECT name, origin, id, digest, since FROM images")
            return {row[0]: Entry(*row) for row in rows}

    def note_used(self, name: str, *, at: float | None = None) -> None:
        """Records a use at `at`, in Unix seconds, now if absent. A use older than the recorded one changes nothing."""
        with self._database() as database:
            database.execute(
                "INSERT INTO uses VALUES (?, ?) ON CONFLICT DO UPDATE SET used_at = max(used_at, excluded.used_at)",
                (name, time.time() if at is None else at),
            )

    def uses(self) -> dict[str, float]:
        """The last use of each name, in Unix seconds."""
        with self._database() as database:
            return dict(database.execute("SELECT name, used_at FROM uses"))

    def hold(self, name: str, holder: str, *, until: float) -> None:
        """Protects `name` from eviction until it is released, or until `until` (Unix seconds) at the latest, because its holder may be
        killed.
        """
        with self._database() as database:
            database.execute("INSERT OR REPLACE INTO holds VALUES (?, ?, ?)", (name, holder, until))
        self.note_used(name)

    def release(self, name: str, holder: str) -> None:
        with self._database() as database:
            database.execute("DELETE FROM holds WHERE name = ? AND holder = ?", (name, holder))
        self.note_used(name)

    def held(self) -> set[str]:
        """Names that are held now."""
        with self._database() as database:
            database.execute("DELETE FROM holds WHERE until < ?", (time.time(),))
            return {row[0] for row in database.execute("SELECT DISTINCT name FROM holds")}

    def chains(self) -> dict[str, list[tuple[str, int]]]:
        """The layers of each image id, as passed to `remember_chains`."""
        with self._database() as database:
            rows = database.execute("SELECT id, chain FROM layers")
            return {row[0]: [(layer, size) for layer, size in json.loads(row[1])] for row in rows}

    def remember_chains(self, chains: Mapping[str, list[tuple[str, int]]], *, present: set[str]) -> None:
        """Adds `chains`, and drops those of images that are no longer `present`."""
        with self._database() as database:
            rows = [(image_id, json.dumps(chain)) for image_id, chain in chains.items()]
            database.executemany("INSERT OR REPLACE INTO layers VALUES (?, ?)", rows)
            known = {row[0] for row in database.execute("SELECT id FROM layers")}
            database.executemany("DELETE FROM layers WHERE id = ?", [(each,) for each in known - present])

    @contextlib.contextmanager
    def alone(self, doing: str, *, wait: bool) -> Generator[bool]:
        """Lets only one process of this machine at a time do the work named `doing`.

        Without `wait`, yields False if another one does it.
        """
        with self.path.with_suffix(f".{doing}").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    @contextlib.contextmanager
    def _database(self) -> Generator[sqlite3.Connection]:
        """A new connection for each call, because calls come from any thread."""
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=WAIT_S)) as database, database:
                yield database
        except sqlite3.Error as error:
            raise ImageError(f"SWERVE_STATE_DIR: {self.path}: {error}", transient=True) from error


log = logging.getLogger(__name__)

Chain = list[tuple[str, int]]
"""Layers from the bottom up: a name that identifies the layer and all below it, and the layer's bytes."""


@dataclass(frozen=True, slots=True)
class OurImage:
    """An image that Swerve manages."""

    id: str
    names: tuple[str, ...]  # empty for an agents' image without a tag
    source: str  # the task's image, if this is an agents' image, whose use counts as use of it; otherwise ""
    chain: Chain
    size_bytes: int  # size including shared layers
    used_at: float  # Unix seconds of the last use of it or of an image built on it
    in_use: bool  # a container was made of it, or an episode holds it


@dataclass(frozen=True, slots=True)
class Eviction:
    """The images that were removed, or would be, and the bytes of our images before and after."""

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
    """Remove images until ours take at most `budget_bytes`, or no further image may be removed. One process does this at a time.

    `keep` holds names. Raises ImageError if the Docker host or the shelf fails halfway; what was removed stays removed.
    """
    # Two evictions at once would both see too much, and remove twice as much
    with shelf.alone("evicting", wait=True):
        images = our_images(api, shelf)
        before_bytes = taken_bytes(images)
        evicted: list[OurImage] = []
        for image in _plan(images, budget_bytes, {str(parse_name(name)) for name in keep}):
            if dry_run or _remove(api, shelf, image):
                evicted.append(image)
        left = [image for image in images if image not in evicted]
    return Eviction(tuple(evicted), before_bytes, taken_bytes(left), budget_bytes)


def our_images(api: ImageApi, shelf: Shelf) -> list[OurImage]:
    """All images that Swerve manages on this Docker host, least recently used first.

    If two were used equally recently, an image comes before the one it is built on.
    """
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
    """The bytes of all their layers, each layer counted once."""
    return sum({layer: size for image in images for layer, size in image.chain}.values())


def _all_ours(image: Present, entries: dict[str, Entry]) -> bool:
    """Whether all of its names are ours.

    A name that others gave it makes it theirs, too, and so does our name on an image that we did not add.
    """
    found = [entries.get(name) for name in _names(image)]
    return bool(found) and all(entry is not None and entry.id in ("", image.id) for entry in found)


def _names(image: Present) -> tuple[str, ...]:
    """Its tags, or its digests if it has no tag: Docker gives every pulled tag a digest."""
    return tuple(str(parse_name(name)) for name in image.tags or image.digests)


def _source(image: Present) -> str:
    return str(parse_name(image.labels[SOURCE])) if SOURCE in image.labels else ""


def _chains(api: ImageApi, shelf: Shelf, images: Sequence[Present]) -> dict[str, Chain]:
    """The layers of each image. The Docker host is asked once per image, because an id identifies its content."""
    known = shelf.chains()
    new = {image.id: _chain(api, image) for image in images if image.id not in known}
    present = {image.id for image in images}
    if new or known.keys() - present:
        shelf.remember_chains(new, present=present)
    return known | new


def _chain(api: ImageApi, image: Present) -> Chain:
    """The layers of the image. They are one layer if the history does not account for every byte, because then sharing is unknown."""
    chain: Chain = []
    below = ""
    for made_by, size_bytes in api.layers(image.id):
        below = hashlib.sha256(f"{below}\n{made_by}".encode()).hexdigest()
        chain.append((below, size_bytes))
    if not chain or sum(size_bytes for _, size_bytes in chain) != image.size_bytes:
        return [(image.id, image.size_bytes)]
    return chain


def _as_foundations(images: Sequence[OurImage]) -> Iterator[OurImage]:
    """`images`. An image on which another is built counts as used when that one is, because it cannot be freed before."""
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
    """Removes the image; returns False if a container was made of it in the meantime."""
    try:
        for name in image.names or (image.id,):
            api.remove(name)
            shelf.forget(name)
    except ImageInUse as error:
        log.info("not evicted: %s", error)
        return False
    return True
