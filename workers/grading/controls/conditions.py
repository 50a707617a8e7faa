"""Contradictions of conditions: of the values that a test expects in an expression that must be true, or must be false."""

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import replace

from workers.grading.controls.scopes import name_of_call
from workers.grading.controls.spans import Edit, Expectation, Mode, Site, TestFile
from workers.grading.controls.values import Values, has_literal, number_of

_CLOSE = {"isclose", "allclose", "approx"}
_ABSOLUTE = {"abs", "abs_tol", "atol", "delta"}
_RELATIVE = {"rel", "rel_tol", "rtol"}
_WIDE = 0.3  # relative tolerances from here on have no near value outside
_REVERSED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_SIGNS: dict[type[ast.cmpop], str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
# Functions of the module operator, and the signs of their comparisons.
_OPERATORS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_EXPECTED = ("expect", "want", "correct", "target", "desired", "answer")


def contradict(node: ast.expr, expected: bool, file: TestFile, values: Values) -> Iterator[Expectation]:
    """Yields what changes the truth value of `node` from `expected` to the opposite."""
    match node:
        case ast.Constant():
            return  # `assert False` shows that a line must not be reached
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from contradict(operand, not expected, file, values)
        case ast.BoolOp(op=operator, values=operands) if isinstance(operator, ast.And) == expected:
            for operand in operands:
                yield from contradict(operand, expected, file, values)
        case ast.Compare(
            left=ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()) as condition,
            ops=[ast.Is() | ast.Eq()],
            comparators=[ast.Constant(value=bool() as truth)],
        ):
            yield from contradict(condition, expected == truth, file, values)
        case ast.Call(func=ast.Name(id="bool"), args=[condition], keywords=[]):
            yield from contradict(condition, expected, file, values)
        case ast.BinOp(left=left, op=ast.Sub(), right=right) if not expected and _is_difference(left, right):
            yield equal(left, right, file, values)
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if (
            not expected and type(operator) in _SIGNS
        ):
            sites = ordered(left, _REVERSED[_SIGNS[type(operator)]], right, values)
            yield Expectation(node, sites, (negation(node, file),))
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if not expected:
            found = list(_differing(left, operator, right, file, values))
            yield from found or [Expectation(node, opposites=(negation(node, file),))]
        case ast.Compare(
            left=ast.ListComp(elt=element), ops=[ast.Eq()], comparators=[ast.List(elts=truths)]
        ) if expected and all(isinstance(one, ast.Constant) and one.value is True for one in truths):
            yield from contradict(element, True, file, values)
        case ast.Compare() if expected:
            found = list(_compared(node, file, values))
            yield from found or [Expectation(node, opposites=(negation(node, file),))]
        case ast.Call() if expected:
            found = list(_called(node, file, values))
            yield from found or [Expectation(node, opposites=(negation(node, file),))]
        case _:
            yield Expectation(node, opposites=(negation(node, file),))


def _is_difference(left: ast.expr, right: ast.expr) -> bool:
    """Whether a subtraction is of numbers: what is left of other values, such as sets, says less."""
    return number_of(left) is not None or number_of(right) is not None


def negation(node: ast.expr, file: TestFile) -> Edit:
    return file.wrap(node, "not (", ")")


def equal(left: ast.expr, right: ast.expr, file: TestFile, values: Values) -> Expectation:
    """Two values that must be equal."""
    for side in (right, left):
        if isinstance(side, ast.Call) and name_of_call(side) == "approx":
            return close(side, side.args[:1], side.args[1:], file, values)
    expected = left if _looks_expected(left, values) > _looks_expected(right, values) else right
    return Expectation(
        expected,
        tuple(
            Site(side, "equal", other, is_expected=side is expected)
            for side, other in ((right, left), (left, right))
        ),
        last=(file.replace(expected, values.equal_to_nothing()),),
    )


def close(
    call: ast.Call,
    operands: list[ast.expr],
    tolerances: list[ast.expr],
    file: TestFile,
    values: Values,
    digits: list[ast.expr] | None = None,
) -> Expectation:
    """Numbers that must be equal within a tolerance, or in a number of digits, which is the last of the operands."""
    operand = operands[-1] if operands else call
    if not operands or isinstance(operand, ast.Starred):
        return Expectation(call)
    takes_nan = any(keyword.arg in ("nan_ok", "equal_nan") for keyword in call.keywords)
    # numpy's checkers treat all NaNs as equal.
    other = values.equal_to_nothing() if name_of_call(call).startswith("assert_") else "float('nan')"
    last = () if takes_nan else (file.replace(operand, other),)
    site = Site(
        operand, "close", tolerance=tolerance_of(call, tolerances), uncounted=_uncounted(call, digits or [])
    )
    return Expectation(operand, (site,), last=last)


