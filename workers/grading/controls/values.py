"""Values that are not what a test expects: other literals, values equal to nothing, unrelated exceptions.

They are drawn by chance and look like what people write, so code under test cannot know a control run by them.
"""

import ast
import builtins
import random
import string
from collections.abc import Iterator, Sequence
from typing import TypeVar

from workers.grading.controls.literals import Literals, value_of
from workers.grading.controls.spans import Edit, TestFile, parse_expression

T = TypeVar("T")

_LONG = 300  # characters of a literal; a failed comparison of longer ones may spend minutes on showing the difference
_MOST_LITERALS = 3  # of one expectation
_HUGE = 1e200  # a number that cannot be multiplied much

# Expressions whose value is equal to nothing but itself, and cheap to compare and to print: none is an empty collection, which
# some checkers take for another. NUMBER and WORD are drawn.
_EQUAL_TO_NOTHING = (
    "object()",
    "(lambda: NUMBER)",
    "(lambda x: x)",
    "(n for n in (NUMBER,))",
    "iter([NUMBER])",
    "map(str, [NUMBER])",
    "filter(None, [NUMBER])",
    "reversed([NUMBER])",
    "reversed('WORD')",
    "ValueError('WORD')",
    "KeyError('WORD')",
    "LookupError(NUMBER)",
    "zip('WORD')",
    "enumerate('WORD')",
    "staticmethod(len)",
    "property()",
    "type('WORD', (), {})",
    "type('WORD', (), {})()",
)
# Exceptions and warnings that code hardly raises or derives from.
_RARE_ERRORS = (
    "BufferError",
    "ChildProcessError",
    "FloatingPointError",
    "ProcessLookupError",
    "StopAsyncIteration",
    "TabError",
    "UnicodeTranslateError",
)
_NO_EXCEPTIONS = ("GeneratorExit", "KeyboardInterrupt", "SystemExit")  # not derived from Exception
# Names of exceptions, or parts of them.
_ENDING_THE_RUN = {"BaseException", "Exit", "KeyboardInterrupt", "exit"}
_RARE_WARNINGS = ("BytesWarning", "ImportWarning", "UnicodeWarning")
_RARE_TYPES = (
    "memoryview",
    "super",
    "BufferError",
    "UnicodeTranslateError",
    "type(NotImplemented)",
    "type('WORD', (), {})",
)


