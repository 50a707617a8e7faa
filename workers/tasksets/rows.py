"""Rows of a published dataset and their fields. The dataset is JSON Lines, JSON, parquet, or a directory that the `datasets` package
has saved. Nothing is downloaded, and `datasets` is not needed.

A row is named by its file and number, from 1. A line that is no JSON object becomes a row that raises when it is used, so that one import
can report all of them. If a row is wrapped for a trainer, with a column `instance` or with `metadata` that has one, each an object or its
text, then the instance is read. pyarrow is imported for parquet and saved datasets only.
"""

import ast
import codecs
import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Fields:
    """One record as it was read; `where` names its file and row in errors.

    A record that could not be read has `broken`, the reason, and no values: reading any field of it raises ValueError with
    that reason.
    """

    where: str
    values: Mapping[str, Any]
    broken: str = ""

    def text(self, name: str) -> str:
        """A string that is not blank. Raises ValueError."""
        value = self.value(name)
        if not isinstance(value, str) or not value.strip():
            raise self.refusal(name, f"must be a non-empty string, is {_shown(value)}")
        return self._encodable(name, value)

    def script(self, name: str) -> str:
        """A shell script. Raises ValueError if its own lines end in CRLF; lines of a patch in it may."""
        script = self.text(name)
        if script.lstrip().partition("\n")[0].endswith("\r"):
            why = "its lines end in CRLF, and bash takes the CR for a part of each command; convert it (dos2unix)"
            raise self.refusal(name, why)
        return script

    def optional_text(self, name: str) -> str:
        """A string, or "" if it is absent or null. Raises ValueError."""
        value = self.value(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.refusal(name, f"must be a string, is {_shown(value)}")
        return self._encodable(name, value)

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings, as such or as JSON or Python text; () if it is absent, null or "". Raises ValueError."""
        value = self._parsed(name)
        if value is None:
            return ()
        if isinstance(value, str) or not _has_only_texts(value, Sequence):
            raise self.refusal(name, f"must be a list of strings, is {_shown(value)}")
        return tuple(self._encodable(name, item) for item in value)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object, as such or as JSON or Python text; {} if it is absent, null or "". Raises ValueError."""
        value = self._parsed(name)
        if value is None:
            return {}
        if not _has_only_texts(value, Mapping):
            raise self.refusal(name, f"must be an object with names, is {_shown(value)}")
        return dict(value)

    def value(self, name: str) -> Any:
        """The value, None if it is absent. Raises ValueError for a record that could not be read."""
        if self.broken:
            raise ValueError(f"{self.where}: {self.broken}")
        return self.values.get(name)

    def refusal(self, name: str, why: str) -> ValueError:
        """The error to raise about the field `name`."""
        return ValueError(f"{self.where}: {name}: {why}")

    def having(self, **values: Any) -> "Fields":
        """The same record with `values` added to it."""
        return replace(self, values={**self.values, **values})

    def broken_by(self, error: ValueError) -> "Fields":
        """The same record as one that could not be read because of `error`, whose text may begin with `where`."""
        return Fields(self.where, {}, broken=str(error).removeprefix(f"{self.where}: "))

    def _parsed(self, name: str) -> Any:
        """The value, read as JSON or as a Python literal if it is text; None if it is absent or blank."""
        value = self.value(name)
        if not isinstance(value, str):
            return value
        if not value.strip():
            return None
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as not_json:
            try:
                return ast.literal_eval(value.strip())
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                why = f"neither JSON nor a Python literal: {not_json}, in {_shown(value)}"
                raise self.refusal(name, why) from not_json

    def _encodable(self, name: str, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.refusal(name, f"not text in UTF-8: {error}") from error
        return value


def _has_only_texts(value: Any, kind: type) -> bool:
    """Whether the value is a `kind` whose items or keys are all strings."""
    return isinstance(value, kind) and all(isinstance(one, str) for one in cast(Iterable[object], value))


def _shown(value: object) -> str:
    return "absent" if value is None else repr(value)[:80]


SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
_SHARD = re.compile(r"-\d+-of-\d+$")
_SHARD_SUFFIXES = (".jsonl", ".parquet")
_HAS_INSTANCE = re.compile(r"""["']instance["']\s*:""")  # metadata may also be arbitrary text


def read_rows(path: Path, split: str | None = None) -> list[Fields]:
    """The rows in order; if `split` is None, those of the only split.

    A split is a shard's name up to "-00000-of-00001", a key of a JSON object, the split in a saved dataset, or the column `split`. Raises
    ValueError naming file and reason if there is no such split, several to choose from, or nothing readable.
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
    """The object in `metadata` if that holds an instance; otherwise {}, because then the column may contain anything."""
    metadata = row.values.get("metadata")
    if isinstance(metadata, str) and _HAS_INSTANCE.search(metadata):
        return row.mapping("metadata")
    return cast(dict[str, Any], metadata) if isinstance(metadata, dict) else {}


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
    """Returns the rows whose column `split` has this value; rows that cannot be read belong to every split."""
    if split is None:
        return rows
    _choose(path, _columns(rows), split)
    return [row for row in rows if row.broken or row.values.get("split") == split]


def _columns(rows: list[Fields]) -> list[str]:
    """The splits that the column `split` names."""
    return sorted({row.values["split"] for row in rows if isinstance(row.values.get("split"), str)})


def _choose(path: Path, splits: Iterable[str], split: str | None) -> str:
    """The requested split, or the only one."""
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
    except (ValueError, RecursionError) as error:
        return Fields(where, {}, broken=f"not JSON: {error}")


def _record(where: str, value: object) -> Fields:
    if isinstance(value, dict):
        return Fields(where, cast(dict[str, Any], value))
    return Fields(where, {}, broken=f"must be a JSON object, is {type(value).__name__}")


def _json(path: Path, split: str | None) -> list[Fields]:
    """Reads a list of rows, an object with a list of rows for each split, or the answer of a dataset server."""
    try:
        value: Any = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error} (one record a line is called .jsonl)") from error
    by_name = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    if _is_answer(by_name.get("rows")):
        return _of_split(path, _numbered(f"{path}:", [row["row"] for row in by_name["rows"]]), split)
    if by_name and all(isinstance(rows, list) for rows in by_name.values()):
        chosen = _choose(path, by_name, split)
        return _numbered(f"{path}: {chosen}", by_name[chosen])
    if isinstance(value, list):
        return _of_split(path, _numbered(f"{path}:", cast(list[object], value)), split)
    raise ValueError(f"{path}: must be a list of rows, or an object of such lists by split")


def _is_answer(rows: object) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, dict) and "row" in row for row in cast(list[object], rows)
    )


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
    """Reads a saved dataset that is not in a dictionary. It has the one split that it names, unless its rows name splits."""
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
        value: Any = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not a JSON file: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: must be a JSON object")
    return cast(dict[str, Any], value)


def _table(path: Path, read: Callable[[Path], list[Any]]) -> list[Fields]:
    """Reads rows with pyarrow, and turns its errors into ours."""
    try:
        pyarrow: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        raise ValueError(f"{path}: reading it needs pyarrow: pip install pyarrow") from error
    try:
        return _numbered(f"{path}:", read(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a {path.suffix} file: {error}") from error


def _read_parquet(path: Path) -> list[Any]:
    parquet: Any = importlib.import_module("pyarrow.parquet")
    return parquet.ParquetFile(path).read().to_pylist()


def _read_stream(path: Path) -> list[Any]:
    pyarrow: Any = importlib.import_module("pyarrow")
    with pyarrow.OSFile(str(path)) as file:
        return pyarrow.ipc.open_stream(file).read_all().to_pylist()
