"""Small changes of Python code that make it wrong: of its comparisons, connectives and literals, and without one of its statements.

Texts for people are left alone, because no test has to read them: docstrings, and what is raised, logged or warned.
"""

import ast
import bisect
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, cast

from workers.grading.controls.spans import TestFile, read

Mutated = Literal["line", "literal", "comparison"]

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_CONNECTIVES: dict[type[ast.boolop], tuple[str, str]] = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
_LOGS = {"log", "logger", "logging", "warnings"}


@dataclass(frozen=True, slots=True)
class Mutation:
    """On these lines, the bytes from `start` to `end` become `becomes`; `what` says so in a few words."""

    kind: Mutated
    lines: range
    start: int
    end: int
    becomes: bytes
    what: str


def mutations(source: bytes, changed: Collection[int], new: Collection[int]) -> list[Mutation]:
    """Mutations of what stands on lines alone that a fix `changed`, and without statements whose lines are all `new`. Lines count
    from 1. None if it is not Python as we parse it.
    """
    file = read(source)
    if file is None:
        return []
    return [
        mutation
        for node in _code(file.tree)
        for mutation in _of_node(file, node)
        if all(line in (new if mutation.kind == "line" else changed) for line in mutation.lines)
    ]


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but texts for people, and the parts of f-strings, which Python 3.11 places wrongly."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        match child:
            case ast.Expr(value=ast.Constant()) | ast.JoinedStr() | ast.Raise():
                continue
            case ast.Expr() if tells_people(child):
                continue
            case _:
                yield from _code(child)


def tells_people(statement: ast.stmt) -> bool:
    """Whether the statement does nothing but log or warn."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name)))):
            return name.lower().strip("_") in _LOGS
        case _:
            return False


def _of_node(file: TestFile, node: ast.AST) -> Iterator[Mutation]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for op, before, after in zip(ops, [left, *comparators], comparators, strict=False):
                yield from _between(file, before, after, *_COMPARISONS[type(op)])
        case ast.BoolOp(op=op, values=values):
            for before, after in itertools.pairwise(values):
                yield from _between(file, before, after, *_CONNECTIVES[type(op)])
        case ast.Constant() if file.is_placed(node):
            yield from _of_literal(file, node)
        case ast.Module() | ast.stmt() | ast.ExceptHandler() | ast.match_case():
            for body in bodies(node):
                yield from _without_one(file, body)
        case _:
            pass


def bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks of statements in a node, such as the two of an `if`."""
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list) and body:
            yield cast(list[ast.stmt], body)


def _without_one(file: TestFile, body: list[ast.stmt]) -> Iterator[Mutation]:
    """The body without one of its statements, each of which has its lines to itself."""
    for statement in body:
        decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
        first, last = min([statement.lineno, *(one.lineno for one in decorators)]), statement.end_lineno or 0
        start = file.line_starts[first - 1]
        end = file.line_starts[last] if last < len(file.line_starts) else len(file.source)
        before = file.source[start : start + statement.col_offset]
        after = file.source[file.line_starts[last - 1] + (statement.end_col_offset or 0) : end]
        if before.strip() or after.partition(b"#")[0].strip():
            continue
        if tells_people(statement):
            continue
        becomes = b"" if len(body) > 1 else before + b"pass\n"
        count = "line" if last == first else f"{last - first + 1} lines"
        yield Mutation(
            "line", range(first, last + 1), start, end, becomes, f"{count} left out: {_first(file, start)}"
        )


def _first(file: TestFile, start: int) -> str:
    return file.source[start:].split(b"\n", 1)[0].decode("utf-8", "replace").strip()


def _between(file: TestFile, before: ast.expr, after: ast.expr, was: str, becomes: str) -> Iterator[Mutation]:
    """The operator between two operands, where nothing but it, blanks and brackets stands there."""
    start, end = file.end(before), file.start(after)
    between = file.source[start:end]
    if " ".join(between.decode("utf-8", "replace").strip("() \t\r\n\\").split()) == was:
        first = start + between.index(was.split()[0].encode())
        last = start + between.rindex(was.split()[-1].encode()) + len(was.split()[-1])
        lines = range(_line_of(file, first), _line_of(file, last) + 1)
        yield Mutation("comparison", lines, first, last, becomes.encode(), f"{was} becomes {becomes}")


def _of_literal(file: TestFile, node: ast.Constant) -> Iterator[Mutation]:
    start, end, text = file.start(node), file.end(node), file.text(node)
    for becomes in _other_literals(node.value, text):
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        yield Mutation("literal", lines, start, end, becomes.encode(), f"{text} becomes {becomes}")


def _other_literals(value: object, text: str) -> list[str]:
    match value:
        case bool():
            return [str(not value)]
        case int() | float():
            return [repr(value + 1), *([repr(value - 1)] if value else [])]
        case str() | bytes() if text[-1:] in "'\"" and text.count(text[-1]) in (2, 6):
            quotes = text[-3:] if text.count(text[-1]) == 6 else text[-1]
            return [f"{text[: -len(quotes)]}x{quotes}"]
        case _:
            return []


def _line_of(file: TestFile, offset: int) -> int:
    return bisect.bisect_right(file.line_starts, offset)
