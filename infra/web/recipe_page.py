"""The settings of a run, and what its processes wrote: the recipe with what differs, the commands that started it, and its logs."""

import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from msgspec import structs

from infra.web.run_journal import JsonRow
from pipeline.journal.reading import LOGS, RECIPE, launches

PIECE_BYTES = 64 * 1024
"""The part of a log that one reply has."""


def recipe_page(directory: Path, other: Path | None) -> JsonRow:
    """The recipe of a run and its launches; with `other`, the directory of another run, the keys on which the two recipes differ."""
    text = _text(directory / RECIPE)
    keys = _keys(text)
    page: JsonRow = {
        "text": text,
        "keys": keys,
        "launches": [structs.asdict(one) for one in launches(directory)],
        "logs": logs(directory),
    }
    if other is not None:
        theirs = _keys(_text(other / RECIPE))
        names = sorted(keys.keys() | theirs.keys())
        page["differences"] = [
            {"key": name, "here": keys.get(name), "there": theirs.get(name)}
            for name in names
            if keys.get(name) != theirs.get(name)
        ]
    return page


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _keys(text: str) -> dict[str, str]:
    """The values of a recipe by their dotted keys; empty if it is not TOML."""
    try:
        return dict(_leaves(tomllib.loads(text), ""))
    except ValueError:
        return {}


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(cast(dict[str, Any], value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def logs(directory: Path) -> list[JsonRow]:
    """The logs of the run's processes, by name."""
    found: list[JsonRow] = []
    try:
        paths = sorted((directory / LOGS).iterdir())
    except OSError:
        return found
    for path in paths:
        file = _open(path)
        if file is not None:
            with open(file, "rb") as opened:
                size = os.fstat(opened.fileno())
            found.append({"name": path.name, "num_bytes": size.st_size, "changed_at": size.st_mtime})
    return found


def log_piece(directory: Path, name: str, before: int | None) -> JsonRow:
    """The last `PIECE_BYTES` of a log that end before an offset, at its end if that is None. Raises LookupError if there is no such log."""
    file = _open(directory / LOGS / name) if name == Path(name).name else None
    if file is None:
        known = ", ".join(one["name"] for one in logs(directory)) or "none"
        raise LookupError(f"this run has no log {name!r}; there are: {known}")
    with open(file, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        end = size if before is None else min(before, size)
        start = max(0, end - PIECE_BYTES)
        opened.seek(start)
        text = opened.read(end - start)
    return {
        "name": name,
        "num_bytes": size,
        "start": start,
        "end": end,
        "text": text.decode(errors="replace"),
    }


def _open(path: Path) -> int | None:
    """A descriptor of the file; None for what is no regular file: a link could lead out of the run's directory, and a pipe would block."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    return None
