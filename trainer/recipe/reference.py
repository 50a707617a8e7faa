"""The reference of every key of a recipe, docs/recipe.md, made of the structs: types, defaults, and comments as meanings.

The meaning of a key is the comment behind its field, or the comment lines above it.
"""

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from trainer.recipe.loading import toml_value
from trainer.recipe.schema import Recipe

UNITS = {
    "history_steps": "turns",
    "_gib_per_s": "GiB per second",
    "_gib": "GiB",
    "_s": "s",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_versions": "versions",
    "_steps": "optimizer steps",
    "_chars": "characters",
    "episodes": "episodes",
}

INTRODUCTION = """\
# Every key of a recipe

A recipe is one TOML file that describes a run: `python -m trainer.run RECIPE.toml`. Unknown keys are refused, with their path.
`--set table.key=value` overrides a key for one run, and `--dry-run` prints the recipe with every default and checks all that it
names. Ready recipes, and a template for tasks of your own, are in [trainer/recipes](../trainer/recipes).

A key without a default must be given. A default of *none* means that the key is left out. This page is made by
`python -m trainer.recipe --reference > docs/recipe.md` from the comments in the code.
"""

_REQUIRED = object()


def reference() -> str:
    """The whole page."""
    return INTRODUCTION + "".join(_sections(Recipe, "", _REQUIRED))


def meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What the comments say about each field of `kind`, inherited ones included."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            found |= {name: text for name, text in _own_meanings(base) if text}
    return found


def _sections(
    kind: type[msgspec.Struct], path: str, default: object, introduction: str = ""
) -> Iterator[str]:
    """The section of a table, then those of the tables in it."""
    yield f"\n## {f'`[{path}]`' if path else 'At the top'}\n\n{introduction or inspect.getdoc(kind)}\n\n"
    yield "| key | type | default | unit | meaning |\n|---|---|---|---|---|\n"
    texts, inner_sections = meanings(kind), list[str]()
    for field in msgspec.structs.fields(kind):
        given = _default(field) if default is _REQUIRED else getattr(default, field.name)
        text = texts.get(field.name, "")
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            inner_sections += _sections(field.type, f"{path}.{field.name}".lstrip("."), given, text)
        else:
            cells = (
                f"`{field.name}`",
                _type_words(field.type),
                _default_words(given),
                _unit(field.name),
                text,
            )
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    yield from inner_sections


def _own_meanings(kind: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    source = textwrap.dedent(inspect.getsource(kind))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first, last = node.lineno, node.end_lineno or node.lineno
            above = first - 1
            while lines[above - 1].lstrip().startswith("#"):
                above -= 1
            numbers = [*range(above + 1, first), *range(first, last + 1)]
            text = " ".join(comments[number] for number in numbers if number in comments)
            yield node.target.id, text[:1].upper() + text[1:]


def _default(field: FieldInfo) -> object:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return _REQUIRED if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _default_words(default: object) -> str:
    if default is _REQUIRED:
        return ""
    return "*none*" if default is None else f"`{toml_value(default)}`"


def _unit(name: str) -> str:
    return next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), "")


def _type_words(kind: Any) -> str:
    arguments = get_args(kind)
    match get_origin(kind):
        case origin if origin is Literal:
            return ", ".join(f"`{toml_value(one)}`" for one in arguments)
        case origin if origin is Annotated:
            return _type_words(arguments[0])
        case origin if origin in (Union, UnionType):
            return " or ".join(_type_words(one) for one in arguments if one is not NoneType)
        case origin if origin is dict:
            return "table"
        case origin if origin is tuple:
            items = [one for one in arguments if one is not Ellipsis]
            how_many = "list of" if Ellipsis in arguments else f"list of {len(items)}"
            return f"{how_many} {_type_words(items[0])}s"
    return {int: "integer", float: "number", str: "string", bool: "boolean"}[kind]
