"""The assertions of Rust tests, and edits that contradict them: first other values of what they expect, then opposite conditions."""

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from tree_sitter import Node

from pipeline.task import ContradictionKind
from workers.grading.controls.spans import Candidate, Cover, Edit, Span
from workers.grading.languages.language import MOST, MOST_PER_TEST, nodes, text_of
from workers.grading.languages.rust_syntax import (
    LITERALS,
    PATTERN_MACROS,
    arguments_of,
    attribute_name,
    items,
    name_of,
    parsed,
    parts_of,
    span_of,
    split,
    written,
)
from workers.grading.languages.rust_values import RustLiteral, RustValues

_PANICS = frozenset(("panic", "todo", "unimplemented", "unreachable"))
# Macros that read names only to write them.
_WRITES = frozenset(("dbg", "eprint", "eprintln", "print", "println", *_PANICS))
_UNWRAPS = {"unwrap_err": "unwrap", "expect_err": "expect"}
_NAMES = frozenset(("field_identifier", "identifier"))
_ASKING = frozenset(("contains", "ends_with", "eq", "eq_ignore_ascii_case", "starts_with"))


@dataclass(frozen=True, slots=True)
class _RustCheck:
    """An assertion. Each comparison in it has operands, any of which may be the expected one; an operand is one or more nodes."""

    span: Span
    comparisons: Sequence[Sequence[Sequence[Node]]]
    opposite: Edit | None
    tests: tuple[str, ...] = ()


@dataclass(slots=True)
class _RustProposal:
    edit: Edit
    kind: ContradictionKind
    tests: dict[str, None] = field(default_factory=dict[str, None])
    checked: dict[Span, None] = field(default_factory=dict[Span, None])


def contradictions(source: bytes, chance: random.Random) -> list[Candidate]:
    """A bounded number of contradictions of what the tests of a file expect; for each test, those that change a value come first."""
    try:
        return _RustWriter(source, chance).write()
    except RecursionError:  # an expression is nested too deeply
        return []


