"""Small changes of Python code that probably make it wrong: a change of an operator, constant, condition, argument, returned value, index
or slice, or the removal of a statement.

Code that no test has to read is not changed: docstrings, text that is raised, logged or warned, messages of assertions, annotations, a
module's version; nor are f-strings, whose parts have wrong positions in Python 3.11. The code alone does not show whether a change
matters: `x < 0` and `x <= 0` are the same if x is never 0.

Tests need not distinguish two texts with the same meaning: `meaning_of` returns the meaning of code as far as a test may notice it.
"""

import ast
import bisect
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from workers.grading.controls.spans import TestFile, read

Mutated = Literal[
    "line", "comparison", "operator", "constant", "condition", "argument", "return", "subscript"
]

_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_CONNECTIVES: dict[type[ast.boolop], tuple[str, str]] = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
_OPERATORS: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-", "*")),
    ast.Sub: ("-", ("+", "*")),
    ast.Mult: ("*", ("+", "/")),
    ast.Div: ("/", ("*", "//")),
    ast.FloorDiv: ("//", ("/", "*")),
    ast.Mod: ("%", ("//", "*")),
    ast.Pow: ("**", ("*", "+")),
    ast.MatMult: ("@", ("*",)),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
    ast.BitAnd: ("&", ("|", "^")),
    ast.BitOr: ("|", ("&", "^")),
    ast.BitXor: ("^", ("|", "&")),
}
_UNARY: dict[type[ast.unaryop], str] = {ast.USub: "-", ast.UAdd: "+", ast.Not: "not", ast.Invert: "~"}
_LOGS = {"log", "logger", "logging", "warnings"}
_SAID_OF_A_MODULE = {"__version__", "__author__", "__copyright__", "__date__", "__email__", "__license__"}
_UNREAD_FIELDS = {"annotation", "returns", "msg"}  # fields of a node that no test reads
_COMMENT = re.compile(rb"#[^\r\n]*")
_IN_ANY_ORDER = {"max", "min"}  # functions whose arguments may be swapped


@dataclass(frozen=True, slots=True)
class Mutation:
    """An edit that replaces the bytes from `start` to `end` by `becomes`.

    It matters on these lines only; `what` describes it in a few words.
    """

    kind: Mutated
    lines: range
    start: int
    end: int
    becomes: bytes
    what: str


def mutations(source: bytes, changed: Collection[int], new: Collection[int]) -> list[Mutation]:
    """Mutations of code that is only on lines that a fix `changed`, and removals of statements whose lines are all `new`. Lines count from
    1. There are none if this interpreter cannot parse the source.
    """
    file = read(source)
    if file is None:
        return []
    return [
        mutation
        for node in _code(file.tree)
        for mutation in itertools.chain(
            _of_operator(file, node),
            _of_condition(file, node),
            _of_value(file, node),
            *(_without_one(file, body) for body in bodies(node)),
        )
        if all(line in (new if mutation.kind == "line" else changed) for line in mutation.lines)
    ]


def bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks of statements in a node, such as the two of an `if`."""
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list) and body:
            yield cast(list[ast.stmt], body)


def tells_people(statement: ast.stmt) -> bool:
    """Whether the statement only logs or warns, or only gives a module's version, author or licence as a text."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str())):
            return name in _SAID_OF_A_MODULE
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name)))):
            return name.lower().strip("_") in _LOGS
        case _:
            return False


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those that are never changed."""
    match node:
        case ast.Expr(value=ast.Constant()) | ast.JoinedStr() | ast.Raise():
            return
        case ast.Expr() | ast.Assign() if tells_people(node):
            return
        case _:
            yield node
    for name, value in ast.iter_fields(node):
        if name not in _UNREAD_FIELDS:
            children = cast(list[object], value) if isinstance(value, list) else [value]
            for child in children:
                if isinstance(child, ast.AST):
                    yield from _code(child)


def _of_operator(file: TestFile, node: ast.AST) -> Iterator[Mutation]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for op, before, after in zip(ops, [left, *comparators], comparators, strict=False):
                yield from _between(file, "comparison", before, after, *_COMPARISONS[type(op)])
        case ast.BoolOp(op=op, values=values):
            was, becomes = _CONNECTIVES[type(op)]
            for before, after in itertools.pairwise(values):
                yield from _between(file, "comparison", before, after, was, (becomes,))
            yield from _without_operands(file, "condition", node, values, was)
        case ast.BinOp(op=op, left=left, right=right):
            was, becomes = _OPERATORS[type(op)]
            if not _is_sequence(left) and not _is_sequence(right):
                yield from _between(file, "operator", left, right, was, becomes)
            yield from _without_operands(file, "operator", node, [left, right], was)
        case ast.AugAssign(op=op, target=target, value=value):
            was, others = _OPERATORS[type(op)]
            becomes = () if _is_sequence(value) else tuple(f"{one}=" for one in others)
            yield from _between(file, "operator", target, value, f"{was}=", (*becomes, "="))
        case ast.UnaryOp(op=op, operand=operand):
            was, start = _UNARY[type(op)], file.start(node)
            becomes = b"-" if was == "+" else b" "
            what = "+ becomes -" if was == "+" else f"{was} left out: {_shown(file, operand)}"
            yield Mutation("operator", _lines(node), start, start + len(was), becomes, what)
        case _:
            pass


def _of_condition(file: TestFile, node: ast.AST) -> Iterator[Mutation]:
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.match_case(guard=ast.expr() as test):
            conditions, forced = [test], ("True", "False")
        case ast.While(test=test):
            conditions, forced = [test], ("False",)  # forced to be true it would only never end
        case ast.comprehension(ifs=conditions):
            forced = ("True", "False")
        case _:
            return
    for condition in conditions:
        for value in forced:
            what = f"condition forced to {value}: {_shown(file, condition)}"
            yield _replaced(file, "condition", condition, value, what)
        match condition:
            case ast.Compare(ops=[_]) | ast.UnaryOp(op=ast.Not()):
                pass  # the operator itself becomes its opposite
            case _:
                what = f"condition negated: {_shown(file, condition)}"
                yield _replaced(file, "condition", condition, f"not ({file.text(condition)})", what)


def _of_value(file: TestFile, node: ast.AST) -> Iterator[Mutation]:
    match node:
        case ast.Constant() if file.is_placed(node):
            text = file.text(node)
            for becomes in _other_constants(node.value, text):
                what = f"{_shown(file, node)} becomes {becomes}"
                yield _replaced(file, "constant", node, becomes, what)
        case ast.Call():
            yield from _of_arguments(file, node)
        case ast.Return(value=ast.expr() as value) | ast.Yield(value=ast.expr() as value):
            yield _replaced(
                file, "return", value, "None", f"None instead of the result: {_shown(file, value)}"
            )
            operand = _operand(value)
            if operand is not None:
                what = f"{_shown(file, operand)} instead of the result: {_shown(file, value)}"
                yield _replaced(file, "return", value, f"({file.text(operand)})", what)
        case ast.Slice(lower=lower, upper=upper, step=step):
            for name, bound in (("start", lower), ("end", upper), ("step", step)):
                if bound is not None:
                    what = f"{name} of the slice left out: {_shown(file, bound)}"
                    yield _replaced(file, "subscript", bound, "", what)
        case ast.Subscript(slice=ast.Name(id=name) as index) if name.islower():
            yield _replaced(file, "subscript", index, f"{name} - 1", f"index {name} becomes {name} - 1")
        case _:
            pass


def _of_arguments(file: TestFile, call: ast.Call) -> Iterator[Mutation]:
    """The call without one of its keyword arguments, or with two neighbours swapped."""
    starts = sorted(_start(file, one) for one in (*call.args, *call.keywords))
    for keyword in call.keywords:
        start = _start(file, keyword)
        # The last argument is removed with the comma after it, because a comma alone between brackets is not valid Python.
        end = next((one for one in starts if one > start), file.end(call) - len(")"))
        what = f"argument left out: {keyword.arg or '**'}={_shown(file, keyword.value)}"
        yield Mutation("argument", _lines(keyword), start, end, b"", what)
    match call.func:
        case ast.Name(id=name) if name in _IN_ANY_ORDER:
            return
        case _:
            pass
    for first, second in itertools.pairwise(call.args):
        if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            start, end = file.start(first), file.end(second)
            between = file.source[file.end(first) : file.start(second)]
            becomes = file.text(second).encode() + between + file.text(first).encode()
            what = f"arguments swapped: {_shown(file, first)}, {_shown(file, second)}"
            yield Mutation("argument", range(first.lineno, _lines(second).stop), start, end, becomes, what)


def _operand(value: ast.expr) -> ast.expr | None:
    """The operand of a call: its first argument, or the object whose method is called without arguments."""
    match value:
        case ast.Call(args=[ast.Starred(), *_]):
            return None
        case ast.Call(args=[first, *_]):
            return first
        case ast.Call(func=ast.Attribute(value=of), args=[], keywords=[]):
            return of
        case _:
            return None


def _is_sequence(node: ast.expr) -> bool:
    """Whether other operators would raise TypeError on the value."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, str | bytes)
        case ast.JoinedStr() | ast.List() | ast.Tuple() | ast.ListComp():
            return True
        case ast.BinOp(left=left, right=right):
            return _is_sequence(left) or _is_sequence(right)
        case _:
            return False


