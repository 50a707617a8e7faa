"""The literals that an expected value in Java is made of, wherever they are written, and other literals in their place."""

import random
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from tree_sitter import Node

from workers.grading.controls.spans import Span
from workers.grading.languages.java_source import (
    COLLECTS,
    LITERALS,
    MADE_OF_OBJECT,
    NUMBERS,
    JavaFile,
    JavaMethod,
    arguments_of,
    is_made_of_arguments,
    name_of,
    some,
)
from workers.grading.languages.language import nodes, other_number, other_text, text_of

_ROW = re.compile(r"(?:Arguments\.)?(?:of|arguments|argumentSet)")  # makes a row of a parameterized test
_TRIES = 4  # tries to find a literal that is new in a test
_CELL = re.compile(r"\s*(?P<quoted>'(?:[^']|'')*')?(?P<plain>[^,\n\"]*?)\s*(?=,|\n|\"|$)")


@dataclass(frozen=True, slots=True)
class JavaLeaf:
    """A literal, or the part of a text that is one."""

    span: Span
    type: str
    text: str


@dataclass(slots=True)
class JavaValues:
    """Follows expected values to the literals that they are made of, within the methods that a test reaches."""

    file: JavaFile
    methods: list[JavaMethod]

    def leaves(self, expressions: Iterable[Node], owner: JavaMethod) -> list[JavaLeaf]:
        """The literals that expressions consist of, or that the names in them were given."""
        found: dict[Span, JavaLeaf] = {}
        waiting: list[tuple[Node | JavaLeaf, JavaMethod]] = [(one, owner) for one in expressions]
        followed = set[tuple[JavaMethod, str]]()
        while waiting:
            node, place = waiting.pop()
            if isinstance(node, JavaLeaf):
                found[node.span] = node
            elif node.type in LITERALS:
                span = node.start_byte, node.end_byte
                found[span] = JavaLeaf(span, node.type, text_of(node))
            elif node.type in ("identifier", "field_access"):
                name = text_of(node).removeprefix("this.")
                if (place, name) not in followed:
                    followed.add((place, name))
                    waiting += self._bound(name, place)
            else:
                waiting += ((part, place) for part in self._parts(node))
        return sorted(found.values(), key=lambda leaf: leaf.span)

    def _parts(self, node: Node) -> list[Node]:
        """The expressions that the value of this one is made of."""
        match node.type:
            case "parenthesized_expression" | "unary_expression" | "array_initializer" | "binary_expression":
                return node.named_children
            case "cast_expression" | "array_creation_expression":
                return some(node.child_by_field_name("value"))
            case "ternary_expression":
                return node.named_children[1:]
            case "array_access":
                return some(node.child_by_field_name("array"))
            case "object_creation_expression":
                return arguments_of(node)
            case "method_invocation" if is_made_of_arguments(node) and not self.file.called(node):
                return arguments_of(node)
            case "method_invocation" if MADE_OF_OBJECT.fullmatch(name_of(node)):
                return some(node.child_by_field_name("object"))
            case _:
                return []

    def _bound(self, said: str, owner: JavaMethod) -> list[tuple[Node | JavaLeaf, JavaMethod]]:
        """The expressions that a name is given: in its method, by the calls of the method, by the rows of the test, or in the file."""
        of, _, name = said.rpartition(".")
        # A field of another object, or a constant of another class.
        is_foreign = of != "" and of not in {one.names[-1] for one in self.file.classes}
        if is_foreign or {name, said} & self.file.inputs(owner):
            return []
        found: list[tuple[Node | JavaLeaf, JavaMethod]] = []
        for node in owner.found:
            found += ((one, owner) for one in _given(node, name))
        if not found and name in owner.parameters:
            place = owner.parameters.index(name)
            for caller in self.methods:
                for call in caller.of("method_invocation", "object_creation_expression"):
                    if owner in self.file.called(call):
                        given = enumerate(arguments_of(call))
                        found += ((one, caller) for number, one in given if owner.place(number) == place)
            found += self._of_rows(owner, place)
        elif not found and not any(name in self.file.inputs(one) for one in self.methods):
            for declaring, node in self.file.fields:
                found += ((one, declaring) for one in _given(node, name))
            for method in (one for one in self.file.by_name.get("<init>", ()) if one.owner is owner.owner):
                for node in method.of("assignment_expression"):
                    given = [one for one in _given(node, name) if text_of(one) in method.parameters]
                    found += [
                        row
                        for one in given
                        for row in self._of_rows(method, method.parameters.index(text_of(one)))
                    ]
        return found

    def _of_rows(self, method: JavaMethod, place: int) -> list[tuple[Node | JavaLeaf, JavaMethod]]:
        """The values of a parameter in the rows of a parameterized test, or of a parameterized class of JUnit 4."""
        found: list[tuple[Node | JavaLeaf, JavaMethod]] = []
        if "CsvSource" in method.annotations and "delimiter" not in text_of(method.annotations["CsvSource"]):
            found += ((cell, method) for cell in _cells(method.annotations["CsvSource"], place))
        for maker in self._makers(method):
            for row in maker.of("method_invocation", "array_initializer"):
                is_array = row.type == "array_initializer"
                cells = row.named_children if is_array else arguments_of(row)
                holds_rows = any("array" in one.type for one in cells)
                is_row = is_array or _ROW.fullmatch(text_of(row).partition("(")[0]) is not None
                if is_row and len(cells) == len(method.parameters) and not holds_rows:
                    found.append((cells[place], maker))
        return found

    def _makers(self, method: JavaMethod) -> list[JavaMethod]:
        """The methods that make the rows of a parameterized test, or of a parameterized class."""
        if method.name == "<init>":
            return [one for one in method.owner.methods if "Parameters" in one.annotations]
        if "MethodSource" not in method.annotations:
            return []
        texts = [text_of(one)[1:-1] for one in nodes(method.annotations["MethodSource"], "string_literal")]
        named = (one for name in texts or [method.name] for one in self.file.by_name.get(name, ()))
        return [one for one in named if one is not method]


