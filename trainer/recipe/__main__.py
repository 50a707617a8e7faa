"""`python -m trainer.recipe --reference`: prints docs/recipe.md, the reference of every key of a recipe.

The page is made of the tables' types: units follow from the keys' names, and meanings are the comments of the fields.
"""

import argparse
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import FieldInfo

from pipeline.commandline import program
from trainer.recipe.imitation import ImitationRecipe
from trainer.recipe.schema import Recipe
from trainer.recipe.wording import meanings, table_of, toml_value, type_words

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
`python -m trainer.recipe --reference > docs/recipe.md` from the comments of the fields in `trainer/recipe/schema.py` and
`trainer/recipe/imitation.py`. The keys of `kind = "rl"` come first, those of `kind = "sft"` are [at the end](#supervised-fine-tuning).
"""

IMITATION = """
# Supervised fine-tuning

A recipe with `kind = "sft"` trains on the rows of files, without tasks, engines, Redis and Docker: [imitation.md](imitation.md). The tables
{names} have the same keys as above, but for those of `[learner.loss]` that are below.
"""

_REQUIRED = object()


def reference() -> str:
    """The whole page."""
    tables = {name: kind for name, kind in _types(Recipe).items() if _is_table(kind)}
    names = [
        f"`[{name}]`" for name, kind in _types(ImitationRecipe).items() if _is_table(kind, tables.get(name))
    ]
    introduction = IMITATION.format(names=f"{', '.join(names[:-1])} and {names[-1]}")
    sections = _sections(ImitationRecipe, "", _REQUIRED, printed=Recipe)
    return "".join((INTRODUCTION, *_sections(Recipe, "", _REQUIRED), introduction, *sections))


def _types(kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    """The types of a table's keys."""
    return {field.name: field.type for field in msgspec.structs.fields(kind)} if kind else {}


def _is_table(kind: Any, of: Any = msgspec.Struct) -> bool:
    return isinstance(kind, type) and isinstance(of, type) and issubclass(kind, of)


def _sections(
    kind: type[msgspec.Struct],
    path: str,
    default: object,
    introduction: str = "",
    *,
    printed: type[msgspec.Struct] | None = None,
) -> Iterator[str]:
    """The section of a table, then those of the tables in it, but for what the section of the table `printed` has already."""
    texts, inner_sections, rows = meanings(kind), list[str](), list[str]()
    others = _types(printed)
    for field in msgspec.structs.fields(kind):
        given = _default(field) if default is _REQUIRED else getattr(default, field.name)
        text, other = texts.get(field.name, ""), others.get(field.name)
        if table := table_of(field.type):
            if table is not other:
                inner = f"{path.strip('[]')}.{field.name}".lstrip(".")
                if table is not field.type:  # a list, whose tables have defaults of their own
                    inner, given = f"[{inner}]", _REQUIRED
                before = other if _is_table(table, other) else None
                inner_sections += _sections(table, inner, given, text, printed=before)
        elif field.type != other or not path:
            cells = (
                f"`{field.name}`",
                type_words(field.type, quote="`"),
                _default_words(given),
                _unit(field.name),
                text,
            )
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    if rows:
        yield f"\n## {f'`[{path}]`' if path else 'At the top'}\n\n{introduction or inspect.getdoc(kind)}\n\n"
        yield "| key | type | default | unit | meaning |\n|---|---|---|---|---|\n"
    yield from rows
    yield from inner_sections


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=program("trainer.recipe"), description=__doc__)
    parser.add_argument(
        "--reference", action="store_true", required=True, help="print the reference as Markdown"
    )
    parser.parse_args(argv)
    print(reference(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