def whole_lines(file: TestFile, first: ast.stmt, last: ast.stmt) -> tuple[int, int] | None:
    """The bytes of the lines of a run of statements; None if other statements share these lines."""
    decorators: list[ast.expr] = getattr(first, "decorator_list", [])
    start = file.line_starts[min([first.lineno, *(one.lineno for one in decorators)]) - 1]
    last_line = last.end_lineno or 0
    end = file.line_starts[last_line] if last_line < len(file.line_starts) else len(file.source)
    before = file.source[start : start + first.col_offset]
    after = file.source[file.line_starts[last_line - 1] + (last.end_col_offset or 0) : end]
    return None if before.strip() or after.partition(b"#")[0].strip() else (start, end)


def _without_one(file: TestFile, body: list[ast.stmt]) -> Iterator[Mutation]:
    """The body without one of its statements, for statements that share no line with others."""
    for statement in body:
        span = whole_lines(file, statement, statement)
        if span is None or tells_people(statement):
            continue
        start, end = span
        lines = range(_line_of(file, start), (statement.end_lineno or 0) + 1)
        becomes = b"" if len(body) > 1 else file.source[start : start + statement.col_offset] + b"pass\n"
        count = "line" if len(lines) == 1 else f"{len(lines)} lines"
        yield Mutation("line", lines, start, end, becomes, f"{count} left out: {_first(file, start)}")


def _first(file: TestFile, start: int) -> str:
    return file.source[start:].split(b"\n", 1)[0].decode("utf-8", "replace").strip()


def _between(
    file: TestFile, kind: Mutated, before: ast.expr, after: ast.expr, was: str, becomes: Sequence[str]
) -> Iterator[Mutation]:
    """Other operators between two operands, if there are only the operator, white space, comments and brackets between them."""
    start, end = file.end(before), file.start(after)
    between = _COMMENT.sub(lambda comment: b" " * len(comment[0]), file.source[start:end])
    if " ".join(between.decode("utf-8", "replace").strip("() \t\r\n\\").split()) == was:
        first = start + between.index(was.split()[0].encode())
        last = start + between.rindex(was.split()[-1].encode()) + len(was.split()[-1])
        lines = range(_line_of(file, first), _line_of(file, last) + 1)
        for other in becomes:
            yield Mutation(kind, lines, first, last, other.encode(), f"{was} becomes {other}")