def _cells(annotation: Node, place: int) -> Iterator[JavaLeaf]:
    """The cells of a column of @CsvSource."""
    for row in nodes(annotation, "string_literal"):
        text, at = text_of(row), row.start_byte
        is_block = text.startswith('"""')
        begin = text.find("\n") + 1 if is_block else 1
        for line in re.finditer(r"[^\n]+", text[begin : -3 if is_block else -1]):
            cells = [one for one in _CELL.finditer(line[0]) if one[0] or one.start() in (0, len(line[0]))]
            if place < len(cells):
                group = "quoted" if cells[place]["quoted"] else "plain"
                start = begin + line.start() + cells[place].start(group) + (group == "quoted")
                inner = cells[place][group].strip("'") if group == "quoted" else cells[place][group]
                first = at + len(text[:start].encode())
                yield JavaLeaf((first, first + len(inner.encode())), "cell", inner)


def _given(node: Node, name: str) -> Iterator[Node]:
    """What a declaration, an assignment, a loop or a call that fills a collection gives to a name."""
    match node.type:
        case "variable_declarator" if name_of(node) == name:
            yield from some(node.child_by_field_name("value"))
        case "assignment_expression" if (
            text_of(node.child_by_field_name("left")).removeprefix("this.").partition("[")[0] == name
        ):
            yield from some(node.child_by_field_name("right"))
        case "enhanced_for_statement" if name_of(node) == name:
            yield from some(node.child_by_field_name("value"))
        case "method_invocation" if text_of(node.child_by_field_name("object")) == name:
            if COLLECTS.fullmatch(name_of(node)):
                yield from arguments_of(node)
        case _:
            pass


def other(leaf: JavaLeaf, literals: Collection[str], chance: random.Random, *, is_near: bool) -> str | None:
    """Another literal of the same type, that does not occur in the test if there is one."""
    becomes = None
    if leaf.text in ("true", "false"):
        return "false" if leaf.text == "true" else "true"
    for _ in range(_TRIES):
        becomes = _drawn(leaf, chance, is_near)
        if becomes not in literals:
            break
    return becomes


def _drawn(leaf: JavaLeaf, chance: random.Random, is_near: bool) -> str | None:
    text = leaf.text
    if leaf.type in NUMBERS or leaf.type == "cell":
        whole = re.match(r"\d+(?!\d|[xXbB])", text)
        if is_near and whole:
            return f"{int(whole[0]) + 1}{text[whole.end() :]}"
        sign = "-" if text.startswith("-") else ""
        number = other_number(text.removeprefix("-"), chance)
        if leaf.type == "cell" and number is None:
            return other_text(text, chance)
        # The least value of a type has a sign before it, and octal numbers have no 8.
        is_valid = (
            number is not None
            and number not in ("2147483649", "9223372036854775809L")
            and not re.match(r"0\d*8", number)
        )
        return f"{sign}{number}" if is_valid else None
    size = 3 if text.startswith('"""') else 1
    inner = other_text(text[size:-size], chance)
    if inner is not None:
        return f"{text[:size]}{inner}{text[-size:]}"
    return (
        f'{text[:-1]}{chance.choice("abcdeinorst")}"' if leaf.type == "string_literal" and size == 1 else None
    )
