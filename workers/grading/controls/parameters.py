"""Contradictions of what parametrized tests expect: in `("a", "total"), [(1, 2), (3, 4)]` every total becomes another.

The code under test may look a parameter up in the frame that calls it, and return it: under a control it must find what is wrong
there. Each test keeps its name.
"""

import ast
from dataclasses import dataclass

from workers.grading.controls.spans import Edit, TestFile
from workers.grading.controls.values import Values


@dataclass(frozen=True, slots=True)
class Expected:
    """The parameter `name` of a test is compared and nothing else. `edit` changes its value in every case in `cases`."""

    name: str
    cases: ast.expr
    edit: Edit


def expected_parameters(definition: ast.AST, file: TestFile, values: Values) -> list[Expected]:
    """The parameters of a test function that only its assertions use, if all of its cases are written down as plain literals."""
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    compared = _only_compared(definition)
    found: list[Expected] = []
    for decorator in definition.decorator_list:
        match decorator:
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(value=module, attr="mark"), attr="parametrize"),
                args=[names, ast.List() | ast.Tuple() as cases],
                keywords=[],
            ):
                for place, name in enumerate(_split(names)):
                    edit = _changed(module, cases, place, file, values) if name in compared else None
                    if edit is not None:
                        found.append(Expected(name, cases, edit))
            case _:
                pass
    return found


def _only_compared(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names that are an operand of `==` in an assertion wherever the function uses them."""
    uses: list[str] = []
    compared: list[str] = []
    for statement in definition.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                uses.append(node.id)
            match node:
                case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
                    compared += [side.id for side in (left, right) if isinstance(side, ast.Name)]
                case _:
                    pass
    return {name for name in compared if uses.count(name) == compared.count(name)}


def _split(names: ast.expr) -> list[str]:
    match names:
        case ast.Constant(value=str(text)):
            return [name.strip() for name in text.split(",")]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [str(element.value) if isinstance(element, ast.Constant) else "" for element in elements]
        case _:
            return []


def _changed(
    module: ast.expr, cases: ast.List | ast.Tuple, place: int, file: TestFile, values: Values
) -> Edit | None:
    """All cases with another value at `place`, each under the name that it had. None if one is no tuple of plain literals."""
    parts: list[bytes] = []
    names: set[str] = set()
    at = start = file.start(cases)
    for case in cases.elts:
        name = _name(case)
        edit = (
            next(values.other_literals(case.elts[place]), None)
            if isinstance(case, ast.Tuple) and name
            else None
        )
        if edit is None or name is None or name in names or not file.text(case).startswith("("):
            return None
        names.add(name)
        parts += [
            file.source[at : file.start(case)],
            f"{file.text(module)}.param".encode(),
            file.source[file.start(case) : edit.start],
            edit.becomes.encode(),
            file.source[edit.end : file.end(case) - 1].rstrip(b", "),
            f", id={name!r})".encode(),
        ]
        at = file.end(case)
    parts.append(file.source[at : file.end(cases)])
    return Edit(start, file.end(cases), b"".join(parts).decode()) if names else None


def _name(case: ast.expr) -> str | None:
    """The name that pytest gives a case of plain literals; None for others."""
    words: list[str] = []
    for element in case.elts if isinstance(case, ast.Tuple) else ():
        try:
            value = ast.literal_eval(element)
        except ValueError:
            return None
        plain = isinstance(value, str) and value.isascii() and value.isprintable() and "\\" not in value
        if not plain and not isinstance(value, int | float | bool | None):
            return None
        words.append(str(value))
    return "-".join(words) or None