class _RustWriter:
    """Finds the assertions of one file, the literals that they expect, and edits that contradict them."""

    def __init__(self, source: bytes, chance: random.Random) -> None:
        self._source = source
        self._chance = chance
        root = parsed(source)
        found = [*items(root)]
        self._tests = [item for item in found if item.is_test]
        attributes = {item.node.id: item.attributes for item in self._tests}
        self._values = RustValues(root, attributes)
        for_tests = Cover(span_of(item.node) for item in found if item.is_for_tests)
        has_code = any(item.is_for_tests for item in found)  # beside its tests
        self._helpers: dict[str, list[Node]] = defaultdict(list)
        for one in nodes(root, "function_item"):
            is_public = any(part.type == "visibility_modifier" for part in one.children)
            is_helper = for_tests.has(span_of(one)) or not (has_code or is_public)
            if is_helper and one.id not in attributes and not one.has_error:
                self._helpers[text_of(one.child_by_field_name("name"))].append(one)
        self._tests_of: dict[int, dict[str, None]] = defaultdict(dict)
        for item in self._tests:
            for one in self._reached(item.node):
                self._tests_of[one.id][item.name] = None

    def write(self) -> list[Candidate]:
        checks = [*self._checks()]
        # The names of all expected values are known before any literal is taken.
        found = [
            (check, [[self._values.expected(operand) for operand in one] for one in check.comparisons])
            for check in checks
        ]
        of_values: dict[int, _RustProposal] = {}
        proposals = [*self._of_attributes()]
        for check, comparisons in found:
            covered: set[str] = set()
            for literal in chain(*map(self._expected, comparisons)):
                proposal = of_values.get(literal.node.id) or self._changed(literal.node)
                if proposal is not None:
                    of_values[literal.node.id] = proposal
                    tests = self._tests_with(literal)
                    proposal.tests.update(dict.fromkeys(tests))
                    proposal.checked[check.span] = None
                    covered.update(tests)
            if check.opposite is not None and not covered.issuperset(check.tests):
                proposals.append(self._proposal(check.opposite, "opposite", check.tests, check.span))
        return self._selected([*of_values.values(), *proposals])

    def _selected(self, found: list[_RustProposal]) -> list[Candidate]:
        self._chance.shuffle(found)
        found.sort(key=lambda one: (one.kind != "value", len(one.tests)))
        num_of: dict[tuple[str, str], int] = defaultdict(int)
        selected: list[Candidate] = []
        for one in found:
            if any(num_of[test, one.kind] < MOST_PER_TEST[one.kind] for test in one.tests):
                selected.append(
                    Candidate(tuple(one.tests), (one.edit,), one.kind, checked=tuple(one.checked))
                )
                for test in one.tests:
                    num_of[test, one.kind] += 1
        return selected[:MOST]

    def _reached(self, test: Node) -> Iterator[Node]:
        """The test and the functions for tests that it names, directly or not."""
        waiting, seen = [test], {test.id}
        while waiting:
            function = waiting.pop()
            yield function
            named = (text_of(one) for one in self._values.inside[function.id] if one.type in _NAMES)
            for name in dict.fromkeys(named):
                for other in self._helpers.get(name, ()):
                    if other.id not in seen:
                        seen.add(other.id)
                        waiting.append(other)

    def _checks(self) -> Iterator[_RustCheck]:
        for function in (*(test.node for test in self._tests), *chain(*self._helpers.values())):
            tests = tuple(self._tests_of[function.id])
            for node in self._values.inside[function.id] if tests else ():
                yield from (replace(check, tests=tests) for check in self._checks_of(node))

    def _checks_of(self, node: Node) -> Iterator[_RustCheck]:
        match node.type:
            case "call_expression":
                yield from self._of_call(node)
            case "macro_invocation" if name_of(node) in PATTERN_MACROS - {"matches"}:
                yield _RustCheck(span_of(node), [[_pattern_of(node)]], None)
            case "if_expression":
                yield from self._of_if(node)
            case "match_expression":
                arms = parts_of(node.child_by_field_name("body"))
                failing = [arm for arm in arms if _panics(arm.child_by_field_name("value"))]
                patterns = [arm.child_by_field_name("pattern") for arm in arms if arm not in failing]
                if failing:
                    yield _RustCheck(span_of(node), [[_without_bools(one)] for one in patterns], None)
            case "let_declaration" if _panics(node.child_by_field_name("alternative")):
                expected = _without_bools(node.child_by_field_name("pattern"))
                yield _RustCheck(span_of(node), [[expected]], None)
            case _:
                pass

    def _of_call(self, call: Node) -> Iterator[_RustCheck]:
        function, arguments = call.child_by_field_name("function"), arguments_of(call)
        name, span = name_of(call), span_of(call)
        if function is None:
            return
        if function.type == "field_expression":
            called = function.child_by_field_name("field")
            if called is not None and name in _UNWRAPS:
                # The value is missing now, and its type is the same.
                becomes = f"err().filter(|_| false).{_UNWRAPS[name]}"
                yield _RustCheck(span, [], Edit(*span_of(called), becomes))
            return
        if not self._is_macro(function):
            if name.startswith("assert") and name not in self._helpers and _is_checked_with(arguments):
                yield _RustCheck(span, [[arguments[-1:]]], None)
            return
        if name in _WRITES:
            self._values.only_shown([call])
        kind = re.sub("^(?:debug|prop)_", "", name)
        if not kind.startswith("assert") or not arguments or name in self._helpers:
            return
        first, second, *_ = *arguments, arguments[0]
        self._values.only_shown(arguments[1 if kind == "assert" else 2 :])
        if kind == "assert":
            yield _RustCheck(span, _compared(first, True), self._negated(first))
        elif kind == "assert_ne" and len(arguments) > 1:
            yield _RustCheck(span, [], self._compared_to_false(first, second))
        elif kind.endswith("_snapshot"):
            is_inline = "@" in self._text(arguments[-2:][0].end_byte, arguments[-1].start_byte)
            yield _RustCheck(span, [[[arguments[-1]]]] if is_inline else [], None)
        elif len(arguments) > 1:
            is_equal = kind in ("assert_eq", "assert_str_eq")
            opposite = self._compared_to_false(first, second) if is_equal else None
            yield _RustCheck(span, [[[first], [second]]], opposite)

    def _of_if(self, node: Node) -> Iterator[_RustCheck]:
        condition, otherwise = node.child_by_field_name("condition"), node.child_by_field_name("alternative")
        holds = otherwise is not None and _panics(otherwise.named_children[0])
        if condition is None or not (holds or _panics(node.child_by_field_name("consequence"))):
            return
        if condition.type == "let_condition":
            expected = _without_bools(condition.child_by_field_name("pattern"))
            yield _RustCheck(span_of(node), [[expected]] if holds else [], None)
        elif condition.type != "let_chain":
            yield _RustCheck(span_of(node), _compared(condition, holds), self._negated(condition))

    def _of_attributes(self) -> Iterator[_RustProposal]:
        """Contradictions of attributes by which a test must panic, or a case of it must have a result."""
        for item in self._tests:
            for one in item.attributes:
                span, tests, tree = span_of(one), [item.name], next(nodes(one, "token_tree"), None)
                literals: list[Node] = []
                if attribute_name(one) == "should_panic":
                    becomes = "\n" * text_of(one).count("\n")
                    yield self._proposal(Edit(*span, becomes), "opposite", tests, span)
                    literals = [*nodes(one, "string_literal", "raw_string_literal")]
                elif attribute_name(one) == "test_case" and tree is not None:
                    kinds = [part.type for part in tree.children]
                    # Without a name of its own, the result is a part of the name.
                    if "=>" in kinds and ";" in kinds:
                        literals = written(tree.children[kinds.index("=>") : kinds.index(";")])
                for literal in chain(*(nodes(part, *LITERALS) for part in literals)):
                    if (proposal := self._changed(literal)) is not None:
                        proposal.tests[item.name] = proposal.checked[span] = None
                        yield proposal

    def _changed(self, literal: Node) -> _RustProposal | None:
        becomes = self._values.other(literal, self._chance)
        return None if becomes is None else _RustProposal(Edit(*span_of(literal), becomes), "value")

    @staticmethod
    def _proposal(edit: Edit, kind: ContradictionKind, tests: Iterable[str], span: Span) -> _RustProposal:
        return _RustProposal(edit, kind, dict.fromkeys(tests), {span: None})

    def _negated(self, condition: Node) -> Edit:
        return Edit(*span_of(condition), f"!({self._text(*span_of(condition))})")

    def _compared_to_false(self, first: Node, second: Node) -> Edit:
        siblings = first.parent.children if first.parent is not None else []
        comma = next(one for one in siblings if one.type == "," and one.start_byte >= first.end_byte)
        left = self._text(first.start_byte, comma.start_byte)
        right = self._text(comma.end_byte, second.end_byte).lstrip(" ")
        return Edit(first.start_byte, second.end_byte, f"(&({left}) == &({right})), false")

    def _text(self, start: int, end: int) -> str:
        return self._source[start:end].decode()

    def _is_macro(self, function: Node) -> bool:
        return self._source[function.end_byte : function.end_byte + 1] == b"!"

    def _tests_with(self, literal: RustLiteral) -> Iterable[str]:
        """The tests whose outcome a literal may change: those of the function around it, or around the name of a constant with it."""
        for node in (literal.node, *(name.node for name in reversed(literal.names))):
            function = self._values.functions.get(node.id)
            if function is not None:
                return self._tests_of[function.id]
        return ()

    def _expected(self, operands: Sequence[Sequence[RustLiteral]]) -> Sequence[RustLiteral]:
        """The literals of the operand that is expected: the last one with a literal of its own, otherwise the last with any."""
        safe = [[one for one in literals if self._values.is_no_input(one)] for literals in operands]
        given = [literals for literals in safe if literals]
        own = [literals for literals in given if any(not one.names for one in literals)]
        return (own or given or [[]])[-1]


