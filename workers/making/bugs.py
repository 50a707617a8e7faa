"""The bugs that can be planted in a repository's code: edits of its text, each inside one function.

Most kinds are the changes by which `workers.verify --strength` makes wrong fixes; swapped statements, removed branches and removed bodies
are found here; what a model writes (`written_bugs.py`) becomes an edit, too. Text is edited, never printed anew from a syntax tree, so
that everything else keeps its form. Brackets, commas and blanks that only an edit would leave are removed, because they would show an agent
where the bug is.

A language is a line in `_LANGUAGES`: a function from the source of a file to its functions and the edits inside them.
"""

import ast
import functools
import hashlib
import itertools
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal, TypeAlias, get_args

from workers.grading.controls.spans import TestFile, read
from workers.tasksets.fleet import is_placed_as_test
from workers.verify.mutations import Mutated, bodies, meaning_of, mutations, tells_people, whole_lines

BugKind = Mutated | Literal["swap", "branch", "body", "model"]
KINDS: tuple[BugKind, ...] = (*get_args(Mutated), "swap", "branch", "body")  # those that need no author
_NOT_OURS = re.compile(
    r"(?:^|/)(?:_?vendor(?:ed)?|third[_-]?party|_?extern(?:al|s)?|node_modules|site-packages|build|dist|_?generated|docs?|examples?)/"
    r"|(?:_pb2|_pb2_grpc|(?:^|/)_?version|(?:^|/)setup)\.py$",
    re.IGNORECASE,
)
_GENERATED = re.compile(rb"@generated|\bgenerated (?:by|from|with|using)\b|\bdo not edit\b", re.IGNORECASE)
_HEAD_BYTES = 1000  # where a generated file says so
# Statements whose removal is no bug, or one that the compiler finds.
_NO_LOSS = re.compile(rb"""\s*(?:(?:elif|import|from|pass|global|nonlocal)\b|['"])""")
_IF = re.compile(rb"\s*if\b")
_BRANCH = re.compile(rb"\s*(?:elif|else)\b")
_BRACKETED: Collection[BugKind] = ("operator", "condition", "return")  # kinds whose edits add brackets

Place: TypeAlias = tuple[BugKind, int, int, bytes]
"""The kind of an edit, the first byte and the end of what it replaces, and what is put there."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a file; `name` has the classes and functions around it, as in `Shop.order`."""

    path: str
    name: str
    line: int  # the first one, decorators included, as in its code object
    start: int  # the bytes of its body
    end: int

    @property
    def called(self) -> str:
        """The name by which it is called: that of the class for the methods that make or call objects."""
        *around, name = self.name.split(".")
        return around[-1] if around and name in ("__init__", "__new__", "__post_init__", "__call__") else name


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """An edit that replaces the bytes from `start` to `end` of the function's file by `becomes`."""

    kind: BugKind
    function: Function
    start: int
    end: int
    becomes: bytes

    def touches(self, other: "PlantedBug") -> bool:
        """Whether the other bug is in the same function or text."""
        is_apart = self.end <= other.start or other.end <= self.start
        return self.function == other.function or (self.function.path == other.function.path and not is_apart)


def is_product(path: str, source: bytes) -> bool:
    """Whether the file is code of the repository's own: no test, no generated file, nothing taken from others, in a known language."""
    return (
        posixpath.splitext(path)[1] in _LANGUAGES
        and not is_placed_as_test(path)
        and not _NOT_OURS.search(path)
        and not _GENERATED.search(source[:_HEAD_BYTES])
    )


def functions_and_bugs(path: str, source: bytes) -> tuple[list[Function], list[PlantedBug]]:
    """The functions of a file, outer ones first, and the bugs inside each; none if the source cannot be parsed or is nested too deeply."""
    try:
        functions, places = _LANGUAGES[posixpath.splitext(path)[1]](path, source)
    except RecursionError:
        return [], []
    found: dict[tuple[int, int, bytes], PlantedBug] = {}
    for kind, start, end, becomes in places:
        around = [one for one in functions if one.start <= start and end <= one.end]
        if around:
            found.setdefault((start, end, becomes), PlantedBug(kind, around[-1], start, end, becomes))
    return functions, list(found.values())


