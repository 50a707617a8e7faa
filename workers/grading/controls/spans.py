"""Spans of a parsed test file, and edits that keep the number of lines.

A span is the range of a node in the bytes of the file. A site is an expression with which the test fails if it has another value; an
expectation is what a test expects there, or an edit that reverses a condition.
"""

import ast
import bisect
import codecs
import itertools
import re
import tokenize
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Literal, TypeAlias

from pipeline.task import ContradictionKind

Span: TypeAlias = tuple[int, int]  # the index of the first byte, and of the one after the last
_MARK = b"\xef\xbb\xbf"
_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class Edit:
    """The bytes from `start` to `end` are replaced by `becomes`."""

    start: int
    end: int
    becomes: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One expectation made wrong by edits that do not overlap: first edits of the expectation, then of text that repeats its value."""

    # Tests whose outcome it may change, by their names within the file: `T::test_a`, or one case of it.
    tests: tuple[str, ...]
    edits: tuple[Edit, ...]
    kind: ContradictionKind  # another value of the same type; another condition or class; a value that is equal to nothing
    # New names of tests that this edit renames, by the old name. The name of a function means all of its cases.
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    checked: tuple[Span, ...] = ()  # the places in bytes where the expectation is checked
    # If the expectation is the class of an error, the places where the text of the error is checked.
    texts: tuple[Span, ...] = ()


def changed_span(start: int, was: str, becomes: str) -> Span:
    """The bytes of the text `was`, which begins at `start`, that are not the same in `becomes`."""
    shorter = min(len(was), len(becomes))
    begin = next((place for place in range(shorter) if was[place] != becomes[place]), shorter)
    end = next((n for n in range(shorter - begin) if was[-1 - n] != becomes[-1 - n]), shorter - begin)
    first = start + len(was[:begin].encode())
    return first, max(
        first + len(was[begin : len(was) - end].encode()), min(first + 1, start + len(was.encode()))
    )


class Cover:
    """Answers whether one of many spans contains a given one."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        ordered = sorted(spans)
        self._starts = [start for start, _ in ordered]
        self._ends = [*itertools.accumulate((end for _, end in ordered), max)]

    def has(self, place: Span) -> bool:
        before = bisect.bisect_right(self._starts, place[0])
        return before > 0 and place[1] <= self._ends[before - 1]


@dataclass(frozen=True, slots=True)
class TestFile:
    """A parsed test file, and the offsets of its lines."""

    __test__ = False  # pytest collects classes of such a name

    source: bytes
    tree: ast.Module
    line_starts: tuple[int, ...]

    def start(self, node: ast.expr) -> int:
        return self.line_starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        """The source of an expression, without parentheses around it. It may contain line ends."""
        return self.source[self.start(node) : self.end(node)].decode()

    def replace(self, node: ast.expr, becomes: str) -> Edit:
        """The expression replaced by text that keeps the number of lines."""
        missing = "" if _line_ends(becomes) else "".join(_line_ends(self.text(node)))
        if missing and becomes.endswith(")"):
            becomes = f"{becomes[:-1]}{missing})"
        elif missing:
            becomes = f"({becomes}{missing})"
        return Edit(self.start(node), self.end(node), becomes)

    def wrap(self, node: ast.expr, before: str, after: str) -> Edit:
        """The expression with text before and after it."""
        return Edit(self.start(node), self.end(node), f"{before}{self.text(node)}{after}")

    def is_placed(self, node: ast.expr) -> bool:
        """Whether the node's text parses to the node: inside f-strings, Python 3.11 gives wrong positions."""
        parsed = parse_expression(self.text(node))
        return parsed is not None and ast.dump(parsed) == ast.dump(node)

    def apply(self, edits: Sequence[Edit]) -> bytes:
        """The source after edits that do not overlap, in any order."""
        return _applied(self.source, edits)

    def stays_parsed(self, edits: Sequence[Edit]) -> bool:
        """Whether each function or other statement with edits still parses after them, with the same number of lines."""
        units: dict[tuple[int, int], list[Edit]] = {}
        for edit in edits:
            if len(_line_ends(self.source[edit.start : edit.end].decode())) != len(_line_ends(edit.becomes)):
                return False
            units.setdefault(self._unit(edit), []).append(edit)
        for (first, last), some in units.items():
            start, end = self.line_starts[first], self.line_starts[last]
            moved = [Edit(edit.start - start, edit.end - start, edit.becomes) for edit in some]
            text = _applied(self.source[start:end], moved).decode()
            if text[:1].isspace():
                text = f"if 1:\n{text}"
            try:
                _parse(text, "exec")
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return False
        return True

    def _unit(self, edit: Edit) -> tuple[int, int]:
        """The lines of the outermost function that contains an edit, or of the statement outside of functions; all lines if none is alone
        on its lines.
        """
        body, found = self.tree.body, (0, len(self.line_starts) - 1)
        while True:
            ranges = [(_first_line(one) - 1, one.end_lineno or one.lineno, one) for one in body]
            inside = [
                (first, last, one)
                for first, last, one in ranges
                if self.line_starts[first] <= edit.start and edit.end <= self.line_starts[last]
            ]
            if (
                len(inside) != 1
                or sum(first < inside[0][1] and inside[0][0] < last for first, last, _ in ranges) > 1
            ):
                return found
            first, last, one = inside[0]
            found = (first, last)
            if not isinstance(one, ast.ClassDef):
                return found
            body = one.body

    def stays_sound(self, root: ast.expr, edit: Edit) -> bool:
        """Whether the edit makes another valid expression of `root`, with the same number of lines."""
        start, end = self.start(root), self.end(root)
        if not start <= edit.start < edit.end <= end:
            return False
        was = self.source[edit.start : edit.end].decode()
        if len(_line_ends(was)) != len(_line_ends(edit.becomes)):
            return False
        before = self.source[start : edit.start].decode()
        after = self.source[edit.end : end].decode()
        parsed = parse_expression(f"{before}{edit.becomes}{after}")
        return parsed is not None and ast.dump(parsed) != ast.dump(root)


