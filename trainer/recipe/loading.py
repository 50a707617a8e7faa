"""Reads a recipe from its TOML file, with overrides on top, and writes it again.

Unknown keys are refused. The resolved copy in the run's directory loads again to an equal recipe.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import asdict, replace

from trainer.recipe.checks import check
from trainer.recipe.schema import Recipe


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The checked recipe in `path` with `a.b=c` overrides applied. Raises ValueError naming the key, and
    the fix where there is one.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; give the path of a recipe, as in trainer/recipes/demo.toml"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        _graft(tree, override)
    try:
        recipe = msgspec.convert(tree, Recipe)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from error
    check(recipe)
    return _with_absolute_paths(recipe, path.resolve().parent)


def to_toml(recipe: Recipe) -> str:
    """The recipe with every default spelled out; loads again to an equal one."""
    return "\n".join(_toml_lines(_all_fields(recipe), "")) + "\n"


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Keys on which two recipes differ, as `learner.lr: 1e-06 -> 2e-06`."""
    before, after = dict(_leaves(_all_fields(old), "")), dict(_leaves(_all_fields(new), ""))
    names = sorted(before.keys() | after.keys())
    return [f"{k}: {before.get(k)} -> {after.get(k)}" for k in names if before.get(k) != after.get(k)]


def _graft(tree: dict[str, Any], override: str) -> None:
    """Set one `a.b=c` in the tree; c is a TOML value if it parses as one, else a string."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ValueError(f"--set {override!r}: write it as table.key=value, as in learner.lr=2e-6")
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ValueError(f"--set {override!r}: `{name}` is a value, not a table")
    try:
        tree[names[-1]] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        tree[names[-1]] = text


def _with_absolute_paths(recipe: Recipe, directory: Path) -> Recipe:
    def absolute(text: str) -> str:
        return str((directory / text).resolve()) if text else ""

    tasks = replace(
        recipe.tasks,
        train=absolute(recipe.tasks.train),
        heldout=absolute(recipe.tasks.heldout),
        heldout_sets={name: absolute(path) for name, path in recipe.tasks.heldout_sets.items()},
    )
    agent = tuple(spec if "=" in spec else absolute(spec) for spec in recipe.rollout.agent_specs)
    rollout = replace(recipe.rollout, agent=agent[0] if len(agent) == 1 else agent)
    chat = replace(recipe.chat, template=absolute(recipe.chat.template))
    loss = replace(recipe.learner.loss, objective=absolute(recipe.learner.loss.objective))
    judge = replace(
        recipe.judge,
        templates=absolute(recipe.judge.templates),
        tokenizer=absolute(recipe.judge.tokenizer),
    )
    return replace(
        recipe,
        model=absolute(recipe.model),
        tasks=tasks,
        rollout=rollout,
        chat=chat,
        learner=replace(recipe.learner, loss=loss),
        judge=judge,
    )


def _all_fields(part: msgspec.Struct) -> dict[str, Any]:
    """Also the fields that a message would omit for having their default."""
    return {
        name: _all_fields(value) if isinstance(value, msgspec.Struct) else value
        for name, value in asdict(part).items()
    }


def _toml_lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, dict) and value is not None:
            yield f"{key} = {toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield f"\n[{prefix}{key}]"
            yield from _toml_lines(cast(dict[str, Any], value), f"{prefix}{key}.")


def toml_value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return msgspec.json.encode(value).decode()  # a JSON string is a TOML basic string
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in cast(Sequence[Any], value)) + "]"
        case _:
            return repr(value)


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(cast(dict[str, Any], value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
