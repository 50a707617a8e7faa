"""Rows of a journal that say only what a test is about; what a row must have besides is empty or 0."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from pipeline.journal.rows import FILES, Row

S = TypeVar("S", bound=msgspec.Struct)


def made(kind: type[S], /, **given: Any) -> S:
    """A row, or a part of one, with the given fields."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return msgspec.convert(
        {field.name: _empty(field.type) for field in info.fields if field.required} | given, kind
    )


def write(run_dir: Path, *rows: Row) -> None:
    """Append rows to the journal of a run, as its trainer does."""
    (run_dir / "journal").mkdir(exist_ok=True, parents=True)
    for row in rows:
        with (run_dir / "journal" / FILES[type(row)]).open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")


def _empty(info: inspect.Type) -> Any:
    match info:
        case inspect.Metadata():
            return _empty(info.type)
        case inspect.StrType():
            return ""
        case inspect.BoolType():
            return False
        case inspect.IntType():
            return 0
        case inspect.FloatType():
            return 0.0
        case inspect.LiteralType():
            return info.values[0]
        case inspect.UnionType():
            return None
        case inspect.VarTupleType():
            return ()
        case inspect.DictType():
            return {}
        case _:
            raise AssertionError(f"nothing is empty of {info}")
