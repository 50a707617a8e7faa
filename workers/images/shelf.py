"""The record of a Docker host's images: what Swerve put there, when each image was last used, and which ones episodes hold.

It is a small SQLite file per Docker host, shared by every worker and command on this machine. A name is recorded before its pull or build
begins, so that whatever a killed process leaves behind is known to be ours.
"""

import contextlib
import fcntl
import json
import sqlite3
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workers.images.errors import ImageError

WAIT_S = 30.0  # for another process's write
_TABLES = """
CREATE TABLE IF NOT EXISTS images (name TEXT PRIMARY KEY, origin TEXT, id TEXT, digest TEXT, since REAL);
CREATE TABLE IF NOT EXISTS uses (name TEXT PRIMARY KEY, used_at REAL);
CREATE TABLE IF NOT EXISTS holds (name TEXT, holder TEXT, until REAL, PRIMARY KEY (name, holder));
CREATE TABLE IF NOT EXISTS layers (id TEXT PRIMARY KEY, chain TEXT);
"""

Origin = Literal["pulled", "built"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A name that is ours. `id` is the image's when it arrived, "" until then."""

    name: str
    origin: Origin
    id: str
    digest: str  # of the manifest, if the image was pulled and Docker said it
    since: float  # Unix seconds


class Shelf:
    """Names are spelled as `names.Name` prints them. Every method raises ImageError if the file cannot be used."""

    def __init__(self, directory: Path, host_id: str) -> None:
        self.path = directory / f"images-{host_id.replace(':', '').lower()}.sqlite"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ImageError(f"SWERVE_STATE_DIR={directory}: cannot be used: {error}") from error
        with self._database() as database:
            database.executescript(_TABLES)

    def expect(self, name: str, origin: Origin) -> None:
        """Record that we are about to pull or build `name`, which is not there."""
        with self._database() as database:
            database.execute(
                "INSERT OR REPLACE INTO images VALUES (?, ?, '', '', ?)", (name, origin, time.time())
            )

    def arrived(self, name: str, origin: Origin, image_id: str, *, digest: str = "") -> None:
        """Record that it is there. This counts as a use, so that an image pulled ahead is not the first to be evicted."""
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
        """`at` is in Unix seconds, now if absent; an older use than the one known changes nothing."""
        with self._database() as database:
            database.execute(
                "INSERT INTO uses VALUES (?, ?) ON CONFLICT DO UPDATE SET used_at = max(used_at, excluded.used_at)",
                (name, time.time() if at is None else at),
            )

    def uses(self) -> dict[str, float]:
        """Name to the last use, in Unix seconds."""
        with self._database() as database:
            return dict(database.execute("SELECT name, used_at FROM uses"))

    def hold(self, name: str, holder: str, *, until: float) -> None:
        """Protect `name` from eviction until released, at the latest until `until` (Unix seconds), since its holder may be killed."""
        with self._database() as database:
            database.execute("INSERT OR REPLACE INTO holds VALUES (?, ?, ?)", (name, holder, until))
        self.note_used(name)

    def release(self, name: str, holder: str) -> None:
        with self._database() as database:
            database.execute("DELETE FROM holds WHERE name = ? AND holder = ?", (name, holder))
        self.note_used(name)

    def held(self) -> set[str]:
        """Names that somebody holds now."""
        with self._database() as database:
            database.execute("DELETE FROM holds WHERE until < ?", (time.time(),))
            return {row[0] for row in database.execute("SELECT DISTINCT name FROM holds")}

    def chains(self) -> dict[str, list[tuple[str, int]]]:
        """Image id to its layers, as `remember_chains` was given them."""
        with self._database() as database:
            rows = database.execute("SELECT id, chain FROM layers")
            return {row[0]: [(layer, size) for layer, size in json.loads(row[1])] for row in rows}

    def remember_chains(self, chains: Mapping[str, list[tuple[str, int]]], *, present: set[str]) -> None:
        """Add `chains`, and forget those of images that are no longer `present`."""
        with self._database() as database:
            rows = [(image_id, json.dumps(chain)) for image_id, chain in chains.items()]
            database.executemany("INSERT OR REPLACE INTO layers VALUES (?, ?)", rows)
            known = {row[0] for row in database.execute("SELECT id FROM layers")}
            database.executemany("DELETE FROM layers WHERE id = ?", [(each,) for each in known - present])

    @contextlib.contextmanager
    def alone(self, doing: str, *, wait: bool) -> Generator[bool]:
        """Let one process of this machine at a time be `doing` this. Yields False, without `wait`, if another is."""
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