def _digits(call: ast.Call) -> list[ast.expr]:
    return [keyword.value for keyword in call.keywords if keyword.arg in ("places", "decimal", "significant")]


def _uncounted(call: ast.Call, given: list[ast.expr]) -> float:
    """The largest difference, absolute or relative, of two numbers that are equal in this number of digits."""
    numbers = [number_of(one) or 0 for one in (*_digits(call), *given)]
    return max((10.0 ** (1 - number) for number in numbers if 1 <= number < 300), default=0.0)


def tolerance_of(call: ast.Call, given: list[ast.expr]) -> float | None:
    """The absolute tolerance of a comparison; 0.0 if it is relative and small, None if it is wide, infinite if no value is certain to be
    outside of it.
    """
    absolute = [keyword.value for keyword in call.keywords if keyword.arg in _ABSOLUTE]
    relative = [keyword.value for keyword in call.keywords if keyword.arg in _RELATIVE]
    if not all((number_of(one) or 0) >= 1 for one in _digits(call)):
        return math.inf
    total, is_wide = 0.0, False
    for one in (*absolute, *relative, *given):
        number = number_of(one)
        if isinstance(one, ast.Constant) and one.value is None:
            continue
        # A positional argument may be a share of the value.
        if number is None or (abs(number) >= 1 and one not in absolute):
            return math.inf
        is_wide |= abs(number) >= _WIDE and one not in absolute
        total += abs(number)
    return None if is_wide else total


def contained(item: ast.expr, container: ast.expr, file: TestFile, values: Values) -> Expectation:
    """The expectation that `item` is contained in `container`."""
    sites = (Site(item, "item", container), Site(container, "container", item))
    nothing = values.equal_to_nothing()
    if _looks_expected(container, values) > _looks_expected(item, values):
        return Expectation(container, sites, last=(file.replace(container, f"[{nothing}]"),))
    return Expectation(item, sites, last=(file.replace(item, nothing),))


def ordered(left: ast.expr, operator: str, right: ast.expr, values: Values) -> tuple[Site, Site]:
    """Two values of which one must be the smaller; if that one is the distance of two numbers, these must be close to each other."""
    distance, bound = (left, right) if operator.startswith("<") else (right, left)
    tolerance = number_of(bound)
    match distance:
        case ast.Call(args=[ast.BinOp(left=one, op=ast.Sub(), right=other)], keywords=[]) if (
            tolerance is not None and name_of_call(distance) in ("abs", "fabs")
        ):
            is_first = _looks_expected(one, values) > _looks_expected(other, values)
            return (
                Site(other, "close", one, is_expected=not is_first, tolerance=tolerance),
                Site(one, "close", other, is_expected=is_first, tolerance=tolerance),
            )
        case _:
            pass
    modes: tuple[Mode, Mode] = ("under", "over") if operator.startswith("<") else ("over", "under")
    return Site(right, modes[0], left), Site(left, modes[1], right)


def instance(node: ast.expr, actual: ast.expr, kind: ast.expr) -> Expectation:
    return Expectation(node, (Site(kind, "type", actual),))


def _looks_expected(node: ast.expr, values: Values) -> int:
    """A score for how much an operand resembles a written expectation rather than a result of the code."""
    if has_literal(node):
        return 3
    match node:
        case ast.Constant():
            return 3
        case ast.Call() if name_of_call(node)[:1].isupper():
            return 2
        case ast.List() | ast.Tuple() | ast.Set() | ast.Dict():
            return 2
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(value=ast.Name(id=name)):
            if name.isupper() or name.lower().startswith(_EXPECTED):
                return 2
            return int(not values.is_result(node))
        case _:
            return int(not values.is_result(node))


def _compared(node: ast.Compare, file: TestFile, values: Values) -> Iterator[Expectation]:
    left = node.left
    for operator, right in zip(node.ops, node.comparators, strict=True):
        match operator:
            case ast.Eq():
                yield equal(left, right, file, values)
            case ast.Is():
                yield _same(node, left, right, file, values)
            case ast.In():
                yield contained(left, right, file, values)
            case ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE():
                yield _in_order(node, left, right, file, values)
            case _:
                pass
        left = right


