"""The literals of a test file, and whether another value may stand in the place of one of them unnoticed.

Code that returns a constant of the test that calls it passes, so it must fail the control by returning the contradicted one.
Whatever found the original has to find that: the last constant of the test's code, the largest, the one that is no argument.
Hence the other value is one that the file has nowhere else, because Python keeps equal constants once, and where possible
one between the same two neighbours in order.
"""

import ast
import bisect
from collections.abc import Iterator
from typing import TypeAlias

Value: TypeAlias = complex | str | bytes
_Ordered: TypeAlias = tuple[int, float | str | bytes]

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Literals:
    """The numbers, texts and bytes that are written down in one file: by function, and by class or file around them."""

    def __init__(self, tree: ast.Module) -> None:
        self._values: set[Value] = set()
        self._signs: dict[int, int] = {}  # of numbers, by the id of the node
        # The literals of each one's function, in order, by the id of the node.
        self._around: dict[int, list[_Ordered]] = {}
        for nodes in _groups(tree):
            self._enter(nodes)

    def is_new(self, leaf: ast.Constant, value: Value) -> bool:
        """Whether the file has no literal equal to `value` in the place of `leaf`."""
        return self._signed(leaf, value) not in self._values

    def keeps_order(self, leaf: ast.Constant, value: Value) -> bool:
        """Whether `value` in the place of `leaf` is between the same literals of its function as `leaf` is."""
        former = value_of(leaf)
        was = None if former is None else _ordered(self._signed(leaf, former))
        becomes = _ordered(self._signed(leaf, value))
        if was is None or becomes is None:
            return True
        around = self._around[id(leaf)]
        first, last = min(was, becomes), max(was, becomes)
        return bisect.bisect_right(around, last) - bisect.bisect_left(around, first) == 1

    def _enter(self, nodes: list[ast.AST]) -> None:
        negated = {
            id(one.operand) for one in nodes if isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.USub)
        }
        values: dict[int, Value] = {}
        for node in nodes:
            if isinstance(node, ast.Constant) and (value := value_of(node)) is not None:
                self._signs[id(node)] = -1 if id(node) in negated else 1
                values[id(node)] = self._signed(node, value)
        self._values.update(values.values())
        around = sorted(key for key in map(_ordered, {*values.values()}) if key is not None)
        self._around.update(dict.fromkeys(values, around))

    def _signed(self, leaf: ast.Constant, value: Value) -> Value:
        return value if isinstance(value, str | bytes) else self._signs[id(leaf)] * value


def _groups(tree: ast.Module) -> Iterator[list[ast.AST]]:
    """The nodes of each outermost function, and those outside of all functions."""
    outside: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _FUNCTIONS):
            yield list(ast.walk(node))
        else:
            outside.append(node)
            waiting += ast.iter_child_nodes(node)
    yield outside


def value_of(node: ast.expr | None) -> Value | None:
    """The number, text or bytes that the expression is the literal of; None if it is another one."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() | complex() | str() | bytes() as value):
            return value
        case _:
            return None


def _ordered(value: Value) -> _Ordered | None:
    """What numbers, texts and bytes are sorted by, each among themselves; None for a complex number."""
    match value:
        case str():
            return 1, value
        case bytes():
            return 2, value
        case int() | float():
            return 0, value
        case _:
            return None
