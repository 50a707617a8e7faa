"""The meanings, types and values of a recipe in words, and msgspec's errors about a recipe as sentences with the key and the fix."""

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import msgspec

# Limits from this value on only keep arithmetic from overflowing. They are shown only to a user who exceeds them.
_TECHNICAL = 1e6
_VALUE_CHARS = 200
_BASES: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", Any: "value"}


def toml_value(value: Any) -> str:
    """The value in a recipe's notation."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return msgspec.json.encode(value).decode()  # a JSON string is a TOML basic string
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in cast(Sequence[Any], value)) + "]"
        case dict():
            table = cast(dict[str, Any], value)
            return "{" + ", ".join(f"{name} = {toml_value(item)}" for name, item in table.items()) + "}"
        case _:
            return repr(value)


def type_words(
    kind: Any, *, quote: str = "", limits: msgspec.Meta | None = None, is_list: bool = False
) -> str:
    """The allowed values of the type, as in "integer of 1 or more"; each choice between two `quote`s."""
    arguments = get_args(kind)
    match get_origin(kind):
        case origin if origin is Literal:
            return ", ".join(f"{quote}{toml_value(one)}{quote}" for one in arguments)
        case origin if origin is Annotated:
            return type_words(arguments[0], quote=quote, limits=arguments[1], is_list=is_list)
        case origin if origin in (Union, UnionType):
            return " or ".join(type_words(one, quote=quote) for one in arguments if one is not NoneType)
        case origin if origin is dict:
            return "table"
        case origin if origin is tuple:
            items = [one for one in arguments if one is not Ellipsis]
            how_many = "list of" if Ellipsis in arguments else f"list of {len(items)}"
            return f"{how_many} {type_words(items[0], quote=quote, is_list=True)}"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "table"
    return f"{_BASES[kind]}{'s' if is_list else ''}{_limit_words(limits)}"


def meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The comments about each field of `kind`, including inherited ones: those in the lines above it, and the one after it."""
    found: dict[str, str] = {}
    for base in reversed(
        [one for one in kind.__mro__ if issubclass(one, msgspec.Struct) and one.__annotations__]
    ):
        comments: list[str] = []
        for line in inspect.getsource(base).splitlines():
            code, _, comment = line.strip().partition("# ")
            comments += [comment] if comment else []
            field = re.match(r"(\w+): ", code)
            if field and field[1] in base.__annotations__:
                text = " ".join(comments)
                found |= {field[1]: f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."} if text else {}
            if code:
                comments = []
    return found


def refusal(error: msgspec.ValidationError, tree: Mapping[str, Any], kind: type[msgspec.Struct]) -> str:
    """The fault of `tree`, which should be a `kind`, as a sentence that begins with the full key."""
    text, _, place = str(error).partition(" - at `$")
    if isinstance(error.__cause__, ValueError):
        return text  # the text of the table's own check, which names its keys
    path = re.findall(r"[^.\[\]`]+", place.replace("[...]", ""))
    if found := re.fullmatch(r"Object contains unknown field `(.*)`", text):
        return _unknown(kind, [one for one in path if not one.isdigit()], found[1])
    if found := re.fullmatch(r"Object missing required field `(.*)`", text):
        path.append(found[1])
        return f"{'.'.join(path)} is missing; it must be {_article(_type_at(kind, path))}"
    key = ".".join(one for one in path if not one.isdigit())
    value, wanted = _value_at(tree, path), _type_at(kind, path)
    if value is None or wanted is None:
        return f"{key}: {text}"
    said = toml_value(value)
    said = said if len(said) <= _VALUE_CHARS else f"{said[:_VALUE_CHARS]}…"
    limit = re.fullmatch(r"Expected `\w+` <= (\S+)", text)
    if limit and float(limit[1]) > _TECHNICAL:
        return f"{key} is {said}; it must be {float(limit[1]):g} at most"
    return f"{key} is {said}; it must be {_article(wanted)}"


def explanation(fault: str, kind: type[msgspec.Struct]) -> str:
    """The first sentence of the meaning of the key whose value a `refusal` refuses, to be appended to it; empty if there is none."""
    found = re.match(r"([\w.]+)\.(\w+) is .*; it must be ", f".{fault}", re.DOTALL)
    table = table_of(_type_at(kind, [one for one in found[1].split(".") if one])) if found else None
    if found is None or table is None:
        return ""
    text = meanings(table).get(found[2], "").replace("`", "")
    return f". {found[2]}: {re.split(r'[.:;] ', text)[0].rstrip('.')}" if text else ""


def keys(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a table and of the tables in it, with its full name and its type; tables before their keys."""
    for field in msgspec.structs.fields(kind):
        key = f"{prefix}{field.name}"
        yield key, field.type
        if table := table_of(field.type):
            yield from keys(table, f"{key}.")


def table_of(kind: Any) -> type[msgspec.Struct] | None:
    """The type of the table that a key of this type has as its value, alone or in a list; None for other values."""
    kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def _limit_words(limits: msgspec.Meta | None) -> str:
    if limits is None or limits.pattern is not None:
        return ""
    if limits.min_length is not None:
        return " that are not empty"
    most = None if limits.le is None or limits.le > _TECHNICAL else limits.le
    if limits.ge is not None and most is not None:
        return f" from {_number(limits.ge)} to {_number(most)}"
    least = [f" above {_number(limits.gt)}"] if limits.gt is not None else []
    least += [f" of {_number(limits.ge)} or more"] if limits.ge is not None else []
    highest = [f"below {_number(limits.lt)}"] if limits.lt is not None else []
    highest += [f"{_number(most)} at most"] if most is not None else []
    return " and ".join(least + highest)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _article(kind: Any) -> str:
    """The words for a type in the middle of a sentence."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_article(one) for one in get_args(kind) if one is not NoneType)
    if get_origin(kind) is Annotated and get_args(kind)[1].description:
        return get_args(kind)[1].description
    words = type_words(kind)
    if get_origin(kind) is Literal:
        return " or ".join(words.rsplit(", ", 1)) if len(get_args(kind)) <= 2 else f"one of {words}"
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _unknown(kind: type[msgspec.Struct], tables: Sequence[str], name: str) -> str:
    """The error about an unknown key, with the most similar known one, or with the keys of its table."""
    table = ".".join(tables)
    all_keys = [key for key, _ in keys(kind)]
    here = {key.rpartition(".")[2]: key for key in all_keys if key.rpartition(".")[0] == table}
    whole = f"{table}.{name}" if table else name
    near = [here[one] for one in difflib.get_close_matches(name, here, n=1)]
    near = near or [key for key in all_keys if key.rpartition(".")[2] == name]
    near = near or difflib.get_close_matches(whole, all_keys, n=1, cutoff=0.8)
    if near:
        return f"{whole} is not a key of a recipe; did you mean {near[0]}?"
    return f"{whole} is not a key of a recipe; {f'{table} has' if table else 'there are'} {', '.join(here)}"


def _type_at(kind: Any, path: Sequence[str]) -> Any:
    """The type of the value at the end of `path`; None if the path does not exist."""
    for place, name in enumerate(path):
        if table := table_of(kind):
            if not name.isdigit():  # a number is a place in a list of tables
                kind = {field.name: field.type for field in msgspec.structs.fields(table)}.get(name)
        else:
            return kind if all(rest.isdigit() for rest in path[place:]) else None
    return kind


def _value_at(tree: Any, path: Sequence[str]) -> Any:
    """The value at the end of `path`, the whole list for one of its items; None if the path does not exist."""
    for name in path:
        if isinstance(tree, Mapping):
            tree = cast(Mapping[str, Any], tree).get(name)
        elif isinstance(tree, list) and isinstance(tree[int(name)], Mapping):
            tree = tree[int(name)]
    return tree
