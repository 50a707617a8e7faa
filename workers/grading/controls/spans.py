"""Where the nodes of a parsed test file lie in its bytes, and edits of them that keep its lines."""

import ast
import re
import tokenize
import warnings
from dataclasses import dataclass
from io import BytesIO

_MARK = b"\xef\xbb\xbf"
_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class Edit:
    """The bytes from `start` to `end` become `becomes`."""

    start: int
    end: int
    becomes: str


@dataclass(frozen=True, slots=True)
class TestFile:
    """A parsed test file and where its lines start."""

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
        """Whether the node's text parses to the node: inside f-strings, Python 3.11 gives wrong places."""
        parsed = parse_expression(self.text(node))
        return parsed is not None and ast.dump(parsed) == ast.dump(node)

    def stays_sound(self, root: ast.expr, edit: Edit) -> bool:
        """Whether the expression `root` is another expression on as many lines after the edit."""
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
        if tokenize.detect_encoding(BytesIO(source).readline)[0] not in ("utf-8", "utf-8-sig"):
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
    """The expression that `text` is inside parentheses; None if it is none."""
    try:
        tree = _parse(f"({text}\n)", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    assert isinstance(tree, ast.Expression)
    return tree.body


def _parse(text: str, mode: str) -> ast.AST:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in strings of the test file
        return compile(text, "<test file>", mode, ast.PyCF_ONLY_AST, dont_inherit=True)


def _line_ends(text: str) -> list[str]:
    return _LINE_END.findall(text)
