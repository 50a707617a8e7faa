"""Values every text of which tries to control whatever shows it."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec import inspect

from pipeline.screen import Screen, visible

FORGED = "FORGED"
HOSTILE = (
    f"a\x1b]0;PWN\x07\x9b2J\r\x7f\u202eb\u00ad\u200b\u061c\u3164\U000e0041\x00\t<b onclick=x>[red]\n{FORGED}"
)
# Colours, and what bars need to draw themselves again. No hostile text has this form.
_OURS = re.compile(r"\r?\x1b\[[?;0-9]*[A-Za-z]")
K = TypeVar("K")


class Kept(io.BytesIO):
    """Can be read after the streams that wrote to it are gone."""

    def close(self) -> None: ...


def filled(kind: type[K], /, **given: Any) -> K:
    """A value whose every field says something: texts of any content are hostile, fields added later included."""
    return msgspec.convert(_struct(kind) | given, kind, from_attributes=True)


def _struct(kind: Any) -> Any:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType | inspect.DataclassType)
    if isinstance(info, inspect.StructType) and info.array_like:
        return [_value(field.type) for field in info.fields]
    tag = {info.tag_field: info.tag} if isinstance(info, inspect.StructType) and info.tag_field else {}
    return tag | {field.encode_name: _value(field.type) for field in info.fields}


def _value(info: inspect.Type) -> Any:
    match info:
        case inspect.Metadata():
            return _value(info.type)
        case inspect.StrType() | inspect.AnyType():
            return HOSTILE
        case inspect.BytesType():
            return b""
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 1
        case inspect.FloatType():
            return 1.0
        case inspect.LiteralType():
            return info.values[0]
        case inspect.UnionType():
            return _value(next(one for one in info.types if not isinstance(one, inspect.NoneType)))
        case inspect.StructType() | inspect.DataclassType():
            return _struct(info.cls)
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.CollectionType():
            return [_value(info.item_type)]
        case inspect.TupleType():
            return [_value(one) for one in info.item_types]
        case inspect.DictType():
            return {_value(info.key_type): _value(info.value_type)}
        case _:
            raise AssertionError(f"no example of {info}")


def shown(written: bytes) -> str:
    """What a screen passed on, without our colours. Fails if anything else in it would control a terminal, or looks like a line of ours."""
    text = _OURS.sub("", written.decode())
    assert visible(text) == text
    assert not [line for line in text.splitlines() if line.startswith(FORGED)]
    return text


@contextlib.contextmanager
def screens(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.BytesIO]:
    """The standard streams as a command has them; what reaches the terminal."""
    terminal = Kept()
    with monkeypatch.context() as during:
        for name in ("stdout", "stderr"):
            during.setattr(
                sys, name, Screen(io.TextIOWrapper(terminal, encoding="utf-8", write_through=True))
            )
        yield terminal
