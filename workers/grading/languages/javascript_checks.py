"""The assertions of a JavaScript or TypeScript file: what each expects, and edits that contradict it as a whole.

Known are `expect` of jest, vitest, chai and supertest, `should` of chai and should.js, the functions of `assert` in node, chai and uvu, and
the methods of the argument of a test in node, tape, tap, ava and QUnit.
"""

import random
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tree_sitter import Node

from pipeline.task import ContradictionKind
from workers.grading.controls.scopes import listed
from workers.grading.controls.spans import Edit, Span
from workers.grading.languages.javascript_source import (
    FUNCTIONS,
    TRANSPARENT,
    CallSite,
    Source,
    items,
    member,
    part,
)
from workers.grading.languages.language import nodes, text_of

_FIRST, _SECOND, _ALL = slice(0, 1), slice(1, 2), slice(None)
# What is expected, among the arguments of a method after `expect(x)` or `x.should`.
_MATCHERS: Mapping[str, slice] = {
    **dict.fromkeys(
        listed("""
        toBe toEqual toStrictEqual toHaveLength toBeCloseTo toContain toContainEqual toMatch toMatchObject toThrow toThrowError
        toHaveBeenCalledTimes toBeCalledTimes toHaveReturnedTimes toMatchInlineSnapshot toThrowErrorMatchingInlineSnapshot
        toHaveTextContent toHaveValue toHaveClass toHaveReturnedWith toHaveLastReturnedWith equal equals eq eql eqls exactly lengthOf
        lengthof length include includes contain contains members match string closeTo approximately callCount containEql
        """),
        _FIRST,
    ),
    **dict.fromkeys(
        listed("""
        throw throws Throw rejectedWith keys toHaveBeenCalledWith toBeCalledWith toHaveBeenLastCalledWith lastCalledWith calledWith
        calledWithExactly calledOnceWith calledOnceWithExactly
        """),
        _ALL,
    ),
    **dict.fromkeys(listed("toHaveBeenNthCalledWith nthCalledWith"), slice(1, None)),
    **dict.fromkeys(listed("toHaveProperty toHaveAttribute toHaveStyle property"), _SECOND),
}
# The same for a method of `assert` or of the argument of a test, or for such a function alone.
_CHECKERS: Mapping[str, slice] = {
    **dict.fromkeys(
        listed("""
        equal equals strictEqual deepEqual deepStrictEqual partialDeepStrictEqual is same strictSame deepEquals deepLooseEqual
        looseEqual looseEquals isEqual isEquivalent propEqual eql include deepInclude lengthOf like match matches regex closeTo
        sameMembers sameDeepMembers sameOrderedMembers typeOf throws throwsAsync rejects
        """),
        _SECOND,
    ),
    **dict.fromkeys(listed("propertyVal deepPropertyVal"), slice(2, 3)),
}
_TRUE = listed("assert ok isOk truthy true isTrue")  # expect that their first argument is true
_THROWING = listed("throws throwsAsync rejects throw Throw rejectedWith toThrow toThrowError")
CLOSE = listed("toBeCloseTo closeTo approximately")  # compare with a tolerance
_NUMBERS = (
    *listed(
        "toHaveLength toHaveBeenCalledTimes toBeCalledTimes toHaveReturnedTimes lengthOf lengthof length callCount"
    ),
    *CLOSE,
)
# Methods of `assert` with their opposites. An equality is contradicted by a value; it is here as the opposite of its opposite.
_EQUALITIES = {
    **{
        name: f"not{name[0].upper()}{name[1:]}"
        for name in listed("equal strictEqual deepEqual deepStrictEqual same include")
    },
    "match": "doesNotMatch",
}
_OPPOSITES = {
    **{f"is{name}": f"isNot{name}" for name in listed("Ok Null Empty Array Object Function String Number")},
    **{
        "throws": "doesNotThrow",
        "rejects": "doesNotReject",
        "ok": "notOk",
        "true": "false",
        "truthy": "falsy",
        "isTrue": "isFalse",
    },
    **{
        "isUndefined": "isDefined",
        "instanceOf": "notInstanceOf",
        "property": "notProperty",
        "exists": "notExists",
    },
}
_EQUALITIES_OF_AVA = {"is": "not", "deepEqual": "notDeepEqual", "regex": "notRegex"}
_OPPOSITES_OF_AVA = {
    "throws": "notThrows",
    "throwsAsync": "notThrowsAsync",
    "true": "false",
    "truthy": "falsy",
}
_RECEIVERS = listed("assert strict t tap chai should a st tt qt test expect")
_NEGATIONS = ("not", "never")
LITERALS = listed("string template_string number regex true false null undefined")
_WRITTEN = (*LITERALS, "array", "object")
# An expression with one of these stays as it is, because something else depends on its evaluation.
_EFFECTS = listed("assignment_expression update_expression await_expression")

