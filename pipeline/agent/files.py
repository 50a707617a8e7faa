"""Agent files for a request: they are read, merged as mini-swe-agent merges them, and written as one YAML text. Also their templates.

A `spec` is a path, or `section.key=value` with a JSON value (anything else is text); later ones win, key by key. The Jinja templates of an
agent file, or of a judge's, are compiled in a sandbox, with StrictUndefined as upstream. Unknown names are refused when a template is
compiled.
"""

import contextlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard, cast

import jinja2
import yaml
from jinja2 import meta, nodes
from jinja2.sandbox import SandboxedEnvironment

from pipeline.agent.upstream import Tree, section
from pipeline.errors import RequestError

Names = Mapping[str, object]

_ENVIRONMENT: Final = SandboxedEnvironment(undefined=jinja2.StrictUndefined)
_FAULTS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One template of a file and its key."""

    file: str  # the name of the file in error messages
    key: str
    source: str
    template: jinja2.Template

    def render(self, names: Names) -> str:
        """Returns the text. Raises RequestError naming the key."""
        try:
            return self.template.render(names)
        except _FAULTS as error:
            raise RequestError(f"{self.file}: {self.key}: {error}") from error


def compile_prompt(key: str, source: str, known: frozenset[str], *, file: str = "agent config") -> Prompt:
    """The template, if it uses only known names. A name that it tests with `is defined` may be unknown."""
    try:
        template = _ENVIRONMENT.from_string(source)
        unknown = sorted(_needed(_ENVIRONMENT.parse(source)) - known)
    except jinja2.TemplateError as error:
        raise RequestError(f"{file}: {key}: {error}") from error
    if unknown:
        names = ", ".join(sorted(known))
        raise RequestError(f"{file}: {key}: unknown variable {unknown[0]!r}; known: {names}")
    return Prompt(file, key, source, template)


def names_in(source: str) -> frozenset[str]:
    """The names that a template uses and does not set itself; none if it is not a valid template."""
    try:
        return frozenset(meta.find_undeclared_variables(_ENVIRONMENT.parse(source)))
    except jinja2.TemplateError:
        return frozenset()


def _needed(syntax: nodes.Template) -> set[str]:
    """The names without which it cannot be rendered."""
    tested = {test.node.name for test in syntax.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
    # A variable that only some branch sets counts as declared. Where it is used and missing, rendering fails.
    assigned = {name.name for name in syntax.find_all(nodes.Name) if name.ctx == "store"}
    return meta.find_undeclared_variables(syntax) - tested - assigned


# Keys of `model` and `model.model_kwargs` that may hold secrets. They are left out of what travels.
SECRETS = frozenset(
    {"api_key", "extra_headers", "headers", "azure_ad_token", "aws_secret_access_key", "import_password"}
)


def merged(specs: Sequence[str]) -> dict[str, Any]:
    """All files and values as one tree. Raises ValueError naming the spec that cannot be read."""
    tree: dict[str, Any] = {}
    for spec in specs:
        tree = recursive_merge(tree, _assignment(spec) if "=" in spec else _file(Path(spec)))
    return tree


def recursive_merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Upstream's rule: dicts are merged key by key, everything else of `second` replaces what `first` has."""
    result: dict[str, Any] = dict(first)
    for key, value in second.items():
        before = result.get(key)
        result[key] = recursive_merge(before, value) if _is_dict(before) and _is_dict(value) else value
    return result


def to_text(tree: Mapping[str, Any]) -> str:
    """The tree as YAML that reads again as an equal tree."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)


def parse(text: str) -> dict[str, dict[str, Any]]:
    """The sections of one YAML text. Raises RequestError for a text that is not an agent file."""
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise RequestError(f"agent config is not YAML: {_one_line(error)}") from error
    if not _is_dict(tree):
        raise RequestError("agent config: expected sections such as agent, environment and model")
    sections: dict[str, dict[str, Any]] = {}
    for name, value in tree.items():
        # Upstream takes an empty section for an absent one; only the agent itself may not be empty.
        if not _is_dict(value) and (value is not None or name == "agent"):
            raise RequestError(f"agent config: {name}: expected keys and values, got {value!r}")
        sections[str(name)] = {str(key): inner for key, inner in (value or {}).items()}
    return sections


def without_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` without the keys that may hold a password or a token, at any depth below `model` and `environment`."""

    def clean(value: Any) -> Any:
        if _is_dict(value):
            return {key: clean(inner) for key, inner in value.items() if key not in SECRETS}
        return [clean(inner) for inner in cast(list[Any], value)] if isinstance(value, list) else value

    return {name: clean(value) if name in ("model", "environment") else value for name, value in tree.items()}


def pinned(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with the facts about this machine that its prompts may use, so that all members of a group see one prompt.

    Like upstream's local environment, variables of this process's environment can be used; only those that a template names are stored.
    """
    facts = {name: str(value) for name, value in platform.uname()._asdict().items()}
    for name in sorted(_used_names(tree)):
        if name in os.environ:
            facts.setdefault(name, os.environ[name])
    swerve = tree.get("swerve")
    return {**tree, "swerve": {**(swerve if _is_dict(swerve) else {}), "facts": facts}}


def _used_names(tree: Tree) -> set[str]:
    templates = [
        value
        for name in ("agent", "model")
        if _is_dict(tree.get(name))
        for key, value in section(tree, name).items()
        if isinstance(value, str) and str(key).endswith("_template")
    ]
    return {name for template in templates for name in names_in(template)}


def _file(path: Path) -> Mapping[str, Any]:
    if path.suffix != ".yaml" and not path.exists():
        path = path.with_suffix(".yaml")  # upstream completes a name in the same way
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; give an agent's YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is not YAML: {_one_line(error)}") from error
    if tree is None:
        return {}
    if not _is_dict(tree):
        raise ValueError(f"{path}: expected sections such as agent, environment and model")
    return tree


def _assignment(spec: str) -> dict[str, Any]:
    """`a.b=c` as {"a": {"b": c}}."""
    name, _, said = spec.partition("=")
    keys = name.split(".")
    if not all(keys):
        raise ValueError(f"{spec!r}: an empty key; write it as section.key=value, as in agent.step_limit=50")
    value: Any = said
    with contextlib.suppress(json.JSONDecodeError):  # text that is not JSON stays text
        value = json.loads(said)
    for key in reversed(keys):
        value = {key: value}
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _is_dict(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, so that a prompt is readable."""


def _as_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    if not text.replace("\n", "").isprintable():
        # YAML escapes characters only between quotes; outside, it would take some of them for the end of a line.
        style = '"'
    return cast(Any, dumper).represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _as_text)
