"""The Jinja templates of an agent file or of a judge's: compiled in a sandbox, with StrictUndefined as upstream.

Unknown names are refused when a template is compiled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import SandboxedEnvironment

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
    """One template of a file and the key it stands under."""

    file: str  # what an error calls the file
    key: str
    source: str
    template: jinja2.Template

    def render(self, names: Names) -> str:
        """Raises RequestError naming the key."""
        try:
            return self.template.render(names)
        except _FAULTS as error:
            raise RequestError(f"{self.file}: {self.key}: {error}") from error


def compile_prompt(key: str, source: str, known: frozenset[str], *, file: str = "agent config") -> Prompt:
    """The template, if it uses known names only. One that it tests for with `is defined` may be unknown."""
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
    """The names that a template takes from outside; none if it is no template."""
    try:
        return frozenset(meta.find_undeclared_variables(_ENVIRONMENT.parse(source)))
    except jinja2.TemplateError:
        return frozenset()


def _needed(syntax: nodes.Template) -> set[str]:
    """The names without which it cannot be rendered."""
    tested = {test.node.name for test in syntax.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
    # One that only some branch sets counts as undeclared; missing where it is used, it fails in rendering.
    assigned = {name.name for name in syntax.find_all(nodes.Name) if name.ctx == "store"}
    return meta.find_undeclared_variables(syntax) - tested - assigned