def in_turn(bugs: Iterable[PlantedBug], seed: int) -> list[PlantedBug]:
    """The bugs in an order that depends on them and the seed alone: one of each function, a second one of each, and so on. Of a function,
    one of each kind comes before a second of any kind.
    """
    turns = Counter[tuple[Function, BugKind]]()
    by_function: dict[Function, list[tuple[int, str, PlantedBug]]] = defaultdict(list)
    for bug in sorted(bugs, key=lambda bug: _rank(seed, bug)):
        kind = (bug.function, bug.kind)
        by_function[bug.function].append((turns[kind], _rank(seed, kind), bug))
        turns[kind] += 1
    functions = sorted(by_function, key=lambda function: _rank(seed, function))
    columns = [sorted(by_function[function], key=itemgetter(0, 1)) for function in functions]
    return [bug for some in itertools.zip_longest(*columns) for *_, bug in filter(None, some)]


def _rank(seed: int, one: object) -> str:
    return hashlib.sha256(f"{seed}:{one}".encode()).hexdigest()


def with_bugs(source: bytes, bugs: Iterable[PlantedBug]) -> bytes:
    """The source with these bugs, which do not overlap."""
    for bug in sorted(bugs, key=lambda bug: bug.start, reverse=True):
        source = source[: bug.start] + bug.becomes + source[bug.end :]
    return source


def tidied(source: bytes, bug: PlantedBug) -> PlantedBug | None:
    """The bug as somebody would have written it; None if the code does not parse with it, or means the same to tests as without it."""
    meaning = meaning_of(with_bugs(source, [bug]))
    if meaning is None or meaning == _meaning(source):
        return None
    tree = _dumped(with_bugs(source, [bug]))
    at = 0
    while at < len(variants := list(_variants(source, bug))):
        if _dumped(with_bugs(source, [variants[at]])) == tree:
            bug, at = variants[at], 0
        else:
            at += 1
    return bug


_meaning = functools.lru_cache(maxsize=16)(meaning_of)


def _dumped(source: bytes) -> str:
    file = read(source)
    return ast.dump(file.tree) if file else ""


def _variants(source: bytes, bug: PlantedBug) -> Iterator[PlantedBug]:
    """The same edit with a blank, a comma or a pair of brackets less."""
    if bug.becomes == b" ":
        yield replace(
            bug, end=bug.end + len(source[bug.end :]) - len(source[bug.end :].lstrip(b" ")), becomes=b""
        )
    before, text = source[: bug.start].rstrip(), source[bug.start : bug.end].rstrip().rstrip(b",")
    if (
        bug.kind == "argument"
        and not bug.becomes
        and before[-1:] == b","
        and source[bug.end : bug.end + 1] == b")"
    ):
        yield replace(bug, start=len(before) - 1, end=bug.start + len(text))
    if bug.kind in _BRACKETED:
        if source[bug.start - 1 : bug.start] + source[bug.end : bug.end + 1] == b"()":
            yield replace(bug, start=bug.start - 1, end=bug.end + 1)
        for start in range(len(bug.becomes)):
            if bug.becomes[start : start + 1] == b"(" and (end := _closing(bug.becomes, start)):
                text = bug.becomes
                yield replace(bug, becomes=text[:start] + text[start + 1 : end] + text[end + 1 :])


def _closing(text: bytes, start: int) -> int:
    """The index of the bracket that closes the one at `start`; 0 if there is none."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at : at + 1] == b"(") - (text[at : at + 1] == b")")
        if depth == 0:
            return at
    return 0


def _in_python(path: str, source: bytes) -> tuple[list[Function], list[Place]]:
    file = read(source)
    if file is None:
        return [], []
    places = [*_mutated(file)]
    for node in ast.walk(file.tree):
        places += [*_swaps(file, node), *_branches(file, node), *_without_body(file, node)]
    return list(_functions(path, file, file.tree, "")), places


_LANGUAGES: Mapping[str, Callable[[str, bytes], tuple[list[Function], list[Place]]]] = {".py": _in_python}


def _functions(path: str, file: TestFile, node: ast.AST, around: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        name = around
        match child:
            case ast.FunctionDef(body=[first, *_]) | ast.AsyncFunctionDef(body=[first, *_]):
                line = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                lines = whole_lines(file, first, child.body[-1])
                start = lines[0] if lines else file.line_starts[first.lineno - 1] + first.col_offset
                yield Function(
                    path, around + child.name, line, start, file.line_starts[child.end_lineno or 0]
                )
                name = f"{around}{child.name}."
            case ast.ClassDef():
                name = f"{around}{child.name}."
            case _:
                pass
        yield from _functions(path, file, child, name)


def _mutated(file: TestFile) -> Iterator[Place]:
    """The mutations that somebody may have written: no constant condition, no text with a letter more, no `pass` in a statement's place."""
    lines = range(1, len(file.line_starts) + 1)
    for one in mutations(file.source, lines, lines):
        was, kind = file.source[one.start : one.end], one.kind
        if kind == "condition" and one.becomes in (b"True", b"False"):
            continue
        if kind == "constant" and (was == b"None" or one.becomes[-1:] in (b"'", b'"')):
            continue
        if kind == "line" and (one.becomes or _NO_LOSS.match(was)):
            continue
        yield "branch" if kind == "line" and _IF.match(was) else kind, one.start, one.end, one.becomes


