"""JavaScript and TypeScript: contradictions of what their tests expect.

Only what an assertion expects is changed, never what the code under test gets. A value is changed where it is written: in the assertion, in
a variable or a table that nothing but assertions reads, or in the call of a helper function that passes it on to an assertion.
"""

import posixpath
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tree_sitter import Node

from pipeline.task import ContradictionKind
from workers.grading.controls.scopes import listed
from workers.grading.controls.spans import Candidate, Cover, Edit
from workers.grading.languages import javascript_logs
from workers.grading.languages.javascript_checks import (
    CLOSE,
    LITERALS,
    Check,
    Checks,
    random_word,
)
from workers.grading.languages.javascript_source import (
    TRANSPARENT,
    Block,
    Region,
    Source,
    items,
    key_of,
    member,
    parsed,
    part,
    unwrapped,
)
from workers.grading.languages.language import (
    MOST,
    MOST_PER_TEST,
    DeclaredTest,
    Form,
    nodes,
    other_number,
    other_text,
    text_of,
)

_TEST_PATH = re.compile(
    r"(?:^|/)(?:__tests__|tests?|specs?|e2e|cypress)/|(?:^|[/._-])(?:tests?|specs?)[._-][^/]*$|[._-](?:test|spec)s?\.\w+$"
)
# Functions that make a value of their arguments, and do not belong to the code under test.
_MAKERS = listed(
    """Date Set Map Error TypeError RangeError SyntaxError BigInt Number String Array Uint8Array Float32Array Buffer.from Object.freeze
    Promise.resolve JSON.stringify Symbol.for URL RegExp expect.objectContaining expect.arrayContaining expect.stringContaining
    expect.stringMatching expect.closeTo"""
)
_FLIPPED = {"true": "false", "false": "true", **dict.fromkeys(("null", "undefined", "NaN", "Infinity"), "0")}
_KINDS: tuple[ContradictionKind, ...] = ("value", "opposite", "nothing")
# For tests with computed titles, which may be the cases of a table.
_MOST_PER_TABLE: Mapping[ContradictionKind, int] = {**MOST_PER_TEST, "value": 20}
_MOST_PER_CHECK = 20  # largest number of literals that are considered per assertion
_MOST_TRIES = 20  # largest number of tries to draw a literal that the tests do not contain
_DEEPEST = 6  # largest number of variables that are followed one after the other
# Letters of a regular expression that stand for themselves; others are in classes, names of groups and escapes.
_WORD = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\(\?<?\w*|\{[\d,]*\}|(?P<word>[A-Za-z]{2,})", re.DOTALL)


class JavaScript:
    """The language JavaScript, with TypeScript."""

    endings = (".js", ".jsx", ".cjs", ".mjs", ".ts", ".tsx", ".cts", ".mts")

    def may_hold_tests(self, path: str) -> bool:
        is_source = path.endswith(self.endings) and not path.endswith(".d.ts") and "node_modules/" not in path
        return is_source and _TEST_PATH.search(posixpath.normpath(path)) is not None

    def tests(self, source: bytes) -> list[DeclaredTest]:
        root = parsed(source)
        return [] if root is None else [one.test for one in Source(root).tests if one.test is not None]

    def forms(self, name: str) -> list[Form]:
        return javascript_logs.forms(name)

    def outcomes(self, log: str) -> dict[str, str]:
        return javascript_logs.outcomes(log)

    def candidates(self, source: bytes, chance: random.Random) -> list[Candidate]:
        root = parsed(source)
        return [] if root is None else _Contradictions(root, chance).write()


LANGUAGE = JavaScript()


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A literal that is a part of an expected value. `node` is replaced; it is the literal, or a variable with its value."""

    node: Node
    literal: Node
    called_in: Region | None = None  # the place of the call whose argument it is


class _Contradictions:
    """Finds the assertions of a file and edits that contradict them."""

    def __init__(self, root: Node, chance: random.Random) -> None:
        self._chance = chance
        self._source = Source(root)
        self._source.find_tests_of_places()
        self._errors = Cover(
            (node.start_byte, node.end_byte) for node in nodes(root, "ERROR") if root.has_error
        )
        self._checks = Checks(self._source, text_of(root), chance).all()
        self._expected = Cover(
            (one.start_byte, one.end_byte) for check in self._checks for one in check.expected
        )
        self._only_expected: dict[tuple[str, int, str], bool] = {}

    def write(self) -> list[Candidate]:
        found = [*self._of_leaves()]
        for check in self._checks:
            tests = check.call.place.tests
            found += [Candidate(tests, (edit,), kind, checked=(check.span,)) for kind, edit in check.changes]
        return self._selected([one for one in found if one.tests and self._is_sound(one.edits[0])])

    def _is_sound(self, edit: Edit) -> bool:
        return not self._errors.has((edit.start, edit.end))

    def _selected(self, found: list[Candidate]) -> list[Candidate]:
        """Selects a limited number of candidates for each test and kind, first those of few tests."""
        tables = {one.test.name for one in self._source.tests if one.test is not None and one.test.pattern}
        self._chance.shuffle(found)
        found.sort(key=lambda one: (_KINDS.index(one.kind), len(one.tests)))
        num_of: dict[tuple[str, str], int] = defaultdict(int)
        selected: dict[tuple[Edit, ...], Candidate] = {}
        for one in found:
            most = _MOST_PER_TABLE if tables.intersection(one.tests) else MOST_PER_TEST
            if one.edits not in selected and any(
                num_of[test, one.kind] < most[one.kind] for test in one.tests
            ):
                selected[one.edits] = one
                for test in one.tests:
                    num_of[test, one.kind] += 1
        return [*selected.values()][:MOST]

    def _of_leaves(self) -> Iterator[Candidate]:
        """Yields contradictions of the literals of which expected values consist."""
        leaves: dict[int, _Leaf] = {}
        checks: dict[int, list[Check]] = defaultdict(list)
        for check in self._checks:
            found = [leaf for one in check.expected for leaf in self._leaves(one, check.call.scope)]
            for leaf in self._chance.sample(found, min(len(found), _MOST_PER_CHECK)):
                leaves[leaf.node.start_byte] = leaf
                checks[leaf.node.start_byte].append(check)
        for start, leaf in leaves.items():
            first, *_ = some = checks[start]
            places = [leaf.called_in] if leaf.called_in is not None else [one.call.place for one in some]
            taken = {text for place in places for text in place.literals}
            tries = (self._changed(leaf.literal, first.name in CLOSE) for _ in range(_MOST_TRIES))
            becomes = next(
                (one for one in tries if one not in taken), self._changed(leaf.literal, first.name in CLOSE)
            )
            if becomes is not None and becomes.count("\n") == text_of(leaf.node).count("\n"):
                tests = tuple(dict.fromkeys(test for place in places for test in place.tests))
                edit = Edit(start, leaf.node.end_byte, becomes)
                spans = tuple(dict.fromkeys(one.span for one in some))
                yield Candidate(tests, (edit,), "value", checked=spans)

    def _leaves(self, expression: Node, scope: Block) -> Iterator[_Leaf]:
        """Yields the literals of which the value of an expression consists."""
        waiting: list[tuple[Node, Block, Region | None, int]] = [(expression, scope, None, 0)]
        while waiting:
            node, scope, place, depth = waiting.pop()
            inside: list[Node] = []
            if node.type in LITERALS or text_of(node) in ("NaN", "Infinity"):
                yield _Leaf(node, node, place)
            elif node.type in ("array", "object"):
                inside = items(node)
                if not inside:
                    yield _Leaf(node, node, place)
            elif node.type in TRANSPARENT or node.type == "spread_element":
                inside = items(node)[:1]
            elif node.type == "pair":
                inside = [part(node, "value")]
            elif node.type == "unary_expression" and text_of(part(node, "operator")) == "-":
                inside = [part(node, "argument")]
            elif node.type == "binary_expression" and text_of(part(node, "operator")) == "+":
                inside = [part(node, "left"), part(node, "right")]
            elif node.type in ("new_expression", "call_expression"):
                inside = _made_of(node)
            elif depth < _DEEPEST:
                followed = self._followed(node, scope, place)
                waiting += [(*one, depth + 1) for one in followed]
                constant = scope.constant(node)
                if not followed and constant is not node and constant.type in LITERALS:
                    yield _Leaf(node, constant, place)
            waiting += [(one, scope, place, depth) for one in inside]

    def _followed(
        self, node: Node, scope: Block, place: Region | None
    ) -> list[tuple[Node, Block, Region | None]]:
        """Returns the expressions whose values a variable or a member of one has, if only assertions read them."""
        path: list[str] = []
        while node.type in ("member_expression", "subscript_expression"):
            node, key = member(node)
            path.insert(0, key)
        found = scope.find(text_of(node)) if node.type.endswith("identifier") and all(path) else None
        if found is None:
            return []
        binding, declaring = found
        keys = [*binding.path, *path]
        if binding.shown.intersection(keys) or not self._is_only_expected(
            text_of(node), declaring, path[0] if path else ""
        ):
            return []
        if binding.called:
            number, keys = int(keys[0]), keys[1:]
            calls = self._source.called[binding.called]
            given = [(items(part(one.node, "arguments"))[number : number + 1], one) for one in calls]
            starts = [(one, call.scope, call.place) for some, call in given for one in some]
        elif binding.value is None:
            return []
        elif binding.is_element:
            return [
                (one, binding.scope, place) for one in _cells(binding.scope.constant(binding.value), keys)
            ]
        else:
            starts = [(binding.value, binding.scope, place)]
        reached = [(_at(one, keys), inner, calling) for one, inner, calling in starts]
        return [(one, inner, calling) for one, inner, calling in reached if one is not None]

    def _is_only_expected(self, name: str, scope: Block, key: str) -> bool:
        """Whether nothing but expected values reads a variable of `scope`, or its member `key`."""
        asked = (name, scope.start, key)
        if asked not in self._only_expected:
            declared_at = scope.bindings[name].declared_at
            self._only_expected[asked] = all(
                self._expected.has((start, start + 1))
                for start, read in self._source.uses_in(name, scope)
                if start != declared_at and (not key or read in ("", key))
            )
        return self._only_expected[asked]

    def _changed(self, literal: Node, is_close: bool) -> str | None:
        """Returns another literal of the same type; None if there is none that is sure to differ."""
        text = text_of(literal)
        if literal.type == "number" and is_close and (digit := re.search(r"\d", text)) is not None:
            other = str((int(digit[0]) + self._chance.randint(2, 8)) % 10)
            return text[: digit.start()] + other + text[digit.end() :]
        if literal.type == "number":
            if re.match(r"0[obOB]", text) is not None:
                return str(int(text.rstrip("n"), 0) + 1) + "n" * text.endswith("n")
            return other_number(text, self._chance)
        if literal.type == "string":
            return f"{text[0]}{other_text(text[1:-1], self._chance) or text[1:-1] + random_word(self._chance)}{text[-1]}"
        if literal.type == "template_string":
            return self._other_template(literal)
        if literal.type == "regex":
            return self._other_regex(text)
        if literal.type in ("array", "object"):
            return "[0]" if literal.type == "array" else f"{{ {random_word(self._chance)}: 0 }}"
        return _FLIPPED.get(text)

    def _other_template(self, literal: Node) -> str | None:
        text = text_of(literal).encode()
        fragments = [one for one in literal.children if one.type == "string_fragment"]
        others = [(one, other) for one in fragments if (other := other_text(text_of(one), self._chance))]
        if not others:
            return None if fragments else f"{text[:-1].decode()}{random_word(self._chance)}`"
        one, other = self._chance.choice(others)
        start, end = one.start_byte - literal.start_byte, one.end_byte - literal.start_byte
        return (text[:start] + other.encode() + text[end:]).decode()

    def _other_regex(self, text: str) -> str | None:
        words = [found for found in _WORD.finditer(text, 0, text.rindex("/")) if found["word"]]
        if not words:
            return None
        found = self._chance.choice(words)
        return f"{text[: found.start()]}{other_text(found[0], self._chance)}{text[found.end() :]}"


def _made_of(node: Node) -> list[Node]:
    """The arguments of which a call of a known function makes its value."""
    function = part(node, "constructor" if node.type == "new_expression" else "function")
    arguments = items(node.child_by_field_name("arguments"))
    if text_of(function) in _MAKERS:
        return arguments if node.type == "new_expression" else arguments[:1]
    owner = member(function)[0] if function.type == "member_expression" else node
    return [owner] if owner.type == "array" and member(function)[1] in ("join", "sort") else []


def _cells(table: Node, keys: list[str]) -> list[Node]:
    """The expressions under `keys` in the rows of a table: an array, or a template with the names of columns in its first line."""
    table = unwrapped(table)
    if table.type != "template_string":
        return [one for row in items(table) if table.type == "array" and (one := _at(row, keys)) is not None]
    columns = [name.strip() for name in text_of(table).lstrip("`").strip().split("\n")[0].split("|")]
    values = [items(one)[0] for one in items(table) if one.type == "template_substitution" and items(one)]
    if not keys or keys[0] not in columns:
        return []
    return [
        one
        for row in values[columns.index(keys[0]) :: len(columns)]
        if (one := _at(row, keys[1:])) is not None
    ]


def _at(node: Node, keys: list[str]) -> Node | None:
    """The expression under `keys` in nested arrays and objects; None if it is not written there."""
    for key in keys:
        node = unwrapped(node)
        if node.type == "array" and key.isdecimal():
            inside = items(node)[int(key) : int(key) + 1]
        else:
            pairs = [one for one in items(node) if node.type == "object" and one.type == "pair"]
            inside = [part(one, "value") for one in pairs if key_of(part(one, "key")) == key]
        if not inside:
            return None
        node = inside[0]
    return node
