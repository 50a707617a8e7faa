"""Rows of a published dataset in any of its formats: JSON Lines, JSON, parquet, or a directory that the `datasets` package has
saved. Nothing is downloaded, and `datasets` is not needed.

A row is named by its file and number, from 1. A line that is no JSON object becomes a row that raises when it is used, so
that one import can report all of them. Of a row wrapped for a trainer, with a column `instance` or with `metadata` that has
one, each an object or its text, the instance is read. pyarrow is imported for parquet and saved datasets only.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainer.tasksets.fields import Fields

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
_SHARD = re.compile(r"-\d+-of-\d+$")
_SHARD_SUFFIXES = (".jsonl", ".parquet")
_HAS_INSTANCE = re.compile(r"""["']instance["']\s*:""")  # metadata may also be any text


def read_rows(path: Path, split: str | None = None) -> list[Fields]:
    """The rows in order; of the one split there is, if `split` is None.

    A split is a shard's name up to "-00000-of-00001", a key of a JSON object, what a saved dataset says it is, or the
    column `split`. Raises ValueError naming file and reason if there is no such split, several to choose from, or
    nothing readable.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such file or directory")
    rows = _directory(path, split) if path.is_dir() else _file(path, split)
    if not rows:
        raise ValueError(f"{path}: no rows in it")
    return [_unwrapped(row) for row in rows]


def _unwrapped(row: Fields) -> Fields:
    try:
        instance = _metadata(row).get("instance") or row.values.get("instance")
        return Fields(row.where, row.having(instance=instance).mapping("instance")) if instance else row
    except ValueError as error:
        return row.broken_by(error)


def _metadata(row: Fields) -> dict[str, Any]:
    """What holds an instance, if `metadata` does; else nothing, for then it is no wrapping and may be anything."""
    metadata = row.values.get("metadata")
    if isinstance(metadata, str) and _HAS_INSTANCE.search(metadata):
        return row.mapping("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _file(path: Path, split: str | None) -> list[Fields]:
    match path.suffix:
        case ".jsonl":
            return _of_split(path, _lines(path), split)
        case ".json":
            return _json(path, split)
        case ".parquet":
            return _of_split(path, _table(path, _read_parquet), split)
        case ".arrow":
            return _of_split(path, _table(path, _read_stream), split)
        case _:
            raise ValueError(f"{path}: must end in one of {', '.join(SUFFIXES)}, or be a directory")


def _of_split(path: Path, rows: list[Fields], split: str | None) -> list[Fields]:
    """Those that the column `split` puts there; rows that cannot be read are everywhere."""
    if split is None:
        return rows
    _choose(path, _columns(rows), split)
    return [row for row in rows if row.broken or row.values.get("split") == split]


def _columns(rows: list[Fields]) -> list[str]:
    """The splits that the column `split` names."""
    return sorted({row.values["split"] for row in rows if isinstance(row.values.get("split"), str)})


def _choose(path: Path, splits: Iterable[str], split: str | None) -> str:
    """The split asked for, or the only one."""
    names = list(splits)
    if split is None and len(names) == 1:
        return names[0]
    if split not in names:
        known = f"choose one of {', '.join(names)}" if names else "there are no splits in it; leave it out"
        raise ValueError(f"{path}: --split {split or 'is missing'}: {known}")
    assert split is not None
    return split


def _lines(path: Path) -> list[Fields]:
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if content.lstrip().startswith(b"["):
        raise ValueError(f"{path}: a JSON list and not a record a line; call it .json")
    lines = enumerate(content.split(b"\n"), 1)
    return [_line(f"{path}:{number}", line) for number, line in lines if line.strip()]


def _line(where: str, line: bytes) -> Fields:
    try:
        return _record(where, json.loads(line.decode()))
    except ValueError as error:
        return Fields(where, {}, broken=f"not JSON: {error}")


def _record(where: str, value: object) -> Fields:
    if isinstance(value, dict):
        return Fields(where, value)
    return Fields(where, {}, broken=f"must be a JSON object, is {type(value).__name__}")


def _json(path: Path, split: str | None) -> list[Fields]:
    """A list of rows, an object of such lists by split, or what a datasets server answers."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error} (one record a line is called .jsonl)") from error
    if isinstance(value, dict) and _is_answer(value.get("rows")):
        return _of_split(path, _numbered(f"{path}:", [row["row"] for row in value["rows"]]), split)
    if isinstance(value, dict) and value and all(isinstance(rows, list) for rows in value.values()):
        chosen = _choose(path, value, split)
        return _numbered(f"{path}: {chosen}", value[chosen])
    if isinstance(value, list):
        return _of_split(path, _numbered(f"{path}:", value), split)
    raise ValueError(f"{path}: must be a list of rows, or an object of such lists by split")


def _is_answer(rows: object) -> bool:
    return isinstance(rows, list) and all(isinstance(row, dict) and "row" in row for row in rows)


def _numbered(where: str, rows: Iterable[object]) -> list[Fields]:
    return [_record(f"{where} row {number}", row) for number, row in enumerate(rows, 1)]


def _directory(path: Path, split: str | None) -> list[Fields]:
    """A saved dataset, a dictionary of such, or a folder of shards."""
    if (path / "dataset_dict.json").exists():
        splits = _object(path / "dataset_dict.json").get("splits", [])
        return _saved(path / _choose(path, splits, split))
    if (path / "state.json").exists():
        return _saved_alone(path, split)
    folder = path if _shards(path) else path / "data"
    shards = _shards(folder)
    if not shards:
        raise ValueError(
            f"{path}: neither a saved dataset nor a folder of {' or '.join(_SHARD_SUFFIXES)} files"
        )
    return [row for shard in shards[_choose(path, shards, split)] for row in _file(shard, None)]


def _saved_alone(path: Path, split: str | None) -> list[Fields]:
    """A saved dataset outside of a dictionary: of one split, by its own account, unless its rows say more."""
    rows, own = _saved(path), _object(path / "state.json").get("_split")
    columns = _columns(rows)
    if split is None or split in columns or not isinstance(own, str):
        return _of_split(path, rows, split)
    _choose(path, dict.fromkeys((own, *columns)), split)
    return rows


def _shards(folder: Path) -> dict[str, list[Path]]:
    """Files by split, in order."""
    shards: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*")):
        if file.suffix in _SHARD_SUFFIXES and file.is_file():
            shards.setdefault(_SHARD.sub("", file.stem), []).append(file)
    return shards


def _saved(directory: Path) -> list[Fields]:
    state = _object(directory / "state.json")
    try:
        files = [directory / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory / 'state.json'}: _data_files: must name the .arrow files") from error
    return [row for file in files for row in _table(file, _read_stream)]


def _object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not a JSON file: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: must be a JSON object")
    return value


def _table(path: Path, read: Callable[[Path], list[Any]]) -> list[Fields]:
    """What pyarrow reads; the one place where its errors become ours."""
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(f"{path}: reading it needs pyarrow: pip install pyarrow") from error
    try:
        return _numbered(f"{path}:", read(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a {path.suffix} file: {error}") from error


def _read_parquet(path: Path) -> list[Any]:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path).read().to_pylist()


def _read_stream(path: Path) -> list[Any]:
    import pyarrow.ipc

    with pyarrow.OSFile(str(path)) as file:
        return pyarrow.ipc.open_stream(file).read_all().to_pylist()
