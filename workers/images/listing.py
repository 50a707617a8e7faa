"""Lists which images are there and which are missing, for people and scripts."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workers.images.api import ImageApi
from workers.images.eviction import OurImage, taken_bytes
from workers.images.shelf import Entry, Shelf
from workers.images.sizes import show_bytes


@dataclass(frozen=True, slots=True)
class Listed:
    """One name. `managed`: Swerve put it there, so eviction may take it."""

    image: str
    present: bool
    managed: bool = False
    in_use: bool = False  # a container was made of it, or an episode holds it
    size_bytes: int = 0  # of all its layers, shared or not
    digest: str = ""  # of its manifest; "" if it was built here
    last_used_at: float = 0.0  # Unix seconds; 0: never by a worker


def list_ours(ours: Sequence[OurImage], shelf: Shelf) -> list[Listed]:
    """Every name that Swerve manages, least recently used first."""
    entries = shelf.entries()
    return [_ours(name, image, entries.get(name)) for image in ours for name in image.names or (image.id,)]


def list_named(names: Sequence[str], ours: Sequence[OurImage], api: ImageApi, shelf: Shelf) -> list[Listed]:
    """Each of `names` in order, whether Swerve manages it or not."""
    by_name = {name: image for image in ours for name in image.names}
    entries, uses, used_ids = shelf.entries(), shelf.uses(), api.used_ids()

    def listed(name: str) -> Listed:
        if name in by_name:
            return _ours(name, by_name[name], entries.get(name))
        found = api.find(name)
        if found is None:
            return Listed(name, present=False, last_used_at=uses.get(name, 0.0))
        digest = next((digest.partition("@")[2] for digest in found.digests), "")
        used = found.id in used_ids
        return Listed(name, True, False, used, found.size_bytes, digest, uses.get(name, 0.0))

    return [listed(name) for name in names]


def _ours(name: str, image: OurImage, entry: Entry | None) -> Listed:
    digest = entry.digest if entry else ""
    return Listed(name, True, True, image.in_use, image.size_bytes, digest, image.used_at)


def table(rows: Sequence[Listed], ours: Sequence[OurImage]) -> Iterator[str]:
    """Lines to print, a summary at the end."""
    for row in rows:
        state = ("ours" if row.managed else "there") if row.present else "missing"
        size = show_bytes(row.size_bytes) if row.present else ""
        used = f"used {_age(time.time() - row.last_used_at)} ago" if row.last_used_at else "never used"
        digest = row.digest.removeprefix("sha256:")[:12]
        yield f"{state:<8}{size:>9}  {digest:<12}  {used:<14}  {'in use' if row.in_use else '':<6}  {row.image}"
    num_missing = sum(not row.present for row in rows)
    yield f"{len(rows)} images, {num_missing} missing; all of Swerve's take {show_bytes(taken_bytes(ours))}"


def _age(seconds: float) -> str:
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"