def _without_operands(
    file: TestFile, kind: Mutated, whole: ast.expr, operands: Sequence[ast.expr], operator: str
) -> Iterator[Mutation]:
    """The expression without one of its operands."""
    for number, operand in enumerate(operands):
        kept = [f"({file.text(one)})" for one in operands if one is not operand]
        becomes = f" {operator} ".join(kept).encode()
        shown = _shown(file, operand)
        what = f"{operator} {shown} left out" if number else f"{shown} {operator} left out"
        yield Mutation(kind, _lines(operand), file.start(whole), file.end(whole), becomes, what)


def _replaced(file: TestFile, kind: Mutated, node: ast.expr, becomes: str, what: str) -> Mutation:
    return Mutation(kind, _lines(node), file.start(node), file.end(node), becomes.encode(), what)


def _other_constants(value: object, text: str) -> list[str]:
    match value:
        case bool():
            return [str(not value)]
        case None:
            return ["True"]
        case int() | float():
            return [repr(value + 1), repr(value - 1)]
        case str() | bytes() if text[-1:] in "'\"" and text.count(text[-1]) in (2, 6):
            quotes = text[-3:] if text.count(text[-1]) == 6 else text[-1]
            empty = text[: text.index(quotes)] + quotes + quotes
            return [f"{text[: -len(quotes)]}x{quotes}", *([empty] if value else [])]
        case _:
            return []


def _start(file: TestFile, node: ast.expr | ast.keyword) -> int:
    return file.line_starts[node.lineno - 1] + node.col_offset


def _shown(file: TestFile, node: ast.expr) -> str:
    """The source of an expression in one line."""
    return " ".join(line.strip() for line in file.text(node).splitlines())


def _lines(node: ast.expr | ast.keyword) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _line_of(file: TestFile, offset: int) -> int:
    return bisect.bisect_right(file.line_starts, offset)


def meaning_of(source: bytes) -> str | None:
    """The code without layout, docstrings, annotations of functions, log lines, messages of errors, the module's version, and unreachable
    code; None if it does not parse.
    """
    file = read(source)
    if file is None:
        return None
    try:
        tree = _Done().visit(file.tree)
        for node in ast.walk(tree):
            _forget_texts(node)
        return ast.dump(tree)
    except RecursionError:
        return source.decode("utf-8", "replace")


class _Done(ast.NodeTransformer):
    """Replaces branches that a constant decides by the branch that is taken, and removes statements that do nothing."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        match node.test:
            case ast.Constant(value=bool() as value):
                return node.body if value else node.orelse
            case _:
                return node

    def visit_While(self, node: ast.While) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        match node.test:
            case ast.Constant(value=False):
                return node.orelse
            case _:
                return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        match node.test:
            case ast.Constant(value=bool() as value):
                return node.body if value else node.orelse
            case _:
                return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        node.ifs = [one for one in node.ifs if not _is_true(one)]
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        self.generic_visit(node)
        if node.guard is not None and _is_true(node.guard):
            node.guard = None
        return node

    def visit_Pass(self, node: ast.Pass) -> None:
        """Removes the statement, which does nothing."""

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        match node.value:
            case ast.Constant(value=None):
                node.value = None
            case _:
                pass
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        match node.body:
            case [*_, ast.Return(value=None)]:
                node.body.pop()
            case _:
                pass
        return node


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _forget_texts(node: ast.AST) -> None:
    for body in bodies(node):
        body[:] = [one for one in body if not tells_people(one)]
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        match node.body:
            case [ast.Expr(value=ast.Constant(value=str())), *rest]:
                node.body = rest
            case _:
                pass
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        node.returns = None
    if isinstance(node, ast.arg):
        node.annotation = None
    match node:
        case ast.Raise(exc=ast.Call() as error):
            error.args = [one for one in error.args if not _is_message(one)]
        case _:
            pass


def _is_message(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
