"""The literals of a test file, and whether another value may replace one of them unnoticed.

Code that returns a constant of the calling test passes it. To make this code fail the control, it has to find and return the contradicted
constant in the same way: as the last constant of the test's code, the largest one, the one that is not an argument. So the other value must
not occur elsewhere in the function, because Python stores equal constants once. If possible, it is also as plausible as the original: it
has the same two neighbours in order, it consists of the same letters as another text if the original does, and it contains another text if
the original does.
"""

import ast
import bisect
import string
from collections.abc import Callable, Iterator
from typing import TypeAlias

Value: TypeAlias = complex | str | bytes
_Ordered: TypeAlias = tuple[int, float | str | bytes]

# The letters or digits among which another one is chosen, by character.
ALPHABETS = {
    character: alphabet
    for alphabet in (string.ascii_lowercase, string.ascii_uppercase, string.digits)
    for character in alphabet
}

_MOST_TEXTS = 200  # largest number of texts of a function that are compared with a literal
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
# Two different texts with an equal result of one of these may count as equal.
_MADE_OF: tuple[Callable[[str], object], ...] = (
    str.casefold,
    lambda text: sorted(text.casefold()),
    lambda text: sorted(text.casefold().split()),
)


class Literals:
    """The numbers, texts and bytes in the source of one file: by function, and by the class or file around them."""

    def __init__(self, tree: ast.Module) -> None:
        # The values in the function around each literal, by the id of the literal's node.
        self._values: dict[int, set[Value]] = {}
        self._signs: dict[int, int] = {}  # the sign of each number, by the id of the node
        # All literals of the function around each literal, in ascending order, by the id of the literal's node.
        self._around: dict[int, list[_Ordered]] = {}
        # The measures in which a text equals another text of its function, and the texts that it contains, by the id of its node.
        self._texts_like: dict[int, tuple[list[Callable[[str], object]], list[str]]] = {}
        for nodes in _groups(tree):
            self._enter(nodes)

    def is_new(self, leaf: ast.Constant, value: Value) -> bool:
        """Whether no other literal in the function of `leaf` equals `value`."""
        return self._signed(leaf, value) not in self._values[id(leaf)]

    def num_relations_lost(self, leaf: ast.Constant, value: Value) -> int:
        """The number of relations of `leaf` to the other literals of its function that are lost if `value` replaces it.

        The relations are: its position between the same two neighbours in order; being made of the same letters or words as
        another text, ignoring case; and containing another text.
        """
        former = value_of(leaf)
        was = None if former is None else _ordered(self._signed(leaf, former))
        becomes = _ordered(self._signed(leaf, value))
        if was is None or becomes is None:
            return 0
        around = self._around[id(leaf)]
        first, last = min(was, becomes), max(was, becomes)
        num_lost = int(bisect.bisect_right(around, last) - bisect.bisect_left(around, first) != 1)
        if isinstance(former, str) and isinstance(value, str):
            if id(leaf) not in self._texts_like:
                others = [one for _, one in around if isinstance(one, str) and one != former][:_MOST_TEXTS]
                self._texts_like[id(leaf)] = (
                    [
                        made_of
                        for made_of in _MADE_OF
                        if any(made_of(one) == made_of(former) for one in others)
                    ],
                    [one for one in others if one in former],
                )
            shared, contained = self._texts_like[id(leaf)]
            num_lost += sum(made_of(value) != made_of(former) for made_of in shared)
            num_lost += sum(one not in value for one in contained)
        return num_lost

    def _enter(self, nodes: list[ast.AST]) -> None:
        negated = {
            id(one.operand) for one in nodes if isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.USub)
        }
        values: dict[int, Value] = {}
        for node in nodes:
            if isinstance(node, ast.Constant) and (value := value_of(node)) is not None:
                self._signs[id(node)] = -1 if id(node) in negated else 1
                values[id(node)] = self._signed(node, value)
        found = {*values.values()}
        self._values.update((node, found) for node in values)
        around = sorted(key for key in map(_ordered, {*values.values()}) if key is not None)
        self._around.update(dict.fromkeys(values, around))

    def _signed(self, leaf: ast.Constant, value: Value) -> Value:
        return value if isinstance(value, str | bytes) else self._signs[id(leaf)] * value


def _groups(tree: ast.Module) -> Iterator[list[ast.AST]]:
    """The nodes of each outermost function, and the nodes outside of all functions."""
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
    """The value of an expression that is a literal number, text or bytes; None for any other expression."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() | complex() | str() | bytes() as value):
            return value
        case _:
            return None


def _ordered(value: Value) -> _Ordered | None:
    """The sort key of numbers, texts and bytes, each among themselves; None for a complex number."""
    match value:
        case str():
            return 1, value
        case bytes():
            return 2, value
        case int() | float():
            return 0, value
        case _:
            return None