def _differing(
    left: ast.expr, operator: ast.cmpop, right: ast.expr, file: TestFile, values: Values
) -> Iterator[Expectation]:
    """A comparison that must be false."""
    match operator:
        case ast.NotEq():
            yield equal(left, right, file, values)
        case ast.NotIn():
            yield contained(left, right, file, values)
        case ast.IsNot():
            yield _same(right, left, right, file, values)
        case _:
            pass


def _same(node: ast.expr, left: ast.expr, right: ast.expr, file: TestFile, values: Values) -> Expectation:
    """Two expressions that must be the same object."""
    if isinstance(right, ast.Constant):
        others = [name for name in ("None", "True", "False") if name != file.text(right)]
        near = [name for name in others if (name == "None") == (file.text(right) == "None")] or others
        opposite = (negation(node, file),) if isinstance(node, ast.Compare) and len(node.ops) == 1 else ()
        return Expectation(
            right, (Site(right, "identical", left),), opposite, (file.replace(right, near[0]),)
        )
    return Expectation(
        right, (Site(right, "identical", left),), last=(file.replace(right, values.equal_to_nothing()),)
    )


def _in_order(
    node: ast.Compare, left: ast.expr, right: ast.expr, file: TestFile, values: Values
) -> Expectation:
    """A comparison that must hold: its operator is reversed, or its operands are swapped."""
    start, end = file.end(left), file.start(right)
    between = file.source[start:end].decode()
    operators: list[str] = re.findall(r"<=|>=|<|>", between)
    if len(operators) != 1 or "#" in between:
        return Expectation(node, opposites=(negation(node, file),))
    (operator,) = operators
    at = start + len(between[: between.index(operator)].encode())
    edits = [Edit(at, at + len(operator), _REVERSED[operator])]
    is_plain = not any(isinstance(part, ast.Call | ast.Await) for part in ast.walk(right))
    if len(node.ops) == 1 and is_plain and re.fullmatch(r"\s*(<=|>=|<|>)\s*", between):
        swapped = f"{file.text(right)}{between.replace(operator, operator[0])}{file.text(left)}"
        edits.append(Edit(file.start(left), file.end(right), swapped))
    return Expectation(node, ordered(left, operator, right, values), tuple(edits))


def _called(node: ast.Call, file: TestFile, values: Values) -> Iterator[Expectation]:
    name = name_of_call(node)
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        return
    match node.args:
        case [actual, kind] if name in ("isinstance", "issubclass"):
            yield instance(node, actual, kind)
        case [actual, expected, *rest] if name in _CLOSE:
            yield close(node, [expected if number_of(actual) is None else actual], rest, file, values)
        case [actual, expected, *_] if name == "array_equal":
            yield equal(actual, expected, file, values)
        case [left, right] if name == "eq" and _is_of_operator(node, values):
            yield equal(left, right, file, values)
        case [left, right] if name in _OPERATORS and _is_of_operator(node, values):
            yield Expectation(node, ordered(left, _OPERATORS[name], right, values), (negation(node, file),))
        case [ast.Constant(value=str() | bytes()) as text] if name in ("startswith", "endswith"):
            yield Expectation(node, (Site(text, "item"),), (negation(node, file),))
        case [ast.GeneratorExp(elt=element) | ast.ListComp(elt=element)] if name == "all":
            yield from contradict(element, True, file, values)
        case _:
            sites = [site for one in values.returned(node) for site in _sites_in(one, file, values)]
            if sites:
                yield Expectation(node, tuple(sites), (negation(node, file),))


def _is_of_operator(node: ast.Call, values: Values) -> bool:
    """Whether a call of one of its names may be of the module operator: imported by that name, and not defined in the file."""
    match node.func:
        case ast.Attribute(value=ast.Name(id=module)):
            return module == "operator"
        case _:
            return isinstance(node.func, ast.Name) and not values.defines(node.func.id)


def _sites_in(condition: ast.expr, file: TestFile, values: Values) -> Iterator[Site]:
    """What a function of the file that returns this condition compares: its arguments, which callers write."""
    for expectation in contradict(condition, True, file, values) if _is_comparison(condition) else ():
        for site in expectation.sites:
            if isinstance(site.operand, ast.Name):
                yield replace(site, is_expected=False)


def _is_comparison(condition: ast.expr) -> bool:
    match condition:
        case ast.BoolOp(values=operands):
            return all(map(_is_comparison, operands))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _is_comparison(operand)
        case _:
            return isinstance(condition, ast.Compare)