def _swaps(file: TestFile, node: ast.AST) -> Iterator[Place]:
    """Neighbouring statements swapped, of which one uses what the other changes."""
    for body in bodies(node):
        for first, second in itertools.pairwise(body):
            if tells_people(first) or tells_people(second):
                continue
            if not (_changed(first) & _named(second) or _changed(second) & _named(first)):
                continue
            above, below = whole_lines(file, first, first), whole_lines(file, second, second)
            if above and below and file.source[below[1] - 1 : below[1]] == b"\n":
                texts = (slice(*below), slice(above[1], below[0]), slice(*above))
                yield "swap", above[0], below[1], b"".join(file.source[text] for text in texts)


def _changed(statement: ast.stmt) -> set[str]:
    """What a simple statement assigns to, or calls a method of; nothing for others."""
    match statement:
        case ast.Assign(targets=targets):
            found: Sequence[ast.expr] = [
                one for target in targets for one in getattr(target, "elts", [target])
            ]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            found = [target]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=of))):
            found = [of]
        case _:
            found = []
    return {ast.unparse(one.value if isinstance(one, ast.Subscript) else one) for one in found}


def _named(statement: ast.stmt) -> set[str]:
    if not isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr):
        return set()
    return {ast.unparse(one) for one in ast.walk(statement) if isinstance(one, ast.Name | ast.Attribute)}


def _branches(file: TestFile, node: ast.AST) -> Iterator[Place]:
    """A branch `elif` or `else`, or one of several handlers, left out."""
    match node:
        case ast.If(orelse=[*_, last]) if header := _header(file, node):
            inner = node.orelse[0]
            is_elif = isinstance(inner, ast.If) and inner.lineno == header
            after = _header(file, inner) if isinstance(inner, ast.If) and is_elif else 0
            stop = after - 1 if after else last.end_lineno or 0
            yield "branch", file.line_starts[header - 1], file.line_starts[stop], b""
        case ast.Try(handlers=[_, _, *_] as handlers):
            for one in handlers:
                start, stop = file.line_starts[one.lineno - 1], file.line_starts[one.end_lineno or 0]
                yield "branch", start, stop, b""
        case _:
            pass


def _header(file: TestFile, node: ast.If) -> int:
    """The number of the line that begins the `elif` or `else` of an `if`; 0 if it has none of its own."""
    if not node.orelse:
        return 0
    for number in range(node.orelse[0].lineno, node.body[-1].end_lineno or 0, -1):
        line = file.source[file.line_starts[number - 1] : file.line_starts[number]]
        if _BRANCH.match(line):
            return number
    return 0


def _without_body(file: TestFile, node: ast.AST) -> Iterator[Place]:
    """A function of two lines or more that has to be written anew; only one whose docstring says what it does."""
    match node:
        case (
            ast.FunctionDef(body=[ast.Expr(value=ast.Constant(value=str())), first, *_] as body)
            | ast.AsyncFunctionDef(body=[ast.Expr(value=ast.Constant(value=str())), first, *_] as body)
        ) if (lines := whole_lines(file, first, body[-1])) and (body[-1].end_lineno or 0) > first.lineno:
            start, end = lines
            line_end = b"\r\n" if file.source[start:end].endswith(b"\r\n") else b"\n"
            indentation = file.source[start : start + first.col_offset]
            yield "body", start, end, indentation + b"raise NotImplementedError" + line_end
        case _:
            pass