def _is_checked_with(arguments: Sequence[Node]) -> bool:
    """Whether a checker of another file seems to compare a computed value with its last argument. An array may be a list of inputs."""
    is_computed = any(next(nodes(one, "identifier"), None) is not None for one in arguments[:-1])
    return is_computed and next(nodes(arguments[-1], "array_expression"), None) is None


def _pattern_of(invocation: Node) -> list[Node]:
    """The literals and groups in the pattern of `matches!`."""
    return [one for group in split(invocation.named_children[-1])[1:2] for one in written(group)]


def _without_bools(pattern: Node | None) -> list[Node]:
    """The literals of a pattern. Another bool may leave a value without a pattern, which does not compile."""
    if pattern is not None and pattern.type == "match_pattern":
        pattern = pattern.named_children[0]  # without its condition
    return [] if pattern is None else [*nodes(pattern, *(LITERALS - {"boolean_literal"}))]


def _compared(condition: Node, holds: bool) -> list[list[list[Node]]]:
    """The comparisons that a condition makes, each of which is an expectation if the condition must hold or not."""
    left, right = condition.child_by_field_name("left"), condition.child_by_field_name("right")
    match condition.type:
        case "parenthesized_expression":
            return _compared(condition.named_children[0], holds)
        case "unary_expression" if text_of(condition.children[0]) == "!":
            return _compared(condition.named_children[0], not holds)
        case "binary_expression" if left is not None and right is not None:
            operator = text_of(condition.child_by_field_name("operator"))
            if operator == ("&&" if holds else "||"):
                return _compared(left, holds) + _compared(right, holds)
            return [[[left], [right]]] if operator == ("==" if holds else "!=") else []
        case "call_expression" if holds and name_of(condition) in _ASKING:
            return [[arguments_of(condition)[:1]]]
        case "macro_invocation" if holds and name_of(condition) == "matches":
            return [[_pattern_of(condition)]]
        case _:
            return []


def _panics(node: Node | None) -> bool:
    """Whether a block or an expression ends with a panic."""
    if node is None:
        return False
    if node.type in ("block", "expression_statement"):
        return any(map(_panics, node.named_children))
    return node.type == "call_expression" and name_of(node) in _PANICS
