"""The literals that make the expected values of tests in C and C++, and other literals for them.

A value is followed to where it is written: locals, constants, rows of tables, values of parametrized tests, arguments of helper functions.
"""

import random
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tree_sitter import Node

from workers.grading.languages.cpp_checks import (
    PASSES_ON,
    arguments_of,
    called_name,
    declared_names,
    last_part,
    span_of,
)
from workers.grading.languages.cpp_source import BINDING, LITERALS, CppFile
from workers.grading.languages.language import nodes, other_number, other_text, text_of

_METHODS = frozenset(("c_str", "data", "str", "epsilon", "margin", "scale", "begin", "end", "value"))
_LISTS = (
    "initializer_list",
    "argument_list",
    "parenthesized_expression",
    "unary_expression",
    "binary_expression",
    "concatenated_string",
)
_TRIES = 4  # tries to find a literal that is new in a test
_DEEPEST = 12  # names and rows that are followed from one to the next
# Parts of a value: of each of its elements ("*"), the element at a place, or the field of a name.
_Steps: TypeAlias = tuple[str | int, ...]


@dataclass(slots=True)
class CppValues:
    """Follows expected values to the literals that they are made of, within the functions that a test reaches."""

    file: CppFile
    functions: list[str]

    def leaves(self, expression: Node, owner: str) -> list[Node]:
        """The literals that an expression consists of, or that the names in it were given."""
        found = [one for node in self._written(expression, owner, (), _DEEPEST) for one in _literals(node)]
        return list({span_of(one): one for one in found}.values())

    def _written(self, node: Node, owner: str, steps: _Steps, depth: int) -> Iterator[Node]:
        """The expressions whose value this part of an expression has, as far as they are written out."""
        if depth == 0:
            return
        further = partial(self._further, depth=depth - 1)
        match node.type:
            case "identifier" | "qualified_identifier" | "field_identifier":
                for value, place, more in self._bound(last_part(text_of(node)), owner):
                    yield from further([value], place, (*more, *steps))
            case "field_expression" | "subscript_expression":
                if text_of(node) in self.file.inputs(owner):
                    return
                index = text_of(node.child_by_field_name("indices")).strip("[] ")
                step = text_of(node.child_by_field_name("field")) or (
                    int(index) if index.isdecimal() else "*"
                )
                operand = node.child_by_field_name("argument")
                if text_of(operand) == "this":
                    yield from further(node.named_children[-1:], owner, steps)
                else:
                    yield from further([operand] if operand else [], owner, (step, *steps))
            case "parenthesized_expression" | "unary_expression" | "pointer_expression" | "cast_expression":
                yield from further(node.named_children[-1:], owner, steps)
            case "call_expression":
                yield from self._of_call(node, owner, steps, depth - 1)
            case _ if steps:
                yield from further(_parts(self.file, node, steps[0]), owner, steps[1:])
            case _:
                yield node

    def _further(self, parts: Iterable[Node], owner: str, steps: _Steps, depth: int) -> Iterator[Node]:
        for part in parts:
            yield from self._written(part, owner, steps, depth)

    def _of_call(self, call: Node, owner: str, steps: _Steps, depth: int) -> Iterator[Node]:
        """What a call returns that passes a value on."""
        function, arguments = call.child_by_field_name("function"), arguments_of(call)
        name = text_of(function)
        if function is not None and function.type == "field_expression":
            operand = function.child_by_field_name("argument")
            if called_name(call) in _METHODS and operand is not None:
                yield from self._written(operand, owner, steps, depth)
        elif called_name(call) == "GetParam":
            for generator in self.file.instances[owner.partition(".")[0]]:
                yield from self._of_generator(generator, owner, steps, depth)
        elif (place := re.search(r"\bget<\s*(\d+)\s*>$", name)) is not None:
            yield from self._further(arguments[:1], owner, (int(place[1]), *steps), depth=depth)
        elif steps:
            yield from self._further(_parts(self.file, call, steps[0]), owner, steps[1:], depth=depth)
        elif PASSES_ON.fullmatch(name.partition("<")[0]) or name in self.file.structs:
            yield from self._further(arguments, owner, (), depth=depth)

    def _of_generator(self, generator: Node, owner: str, steps: _Steps, depth: int) -> Iterator[Node]:
        """The values of `Values`, `ValuesIn` or `Combine`."""
        arguments = arguments_of(generator)
        match called_name(generator):
            case "Values":
                yield from self._further(arguments, owner, steps, depth=depth)
            case "ValuesIn":
                yield from self._further(arguments, owner, ("*", *steps), depth=depth)
            case "Combine" if steps and isinstance(steps[0], int):
                for one in arguments[steps[0] : steps[0] + 1]:
                    yield from self._of_generator(one, owner, steps[1:], depth)
            case _:
                pass

    def _bound(self, name: str, owner: str) -> Iterator[tuple[Node, str, _Steps]]:
        """The expressions of which parts are given to a name: in its function, by the calls of the function, or in the file."""
        if name in self.file.inputs(owner):
            return
        found = [(*one, owner) for node in self.file.nodes_of(owner, *BINDING) for one in _given(node, name)]
        callers: list[tuple[list[str], list[tuple[str, Node]]]] = []
        for one in self.file.nodes_of(owner, "lambda_expression") if not found else ():
            called = (
                declared_names(one.parent)[0]
                if one.parent is not None and one.parent.type == "init_declarator"
                else ""
            )
            callers.append((_parameters(one), self.file.calls_of(called, [owner]) if called else []))
        callers.append((_parameters(self.file.functions[owner]), self.file.calls_of(owner, self.functions)))
        for parameters, calls in callers if not found else ():
            if name in parameters:
                place = parameters.index(name)
                found += [
                    (one, (), caller)
                    for caller, call in calls
                    for one in arguments_of(call)[place : place + 1]
                ]
        if not found and not any(name in parameters for parameters, _ in callers):
            found = [(*one, owner) for node in self.file.declarations for one in _given(node, name)]
            setting = [one for one in self.file.functions if last_part(one) in ("SetUp", "SetUpTestSuite")]
            found += [
                (*given, one)
                for one in setting
                for node in self.file.nodes_of(one, *BINDING)
                for given in _given(node, name)
            ]
        yield from ((value, place, steps) for value, steps, place in found)