class Values:
    """Draws values for one test file, without names that the file binds."""

    def __init__(self, file: TestFile, chance: random.Random) -> None:
        self._file = file
        self._chance = chance
        self._literals = Literals(file.tree)
        self._bound = _bound_names(file.tree)
        self._defined = {
            node.name
            for node in ast.walk(file.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    def equal_to_nothing(self) -> str:
        return self._draw(_EQUAL_TO_NOTHING)

    def unrelated_type(self, node: ast.expr) -> str:
        """A type that no instance of the type `node` has."""
        return self._draw([form for form in _RARE_TYPES if form not in self._file.text(node)])

    def unrelated_error(self, node: ast.expr) -> str | None:
        """An exception class that catches nothing of what the class or the classes `node` catch.

        None if any class would, or if what is no longer caught would end the whole run instead of the test.
        """
        names = _names(node)
        if names & _ENDING_THE_RUN:
            return None
        if "Exception" in names:
            return self._draw(_NO_EXCEPTIONS)
        return self._draw([error for error in _RARE_ERRORS if not _related(error, names)])

    def unrelated_warning(self, node: ast.expr) -> str | None:
        named = _names(node)
        if "Warning" in named:
            return None
        return self._draw([warning for warning in _RARE_WARNINGS if warning not in named])

    def word(self, num_letters: int = 0) -> str:
        """Letters that are in no text by chance."""
        return "".join(
            self._chance.choices(string.ascii_lowercase, k=max(num_letters, 9) + self._chance.randrange(3))
        )

    def quoted(self, node: ast.expr) -> str:
        """A string, or bytes if the literal `node` is bytes, that is in no text by chance."""
        value = node.value if isinstance(node, ast.Constant) else None
        num_letters = min(len(value), 20) if isinstance(value, str | bytes) else 0
        quote = self._chance.choice("'\"")
        return f"{'b' if isinstance(value, bytes) else ''}{quote}{self.word(num_letters)}{quote}"

    def number(self) -> str:
        """A number that is in nothing by chance."""
        return str(self._chance.randrange(10**7, 10**9))

    def far_from(self, node: ast.expr) -> str:
        """A number far outside any tolerance around the literal number `node`."""
        value = number_of(node)
        assert value is not None
        if abs(value) > _HUGE:
            return f"-{self._small()}.0"
        far = (abs(value) + 1) * self._chance.randrange(10**6, 10**7)
        return f"{far:.6e}" if isinstance(value, float) else str(far)

    def unlike(self, node: ast.expr) -> str:
        """A value that is in nothing by chance, of the type of `node` if that is a number or a text."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            return self.quoted(node)
        return self.equal_to_nothing() if number_of(node) is None else self.number()

    def other_literals(self, node: ast.expr) -> Iterator[Edit]:
        """Edits of a literal, or of literals in a list, tuple, set or dictionary, that make its value unequal to what it was."""
        if len(self._file.text(node)) > _LONG:
            return
        leaves = list(_leaves(node))
        for leaf in self._chance.sample(leaves, min(len(leaves), _MOST_LITERALS)):
            edit = self._other(leaf)
            if edit is not None:
                yield edit

    def pick(self, choices: Sequence[T]) -> T:
        return self._chance.choice(choices)

    def defines(self, name: str) -> bool:
        """Whether the file defines a function or method of this name, whose own expectations are contradicted."""
        return name in self._defined

    def _other(self, leaf: ast.expr) -> Edit | None:
        match leaf:
            case ast.List():
                return self._file.replace(leaf, f"[{self._small()}]")
            case ast.Tuple():
                return self._file.replace(leaf, f"({self._small()},)")
            case ast.Dict():
                return self._file.replace(leaf, f"{{{self._small()}: {self._small()}}}")
            case ast.Constant(value=bool()):
                return self._file.replace(leaf, str(not leaf.value))
            case ast.Constant(value=str() | bytes()):
                return self._other_text(leaf) or self._longer_text(leaf)
            case ast.Constant(value=int() | float() | complex()):
                return self._other_text(leaf)
            case _:
                return None

    def _other_text(self, leaf: ast.Constant) -> Edit | None:
        """Another literal of the same type that the file does not have; if there is any, one that keeps the order of literals."""
        found: Edit | None = None
        for becomes in self._spelled_otherwise(leaf):
            value = value_of(parse_expression(becomes))
            if value is None or not _differ(value, leaf.value) or not self._literals.is_new(leaf, value):
                continue
            edit = self._file.replace(leaf, becomes)
            if self._literals.keeps_order(leaf, value):
                return edit
            found = found or edit
        return found

    def _spelled_otherwise(self, leaf: ast.Constant) -> Iterator[str]:
        """The literal with another letter or digit; a number also with one more digit."""
        text, is_number = self._file.text(leaf), not isinstance(leaf.value, str | bytes)
        # A letter behind a backslash is left alone: other escapes would be warned about, which may be an error.
        places = [n for n, character in enumerate(text) if character in _ALPHABETS and text[:n][-1:] != "\\"]
        for place in self._chance.sample(places, min(len(places), 12)):
            others = _ALPHABETS[text[place]].replace(text[place], "")
            for other in self._chance.sample(others, len(others) if is_number else 1):
                yield f"{text[:place]}{other}{text[place + 1 :]}"
        if is_number:
            yield from (f"{digit}{text}" for digit in self._chance.sample("123456789", 9))

    def _longer_text(self, leaf: ast.Constant) -> Edit | None:
        if "\n" in self._file.text(leaf):
            return None
        return self._file.replace(leaf, f"{self._file.text(leaf)} {self.quoted(leaf)}")

    def _small(self) -> str:
        return str(self._chance.randrange(2, 100))

    def _draw(self, forms: tuple[str, ...] | list[str]) -> str:
        free = (
            [form for form in forms if not (_bound_in(form) & self._bound)] if "*" not in self._bound else []
        )
        form = self._chance.choice(free or [form for form in forms if not _bound_in(form)] or list(forms))
        return form.replace("NUMBER", self._small()).replace("WORD", self.word())


_ALPHABETS = {
    character: alphabet
    for alphabet in (string.ascii_lowercase, string.ascii_uppercase, string.digits)
    for character in alphabet
}


def number_of(node: ast.expr) -> float | int | None:
    """The value of a literal number with or without a sign."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = number_of(operand)
            return None if value is None else -value
        case _:
            return None


def has_literal(node: ast.expr) -> bool:
    """Whether the value is one that was written down: a literal or a collection of some."""
    return any(True for _ in _leaves(node)) or (isinstance(node, ast.Constant) and node.value is None)


def _leaves(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Constant(value=value) if value is not None and value is not Ellipsis:
            yield node
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value) as operand) if value:
            yield operand
        case ast.List(elts=[]) | ast.Tuple(elts=[]) | ast.Dict(keys=[]):
            yield node
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            for element in elements:
                yield from _leaves(element)
        case ast.Dict(keys=keys, values=values) if None not in keys:
            for key in (*keys, *values):
                assert key is not None
                yield from _leaves(key)
        case _:
            return


def _differ(one: object, other: object) -> bool:
    if type(one) is not type(other) or one == other:
        return False
    return not isinstance(one, str) or str(one).casefold() != str(other).casefold()


def _related(error: str, named: set[str]) -> bool:
    rare = getattr(builtins, error)
    classes = [getattr(builtins, name, None) for name in named]
    return any(
        issubclass(rare, other) or issubclass(other, rare) for other in classes if isinstance(other, type)
    )


def _names(node: ast.expr) -> set[str]:
    """The last parts of the names in an expression: `E` of `module.E`."""
    return {
        part.id if isinstance(part, ast.Name) else part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Name | ast.Attribute)
    }


def _bound_in(form: str) -> set[str]:
    parsed = parse_expression(form)
    assert parsed is not None
    return {part.id for part in ast.walk(parsed) if isinstance(part, ast.Name)} - {"x", "n", "object"}


def _bound_names(tree: ast.Module) -> set[str]:
    """Names that the file gives a value anywhere; `*` if it imports all names of a module."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name.split(".")[0])
            case _:
                pass
    return names
