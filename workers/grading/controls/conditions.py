"""Conditions made false: edits of an expression that a test expects to be true, or to be false."""

import ast
from collections.abc import Iterator

from workers.grading.controls.spans import Edit, TestFile
from workers.grading.controls.values import Values, has_literal, number_of

_CLOSE = {"isclose", "allclose", "array_equal", "approx"}
_TOLERANCES = {"abs", "abs_tol", "atol", "delta", "rel", "rel_tol", "rtol"}


def contradict(node: ast.expr, expected: bool, file: TestFile, values: Values) -> Iterator[Edit]:
    """Edits after which the truth value of `node` is not `expected`, if it was before."""
    match node:
        case ast.Constant():
            return  # `assert False` marks a place that is not reached
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from contradict(operand, not expected, file, values)
        case ast.BoolOp(op=operator, values=operands) if isinstance(operator, ast.And) == expected:
            for operand in operands:
                yield from contradict(operand, expected, file, values)
        case ast.Compare() if expected:
            found = list(_unlike(node, file, values))
            yield from found or [negation(node, file)]
        case ast.Call() if expected:
            found = list(_unlike_call(node, file, values))
            yield from found or [negation(node, file)]
        case _:
            yield negation(node, file)


def negation(node: ast.expr, file: TestFile) -> Edit:
    return file.wrap(node, "not (", ")")


def unequal(left: ast.expr, right: ast.expr, file: TestFile, values: Values) -> Iterator[Edit]:
    """Edits after which two equal values differ. The side that looks expected is changed, and a literal to one of its type: code
    that reads there what to return passes, as code does that is equal to anything.
    """
    for side in (left, right):
        if name_of_call(side) == "approx":
            assert isinstance(side, ast.Call)
            yield from moved_away(side, side.args[:1], file, values)
            return
    literals = [*values.other_literals(right), *values.other_literals(left)]
    expected = left if has_literal(left) and not has_literal(right) else right
    yield from literals or [file.replace(expected, values.equal_to_nothing())]


def moved_away(call: ast.Call, operands: list[ast.expr], file: TestFile, values: Values) -> Iterator[Edit]:
    """Edits after which an operand of a comparison with a tolerance is far from what it was."""
    tolerances = [keyword.value for keyword in call.keywords if keyword.arg in _TOLERANCES]
    narrow = all((number_of(tolerance) or 2.0) < 1 for tolerance in tolerances)
    if narrow and operands:
        numbers = [leaf for leaf in elements(operands[-1]) if number_of(leaf) is not None]
        yield from (file.replace(leaf, values.far_from(leaf)) for leaf in numbers[:2])
        if numbers:
            return
    if operands and not any(keyword.arg in ("nan_ok", "equal_nan") for keyword in call.keywords):
        is_of_numpy = name_of_call(call).startswith("assert_")  # whose checkers take one NaN for another
        yield file.replace(operands[-1], values.equal_to_nothing() if is_of_numpy else "float('nan')")


def elements(node: ast.expr) -> list[ast.expr]:
    """The elements of a list or tuple that is written down, however deep; the node itself if it is none."""
    if isinstance(node, ast.List | ast.Tuple):
        return [element for part in node.elts for element in elements(part)]
    return [node]


def absent(item: ast.expr, container: ast.expr, file: TestFile, values: Values) -> Iterator[Edit]:
    """Edits after which the container does not have the item."""
    yield file.replace(item, values.unlike(item))
    if isinstance(container, ast.List | ast.Tuple | ast.Set):
        others = [values.unlike(element) for element in container.elts]
        yield file.replace(container, f"[{', '.join(others)}]")


def name_of_call(node: ast.expr) -> str:
    """The last part of the name of the function that an expression calls; empty if it calls none by name."""
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
        case _:
            return ""


def _unlike(node: ast.Compare, file: TestFile, values: Values) -> Iterator[Edit]:
    left = node.left
    for operator, right in zip(node.ops, node.comparators, strict=True):
        match operator:
            case ast.Eq():
                yield from unequal(left, right, file, values)
            case ast.Is() if isinstance(right, ast.Constant):
                others = [name for name in ("None", "True", "False") if name != file.text(right)]
                yield file.replace(right, values.pick(others))
            case ast.Is():
                yield file.replace(right, values.equal_to_nothing())
            case ast.In():
                yield from absent(left, right, file, values)
            case ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE():
                yield file.replace(right, "float('nan')")
            case _:
                pass
        left = right
    if any(isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for operator in node.ops):
        yield negation(node, file)


def _unlike_call(node: ast.Call, file: TestFile, values: Values) -> Iterator[Edit]:
    name = name_of_call(node)
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        return
    match node.args:
        case [_, kind] if name in ("isinstance", "issubclass"):
            yield file.replace(kind, values.unrelated_type(kind))
        case [actual, expected, *_] if name in _CLOSE:
            yield from moved_away(node, [expected if number_of(actual) is None else actual], file, values)
        case _:
            return
