"""Chooses which rows of a source are imported: by id, repository and size, and at most so many."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trainer.tasksets.fields import Fields
from trainer.tasksets.importing import Importer


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows must meet every condition that is given; `first` counts those that do. Empty or None means any."""

    only: frozenset[str] = frozenset()  # instance ids, with or without "{source}:"
    repos: tuple[str, ...] = ()  # shell patterns such as django/*; one must match
    max_bytes: int | None = None  # of problem statement, patch and hidden tests together, in UTF-8
    first: int | None = None


def ids_in(text: str) -> frozenset[str]:
    """The ids in "a,b,c", or one per line in the file of "@file". Raises ValueError if there are none."""
    listed = Path(text[1:]).read_text().split("\n") if text.startswith("@") else text.split(",")
    ids = frozenset(one.strip() for one in listed) - {""}
    if not ids:
        raise ValueError(f"--only {text}: no ids in it")
    return ids


def selected(rows: Sequence[Fields], importer: Importer, source: str, selection: Selection) -> list[Fields]:
    """The rows to import, in order. A row that cannot be read is kept, so that the import reports it.

    Raises ValueError for ids that no row has, and if no row is left.
    """
    chosen: list[Fields] = []
    missing = set(selection.only)
    for fields in rows:
        names = _names(fields, importer, source)
        if selection.only and names and not names & selection.only:
            continue
        missing -= names
        if _meets(fields, importer, selection):
            chosen.append(fields)
    if missing:
        raise ValueError(f"--only: no row has the id {', '.join(sorted(missing))}")
    if not chosen[: selection.first]:
        raise ValueError(f"none of {len(rows)} rows is left by {_told(selection)}")
    return chosen[: selection.first]


def _names(fields: Fields, importer: Importer, source: str) -> set[str]:
    """The names by which the row may be chosen; none if its id cannot be read."""
    try:
        name = importer.id_of(fields)
    except ValueError:
        return set()
    return {name, f"{source}:{name}"}


def _meets(fields: Fields, importer: Importer, selection: Selection) -> bool:
    if fields.broken:
        return True
    repo = fields.values.get(importer.repo)
    if isinstance(repo, str) and selection.repos:
        name = repo.lower()
        if not any(fnmatchcase(name, pattern.lower()) for pattern in selection.repos):
            return False
    if selection.max_bytes is None:
        return True
    texts = [fields.values.get(name) for name in importer.size]
    num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts if isinstance(text, str))
    return num_bytes <= selection.max_bytes


def _told(selection: Selection) -> str:
    options = {
        "--only": bool(selection.only),
        "--repo": bool(selection.repos),
        "--max-bytes": selection.max_bytes is not None,
        "--first": selection.first is not None,
    }
    return ", ".join(option for option, given in options.items() if given)