_Change: TypeAlias = tuple[ContradictionKind, Edit]


@dataclass(frozen=True, slots=True)
class Check:
    """An assertion."""

    call: CallSite
    name: str  # of its function or method
    expected: tuple[Node, ...] = ()  # the expressions whose literals may be changed
    changes: tuple[_Change, ...] = ()  # each contradicts it as a whole

    @property
    def span(self) -> Span:
        return self.call.node.start_byte, self.call.node.end_byte


def random_word(chance: random.Random) -> str:
    return "".join(chance.choices(string.ascii_lowercase, k=4))


class Checks:
    """Recognises the assertions of a file."""

    def __init__(self, source: Source, text: str, chance: random.Random) -> None:
        self._source = source
        self._chance = chance
        self._is_chai = re.search(r"['\"]chai['\"]", text) is not None
        is_ava = re.search(r"['\"]ava['\"]", text) is not None
        self._opposites = _OPPOSITES_OF_AVA if is_ava else _OPPOSITES
        equalities = _EQUALITIES_OF_AVA if is_ava else _EQUALITIES
        self._reversed = {opposite: name for name, opposite in {**equalities, **self._opposites}.items()}

    def all(self) -> list[Check]:
        return [check for call in self._source.calls if (check := self._check(call)) is not None]

    def _check(self, call: CallSite) -> Check | None:
        """Returns what a call checks; None if it is no assertion."""
        node = call.node
        if not call.place.tests:
            return None
        if node.type == "member_expression":
            links = _links(node)
            return None if links is None else self._of_word(call, links)
        function, arguments = part(node, "function"), items(node.child_by_field_name("arguments"))
        if function.type == "identifier":
            name = text_of(function)
            is_checker = name in _CHECKERS or name in ("assert", "ok") or name in self._reversed
            is_own = name in self._source.functions
            return self._of_checker(call, function, name, arguments) if is_checker and not is_own else None
        if function.type not in ("member_expression", "subscript_expression"):
            return None
        owner, name = member(function)
        if name == "expect" and owner.type == "call_expression":
            expected = arguments[1:] if len(arguments) > 1 and arguments[0].type == "string" else arguments
            return Check(call, name, tuple(expected))
        if name in _MATCHERS or name[:2] == "to":
            links = _links(function)
            if links is not None:
                return self._of_matcher(call, name, links, arguments)
        last = member(owner)[1] if owner.type == "member_expression" else text_of(owner)
        if last in _RECEIVERS or last in call.place.parameters:
            named = function.child_by_field_name("property") or part(function, "index")
            return self._of_checker(call, named, name, arguments)
        return None

    def _of_word(self, call: CallSite, links: list[Node]) -> Check:
        word = part(call.node, "property")
        changes: list[_Change] = [("opposite", _negated(links))]
        if text_of(word) in ("true", "false"):
            other = "false" if text_of(word) == "true" else "true"
            changes.append(("value", Edit(word.start_byte, word.end_byte, other)))
        return Check(call, text_of(word), changes=tuple(changes))

    def _of_matcher(self, call: CallSite, name: str, links: list[Node], arguments: list[Node]) -> Check:
        changes: list[_Change] = [("opposite", _negated(links))]
        if any(member(link)[1] in _NEGATIONS for link in links):
            return Check(call, name, (), tuple(changes))
        where = _MATCHERS.get(name, slice(0, 0))
        expected = arguments[where] or (arguments[_FIRST] if where == _SECOND else [])
        if len(expected) == 1:
            changes += self._computed(name, expected[0])
        return Check(call, name, tuple(expected), tuple(changes))

    def _of_checker(self, call: CallSite, named: Node, name: str, arguments: list[Node]) -> Check | None:
        """Returns what `assert.name(...)` checks."""
        changes: list[_Change] = []
        expected: list[Node] = []
        if not arguments or arguments[0].type == "spread_element":
            return None
        if name in _TRUE:
            changes.append(("opposite", _wrapped(arguments[0], "!(", ")")))
            expected = _compared(arguments[0])
        elif name in self._reversed or name in self._opposites:
            other = self._reversed.get(name) or self._opposites[name]
            kind: ContradictionKind = "value" if other in ("true", "isTrue") else "opposite"
            end = named.end_byte - (named.type == "string")
            changes.append((kind, Edit(end - len(name), end, other)))
        if name in _CHECKERS:
            expected = arguments[_CHECKERS[name]]
            if name in _THROWING and not self._is_chai:  # a text is the message of the assertion
                expected = [one for one in expected if one.type not in ("string", "template_string")]
            elif arguments[0].type in _WRITTEN and not any(one.type in _WRITTEN for one in expected):
                expected = arguments[_FIRST]
            if expected and name not in _THROWING:
                changes += self._computed(name, expected[0])
        return Check(call, name, tuple(expected), tuple(changes)) if changes or expected else None

    def _computed(self, name: str, expected: Node) -> Iterator[_Change]:
        """Yields changes of an expected value that is computed."""
        if expected.type in (*LITERALS, *FUNCTIONS, "spread_element") or name in _THROWING:
            return
        if next(nodes(expected, *_EFFECTS), None) is not None:
            return
        if name in _NUMBERS:
            yield "value", _wrapped(expected, "((", f") + {10 if name in CLOSE else 1})")
            return
        lines = "\n" * text_of(expected).count("\n")
        typed = " as any" if self._source.is_typed else ""
        becomes = f"({{ {random_word(self._chance)}: 1 }}{typed}{lines})"
        yield "nothing", Edit(expected.start_byte, expected.end_byte, becomes)