def _given(node: Node, name: str) -> Iterator[tuple[Node, _Steps]]:
    """What a declaration, an assignment or a loop gives to a name, if that is written out, and the part of it."""
    value = next(
        (one for part in ("value", "right", "default_value") if (one := node.child_by_field_name(part))), None
    )
    around = node.parent.parent if node.parent is not None else None
    if value is None or (around is not None and around.type == "for_statement"):
        return
    names = declared_names(node)
    if name in names:
        place: _Steps = (names.index(name),) if len(names) > 1 else ()
        yield value, ("*", *place) if node.type == "for_range_loop" else place


def _parameters(function: Node) -> list[str]:
    listed = next(nodes(function, "parameter_list"), None)
    return (
        [declared_names(one)[0] for one in listed.named_children if one.type != "comment"] if listed else []
    )


def _elements(value: Node) -> list[Node]:
    """The elements of a list of values, of a structure or of a constructor's arguments."""
    body = value.child_by_field_name("arguments") or value.child_by_field_name("value") or value
    if body.type not in ("initializer_list", "argument_list"):
        return []
    found = [one for one in body.named_children if one.type != "comment"]
    # `Type table{{...}}` and `Type table({...})` have one list around the list.
    is_alone = len(found) == 1 and found[0].type == "initializer_list"
    return _elements(found[0]) if is_alone and body.type == "argument_list" else found


def _parts(file: CppFile, value: Node, step: str | int) -> list[Node]:
    """The elements of a value that a step leads to."""
    elements = _elements(value)
    if step == "*":
        return elements
    if isinstance(step, str):
        for one in elements:
            if (
                one.type == "initializer_pair"
                and text_of(one.child_by_field_name("designator")).lstrip(".") == step
            ):
                return one.named_children[-1:]
        fields = ["first", "second"] if step in ("first", "second") else _fields(file, value)
        step = fields.index(step) if step in fields else len(elements)
    return [one for one in elements[step : step + 1] if one.type != "initializer_pair"]


