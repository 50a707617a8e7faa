"""Contradictions of what a Python test file expects, one edit of one place each.

Whatever code passes the original must fail every edited file: only what a test expects is changed, never what it gives to the
code. Whether a test depends on an edit is tried with the known fix, so too many candidates are better than too few.
"""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass

from workers.grading.controls.checkers import contradict_call, expects_exception
from workers.grading.controls.conditions import contradict, name_of_call, negation
from workers.grading.controls.parameters import expected_parameters
from workers.grading.controls.reaching import blocks, functions_of_tests
from workers.grading.controls.spans import Edit, TestFile, read
from workers.grading.controls.values import Values

_CATCHES_ALL = {"AssertionError", "Exception", "BaseException"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One expectation made wrong: at `offset_bytes` of the file, the text `was` becomes `becomes`."""

    tests: tuple[str, ...]  # whose outcome it may change, named within the file as pytest names them
    offset_bytes: int
    was: str
    becomes: str


def candidates(source: bytes, chance: random.Random) -> list[Candidate]:
    """Contradictions of the expectations in a test file; none if it is not UTF-8 or not Python as we parse it."""
    file = read(source)
    if file is None:
        return []
    values = Values(file, chance)
    found: dict[Edit, set[str]] = {}
    for definition, tests in functions_of_tests(file.tree):
        parameters = expected_parameters(definition, file, values)
        names = {parameter.name for parameter in parameters}
        edits = [
            (root, edit)
            for root, edit in _expectations([definition], file, values)
            if source[edit.start : edit.end].decode() not in names
        ]
        for root, edit in (*edits, *((parameter.cases, parameter.edit) for parameter in parameters)):
            if file.is_placed(root) and file.stays_sound(root, edit):
                found.setdefault(edit, set()).update(tests)
    return [
        Candidate(tuple(sorted(tests)), edit.start, source[edit.start : edit.end].decode(), edit.becomes)
        for edit, tests in sorted(found.items(), key=lambda item: item[0].start)
    ]


def _expectations(body: list[ast.stmt], file: TestFile, values: Values) -> Iterator[tuple[ast.expr, Edit]]:
    """Edits of the expectations in statements, each with the expression that it is an edit of."""
    for statement in body:
        match statement:
            case ast.Assert(test=test):
                yield from ((test, edit) for edit in contradict(test, True, file, values))
                yield from _in_calls(test, file, values)
                continue
            case ast.If(test=test) if _only_fails(statement.body):
                yield test, negation(test, file)
            case ast.Try():
                yield from _handled(statement, file, values)
            case _:
                pass
        for expression in _own_expressions(statement):
            yield from _in_calls(expression, file, values)
        unheard = _unheard(statement)
        for block in blocks(statement):
            if block is not unheard:
                yield from _expectations(block, file, values)


def _in_calls(expression: ast.expr, file: TestFile, values: Values) -> Iterator[tuple[ast.expr, Edit]]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Call):
            yield from ((node, edit) for edit in contradict_call(node, file, values))


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement that are in none of its blocks."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.withitem):
            yield child.context_expr


def _handled(statement: ast.Try, file: TestFile, values: Values) -> Iterator[tuple[ast.expr, Edit]]:
    """An exception that must come, or the test calls `fail`: its handler no longer catches it."""
    if _only_fails(statement.body[-1:]) or _only_fails(statement.orelse):
        for handler in statement.handlers:
            error = None if handler.type is None else values.unrelated_error(handler.type)
            if handler.type is not None and error is not None:
                yield handler.type, file.replace(handler.type, error)


def _only_fails(body: list[ast.stmt]) -> bool:
    """Whether the statements end in the failure of the test."""
    if not body:
        return False
    match body[-1]:
        case ast.Expr(value=ast.Call() as call):
            return name_of_call(call) == "fail"
        case ast.Assert(test=ast.Constant(value=value)):
            return not value
        case ast.Raise(exc=error) if error is not None:
            return (name_of_call(error) or getattr(error, "id", "")) == "AssertionError"
        case _:
            return False


def _unheard(statement: ast.stmt) -> list[ast.stmt] | None:
    """The block of a statement in which a failure would not fail the test, or which is not to be run to its end."""
    match statement:
        case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
            managers = [item.context_expr for item in items]
            if any(expects_exception(one) or name_of_call(one) == "suppress" for one in managers):
                return body
        case ast.Try(handlers=handlers, body=body):
            if any(_catches_all(handler) and not _only_fails(handler.body) for handler in handlers):
                return body
        case _:
            pass
    return None


def _catches_all(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {getattr(node, "id", "") for node in ast.walk(handler.type)}
    return bool(names & _CATCHES_ALL)