def _links(node: Node) -> list[Node] | None:
    """The members of `expect(x).a.b` or `x.should.a.b`, the last one first; None if it is no such chain."""
    found: list[Node] = []
    for _ in range(30):
        if node.type == "member_expression":
            owner, name = member(node)
            if name == "should" and found:
                return found
            found.append(node)
            node = owner
        elif node.type == "call_expression":
            function = part(node, "function")
            owner, name = (
                member(function) if function.type == "member_expression" else (function, text_of(function))
            )
            names = (name, text_of(owner)) if owner.type == "identifier" else ()
            if "expect" in names or "should" in names:
                return found
            node = function
        elif node.type in ("await_expression", *TRANSPARENT) and items(node):
            node = items(node)[0]
        else:
            return None
    return None


def _negated(links: list[Node]) -> Edit:
    """`.not` removed from a chain, or added before its last word."""
    for link in links:
        if member(link)[1] in _NEGATIONS:
            start = member(link)[0].end_byte
            lines = "\n" * (link.text or b"")[start - link.start_byte :].count(b"\n")
            return Edit(start, link.end_byte, lines)
    last = part(links[0], "property")
    return Edit(last.start_byte, last.start_byte, "not.")


def _wrapped(node: Node, before: str, after: str) -> Edit:
    return Edit(node.start_byte, node.end_byte, f"{before}{text_of(node)}{after}")


def _compared(node: Node) -> list[Node]:
    """The literal with which `a === literal` compares."""
    if node.type != "binary_expression" or text_of(part(node, "operator")) not in ("==", "==="):
        return []
    sides = [part(node, "right"), part(node, "left")]
    return [side for side in sides if side.type in LITERALS][:1]