def _fields(file: CppFile, row: Node) -> list[str]:
    """The names of the fields of a row, from its own type or from that of the table around it."""
    around: Node | None = row
    while around is not None:
        kind = around.child_by_field_name("type") or (
            around.child_by_field_name("function") if around is row else None
        )
        words = re.findall(r"\w+", text_of(kind))
        body = next(nodes(kind, "field_declaration_list"), None) if kind is not None else None
        body = body or next((file.structs[word] for word in reversed(words) if word in file.structs), None)
        if body is not None:
            declared = [one for one in body.named_children if one.type == "field_declaration"]
            return [
                _declared_field(name) for one in declared for name in one.children_by_field_name("declarator")
            ]
        around = around.parent
    return []


def _declared_field(declarator: Node) -> str:
    return text_of(next(nodes(declarator, "field_identifier"), None))


def _literals(value: Node) -> Iterator[Node]:
    """The literals that a value consists of, without the arguments of calls that make another value of them."""
    if value.type in LITERALS:
        yield value
    elif value.type in ("user_defined_literal", "initializer_pair", "compound_literal_expression"):
        place = 0 if value.type == "user_defined_literal" else -1
        yield from _literals(value.named_children[place])
    elif value.type in _LISTS:
        for child in value.named_children:
            yield from _literals(child)
    elif value.type == "call_expression" and PASSES_ON.fullmatch(
        text_of(value.child_by_field_name("function")).partition("<")[0]
    ):
        for argument in arguments_of(value):
            yield from _literals(argument)


def other_literal(leaf: Node, literals: Collection[str], is_close: bool, chance: random.Random) -> str | None:
    """Another literal of the same type, that does not occur in the test if there is one."""
    text, becomes = text_of(leaf), None
    if leaf.type in ("true", "false"):
        return "false" if leaf.type == "true" else "true"
    before, _, inner = text.partition("'" if leaf.type == "char_literal" else '"')
    for _ in range(_TRIES):
        if leaf.type == "number_literal":
            becomes = _far_number(text, chance) if is_close else _near_number(text, chance)
        elif leaf.type == "raw_string_literal":
            head, opening, rest = text.partition("(")
            body, closing, tail = rest.rpartition(")")
            other = other_text(body, chance)
            becomes = None if other is None else f"{head}{opening}{other}{closing}{tail}"
        else:
            quote = inner[-1:]
            other = other_text(inner[:-1], chance) if len(inner) > 1 else chance.choice("abcdeinorst")
            becomes = None if other is None else f"{before}{quote}{other}{quote}"
        if becomes not in literals:
            break
    return becomes


def _near_number(text: str, chance: random.Random) -> str | None:
    sign, digits = text[: text[:1] in "+-"], text.lstrip("+-").replace("'", "")
    if (octal := re.fullmatch(r"(0(?:[0-7]*|[bB][01]*))([0-7])([uUlL]*)", digits)) is not None and len(
        octal[1]
    ) > 0:
        others = "01" if octal[1][1:2] in ("b", "B") else "01234567"
        return f"{sign}{octal[1]}{chance.choice(others.replace(octal[2], ''))}{octal[3]}"
    # `.5` and `1.f` lack a digit.
    other = other_number(
        re.sub(r"\.(?!\d)", ".0", f"0{digits}" if digits.startswith(".") else digits), chance
    )
    return None if other is None else f"{sign}{other}"


def _far_number(text: str, chance: random.Random) -> str | None:
    """A number that is clearly outside of any tolerance."""
    found = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+))([eE][+-]?\d+)?([fFlLuU]*)", text.replace("'", ""))
    if found is None:
        return _near_number(text, chance)
    number, decimals = float(found[1]), len(found[1].partition(".")[2])
    number += (1 + abs(number)) * chance.choice((1, 2))
    written = f"{number:.{decimals}f}" if "." in found[1] else str(int(number))
    return f"{written}{'.' if '.' in found[1] and not decimals else ''}{found[2] or ''}{found[3]}"