def read(source: bytes) -> TestFile | None:
    """The parsed file; None if it is not UTF-8 or not Python that this interpreter can parse."""
    mark_bytes = len(_MARK) if source.startswith(_MARK) else 0
    try:
        declared = tokenize.detect_encoding(BytesIO(source).readline)[0]  # such as "utf8"
        if codecs.lookup(declared).name not in ("utf-8", "utf-8-sig", "ascii"):
            return None
        tree = _parse(source[mark_bytes:].decode(), "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    assert isinstance(tree, ast.Module)
    starts = [mark_bytes]
    # Bytes are split at \n, \r and \r\n, as Python splits source.
    for line in source[mark_bytes:].splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return TestFile(source, tree, tuple(starts))


def parse_expression(text: str) -> ast.expr | None:
    """The expression that `text` is inside parentheses; None if it is not an expression."""
    try:
        tree = _parse(f"({text}\n)", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    assert isinstance(tree, ast.Expression)
    return tree.body


def _applied(source: bytes, edits: Sequence[Edit]) -> bytes:
    parts: list[bytes] = []
    at = 0
    for edit in sorted(edits, key=lambda edit: edit.start):
        parts += [source[at : edit.start], edit.becomes.encode()]
        at = edit.end
    return b"".join([*parts, source[at:]])


def _first_line(statement: ast.stmt) -> int:
    """The line on which a statement starts, including its decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def _parse(text: str, mode: str) -> ast.AST:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hides warnings about escapes in strings of the test file
        return compile(text, "<test file>", mode, ast.PyCF_ONLY_AST, dont_inherit=True)


def _line_ends(text: str) -> list[str]:
    return _LINE_END.findall(text)


Mode: TypeAlias = Literal[
    "equal",  # compared by `==` or a checker that compares
    "close",  # compared with a tolerance
    "under",  # the compared value is smaller than the operand, or equal
    "over",  # the compared value is larger than the operand, or equal
    "item",  # the operand is contained in something, or is its start or end
    "container",  # the operand contains the compared value
    "identical",  # compared by `is`
    "error",
    "warning",
    "pattern",  # a regular expression that must be found
    "type",  # the compared value must be an instance of the operand
]


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """An expression whose value a test expects: with another value there, any code that passed fails."""

    operand: ast.expr
    mode: Mode
    actual: ast.expr | None = None  # what it is compared with
    is_expected: bool = True  # False for the operand that seems to be the result of the code under test
    tolerance: float | None = 0.0  # absolute, for "close"; None if it is wide
    # The expression that the text of an "error" must match, which proves more than its class
    text: ast.expr | None = None
    uncounted: float = 0.0  # the largest difference that the uncounted digits of a "close" number can make


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """One expectation of a test in the expression `root`. Each of the edits here contradicts it."""

    root: ast.expr
    sites: tuple[Site, ...] = ()
    opposites: tuple[Edit, ...] = ()
    last: tuple[Edit, ...] = ()  # used where no other edit is possible: values equal to nothing
