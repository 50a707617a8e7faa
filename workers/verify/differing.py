"""Which parts of an expected value a run without the fix meets, although it does not meet the whole.

The run reports where the two values of a comparison differ: in which entries of collections, which fields of objects, and which letters of
texts. A contradiction of another part proves nothing, because code that cheats where they differ fails it as right code does.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from workers.grading.controls.scopes import Names, name_of_call, plain
from workers.grading.controls.spans import Cover, Span, TestFile, read

# The way to a part: `("key", repr)` of a dictionary, with "absent" if only one of two has the key; `("from", begin, end)` of a list or a
# text; `("field", name, place)` of an object. A difference is the index of an operand and the way to a part that the other does not have.
Step: TypeAlias = tuple[str | int, ...]
Way: TypeAlias = tuple[Step, ...]
Difference: TypeAlias = tuple[int, Way]
_EQUAL = {f"assert{kind}equal" for kind in ("", "dict", "list", "tuple", "sequence", "multiline")} | {
    "assertequals"
}
# One piece of a literal text, and one letter of it.
_PIECE = re.compile(
    r"""(?P<prefix>[rRuUbB]*)(?P<quote>'''|\"\"\"|'|\")(?P<body>(?:\\.|.)*?)(?P=quote)|\#[^\r\n]*""",
    re.DOTALL,
)
_LETTER = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|[0-7]{1,3}|\r\n|.)|."


def equal_operands(check: ast.expr) -> tuple[ast.expr, ...]:
    """The two expressions whose values a check compares by `==`; none if it is another check."""
    match check:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return left, right
        case ast.Call(args=[left, right, *_]) if plain(name_of_call(check)) in _EQUAL:
            return () if isinstance(left, ast.Starred) or isinstance(right, ast.Starred) else (left, right)
        case _:
            return ()


def met_parts(text: bytes, checks: Sequence[tuple[Span, Sequence[Difference]]]) -> list[Span]:
    """The written parts of expected values that are met in every one of these checks, as spans in bytes of a test file.

    `checks` have the span of each check that is not met as a whole, and where its values differ; of a check without a difference
    nothing is known. The caller runs it in a separate process.
    """
    file = read(text)
    if file is None:
        return []
    names = Names(file.tree)
    nodes = {
        (file.start(node), file.end(node)): node for node in ast.walk(file.tree) if isinstance(node, ast.expr)
    }
    met: list[Span] = []
    unmet: list[Span] = []
    for span, differences in checks:
        for side, operand in enumerate(equal_operands(nodes[span]) if span in nodes else ()):
            ways = [way for index, way in differences if index == side]
            for part, is_met in _parts(_written(operand, names), ways or [()], file):
                (met if is_met else unmet).append(part)
    cover = Cover(met)
    spoiled = [part for part in unmet if cover.has(part)]
    return [part for part in met if not any(part[0] <= one[0] and one[1] <= part[1] for one in spoiled)]


def _written(operand: ast.expr, names: Names) -> ast.expr:
    """The expression that was assigned to `operand` if that is a variable with a single assignment; otherwise `operand` itself."""
    if isinstance(operand, ast.Name):
        match [names.parent(one) for one in names.bindings_of(operand)]:
            case [ast.Assign(value=value, targets=[ast.Name()])]:
                return value
            case _:
                pass
    return operand


def _parts(node: ast.expr, ways: Sequence[Way], file: TestFile) -> Iterator[tuple[Span, bool]]:
    """The parts of an expression that differ in these `ways`, each with whether it is met."""
    whole = file.start(node), file.end(node)
    if not ways or () in ways:
        yield whole, not ways
        return
    parts = list(_inside(node, ways))
    known = {way for _, ours, _ in parts for way in ours}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _letters(node.value, whole, ways, file)
    elif known.issuperset(ways):
        for part, ours, is_name in parts:
            span = file.start(part), file.end(part)
            if is_name:
                yield span, not ours
            else:
                yield from _parts(part, [way[1:] for way in ours], file)
    else:
        yield whole, False


def _inside(node: ast.expr, ways: Sequence[Way]) -> Iterator[tuple[ast.expr, list[Way], bool]]:
    """The parts of a collection or a call, each with the ways that lead to it, and whether it is a key of a dictionary."""
    match node:
        case ast.Dict(keys=keys, values=values) if None not in keys:
            for key, value in zip(keys, values, strict=True):
                assert key is not None
                ours = [way for way in ways if way[0][:2] == ("key", _repr(key))]
                yield key, [way for way in ours if len(way[0]) == 3], True
                yield value, ours, False
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            if not any(isinstance(one, ast.Starred) for one in elements):
                for place, element in enumerate(elements):
                    yield element, [way for way in ways if _holds(way[0], place)], False
        case ast.Call(args=[value, *_]) if name_of_call(node) == "approx":
            yield from _inside(value, ways)
        case ast.Call(args=arguments, keywords=keywords):
            for place, value in enumerate(arguments):
                ours = [
                    way for way in ways if way[0][::2] == ("field", place) or way[0] == ("key", str(place))
                ]
                yield value, ours, False
            for keyword in keywords:
                names = ("field", keyword.arg), ("key", repr(keyword.arg))
                yield keyword.value, [way for way in ways if way[0][:2] in names], False
        case _:
            return


def _letters(text: str, whole: Span, ways: Sequence[Way], file: TestFile) -> Iterator[tuple[Span, bool]]:
    """The span of each letter of a literal text, and whether the run without the fix has that letter at the same place.

    If the literal is not made of plain letters, its whole span is one that the run does not have.
    """
    source = file.source[whole[0] : whole[1]].decode()
    places = list(_places(source))
    if "".join(letter for _, _, letter in places) != text:
        yield whole, False
        return
    for place, (begin, end, _) in enumerate(places):
        span = whole[0] + len(source[:begin].encode()), whole[0] + len(source[:end].encode())
        yield span, not any(_holds(way[0], place) for way in ways)


def _places(source: str) -> Iterator[tuple[int, int, str]]:
    """The letters of a literal text, which may be written in several pieces and with escapes, each with its range in the source."""
    for piece in _PIECE.finditer(source):
        if piece["quote"] is None:
            continue
        is_raw = "r" in piece["prefix"].lower()
        for one in re.compile("." if is_raw else _LETTER, re.DOTALL).finditer(source, *piece.span("body")):
            letter = one[0] if is_raw or one[0][0] != "\\" else ast.literal_eval(f'"""{one[0]}"""')
            for single in letter:
                yield one.start(), one.end(), single


def _holds(step: Step, place: int) -> bool:
    match step:
        case ("from", int(begin), int(end)):
            return begin <= place < end
        case _:
            return False


def _repr(key: ast.expr) -> str:
    try:
        return repr(ast.literal_eval(key))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ""
