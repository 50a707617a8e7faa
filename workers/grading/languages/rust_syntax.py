"""Sources of Rust as syntax trees, and the items in them.

tree-sitter does not parse the arguments of macros. So a source is parsed in a copy in which macros are functions, and every byte keeps its
place: `assert_eq!(a, b)` becomes a call, `vec![a]` an array, and a `macro_rules!` with its first rule a function with parameters.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import tree_sitter_rust
from tree_sitter import Language, Node, Parser

from workers.grading.controls.spans import Span
from workers.grading.languages.language import nodes, text_of

_PARSER = Parser(Language(tree_sitter_rust.language()))
# Names of attributes of tests, beside "test" and those that end with "_test".
_TESTS = frozenset(("quickcheck", "rstest", "test_case", "test_matrix"))
_DEEPEST = 100  # number of modules inside one another
# The word "test" outside of strings, which name features.
_FOR_TESTS = re.compile(rb'#\s*\[\s*cfg\s*\((?!\s*not\b)(?:[^"]|"[^"]*")*?\btest\b')
# Macros with an argument that is a pattern, which no function has.
PATTERN_MACROS = frozenset(("assert_matches", "debug_assert_matches", "matches"))
LITERALS = frozenset(
    f"{kind}_literal" for kind in ("boolean", "char", "float", "integer", "raw_string", "string")
)


@dataclass(frozen=True, slots=True)
class RustItem:
    """An item of a module: a function, a constant, an implementation."""

    node: Node
    modules: tuple[str, ...]
    attributes: tuple[Node, ...]
    is_for_tests: bool  # compiled for tests only

    @property
    def is_test(self) -> bool:
        return (
            self.node.type == "function_item"
            and not self.node.has_error
            and any(map(_is_of_test, self.attributes))
        )

    @property
    def name(self) -> str:
        return "::".join((*self.modules, text_of(self.node.child_by_field_name("name"))))


def items(container: Node, modules: tuple[str, ...] = (), is_for_tests: bool = False) -> Iterator[RustItem]:
    """The items below a module, with those of its modules."""
    attributes: list[Node] = []
    for node in container.named_children:
        if node.type == "attribute_item":
            attributes.append(node)
        elif not node.type.endswith("comment"):
            inside = is_for_tests or any(_FOR_TESTS.match(one.text or b"") for one in attributes)
            yield RustItem(node, modules, tuple(attributes), inside)
            body = node.child_by_field_name("body")
            if node.type == "mod_item" and body is not None and len(modules) < _DEEPEST:
                yield from items(body, (*modules, text_of(node.child_by_field_name("name"))), inside)
            attributes = []


def attribute_name(attribute: Node) -> str:
    """The last part of the path of an attribute."""
    path = attribute.named_children[0].named_children[:1] if attribute.named_children else []
    return text_of(path[0]).rpartition("::")[2] if path else ""


def _is_of_test(attribute: Node) -> bool:
    name = attribute_name(attribute)
    return name in _TESTS or re.fullmatch(r"(?:.*_)?test", name) is not None


def written(tokens: Sequence[Node]) -> list[Node]:
    """The literals and the groups among the arguments of a macro that is not parsed; none if they call a function."""
    calls = any(
        one.type == "identifier" and text_of(one)[:1].islower() and following.type == "token_tree"
        for one, following in pairwise(tokens)
    )
    return [] if calls else [one for one in tokens if one.type in LITERALS or one.type == "token_tree"]


def split(tree: Node) -> list[list[Node]]:
    """The arguments of a macro or an attribute that is not parsed, up to `=>`, `;` or `if`."""
    groups: list[list[Node]] = [[]]
    for one in tree.children[1:-1]:
        if one.type in ("=>", ";") or text_of(one) == "if":
            break
        if one.type == ",":
            groups.append([])
        else:
            groups[-1].append(one)
    return groups


def span_of(node: Node) -> Span:
    return node.start_byte, node.end_byte


def within(node: Node, span: Span) -> bool:
    return span[0] <= node.start_byte and node.end_byte <= span[1]


def parts_of(node: Node | None) -> list[Node]:
    """The parts of a node without comments and attributes."""
    children = [] if node is None else node.named_children
    return [one for one in children if not one.type.endswith("comment") and one.type != "attribute_item"]


def arguments_of(call: Node) -> list[Node]:
    return parts_of(call.child_by_field_name("arguments"))


def name_of(call: Node) -> str:
    """The name of what is called, without the path to it."""
    called = call.child_by_field_name("function") or call.child_by_field_name("macro")
    while called is not None and called.type not in ("identifier", "field_identifier"):
        called = next(
            (part for one in ("field", "name", "function") if (part := called.child_by_field_name(one))), None
        )
    return text_of(called)


def names_in(pattern: Node | None) -> set[str]:
    found = () if pattern is None else nodes(pattern, "identifier", "shorthand_field_identifier")
    return {text_of(one) for one in found}


def parsed(source: bytes) -> Node:
    """The syntax of a source with its macros as functions; an empty file if it is not UTF-8."""
    try:
        source.decode()
    except UnicodeDecodeError:
        source = b""
    root = _PARSER.parse(source).root_node
    text = bytearray(source)
    found = [*nodes(root, "macro_definition", "!")]
    for definition in found:
        if definition.type == "macro_definition":
            _make_function(definition, text)
    for mark in reversed(found):  # those inside of others come first
        name, arguments = mark.prev_sibling, mark.next_sibling
        if name is None or arguments is None or arguments.type != "token_tree":
            continue
        for at in (one for one in arguments.children if one.type == "@"):  # of insta's inline snapshots
            _blank(text, at.start_byte, at.end_byte)
        is_array, whole = text[arguments.start_byte] == ord("["), mark.parent
        is_item = whole is not None and whole.parent is not None and whole.parent.type == "declaration_list"
        is_operator = not name.type.endswith("identifier")
        if is_operator or is_item or text_of(name) in PATTERN_MACROS or (is_array and text_of(name) != "vec"):
            continue
        written = b"fn f() { f%s; }" % bytes(text[arguments.start_byte : arguments.end_byte])
        if not _PARSER.parse(written.replace(b"f[", b"[", 1) if is_array else written).root_node.has_error:
            _blank(text, name.start_byte if is_array else mark.start_byte, mark.end_byte)
    return _PARSER.parse(bytes(text)).root_node


def _make_function(definition: Node, text: bytearray) -> None:
    """Writes the first rule of a macro as a function. Parts that may be repeated are left out."""
    name, rule = definition.child_by_field_name("name"), next(nodes(definition, "macro_rule"), None)
    pattern, body = (rule.child_by_field_name(one) if rule else None for one in ("left", "right"))
    if name is None or pattern is None or body is None:
        return
    for start, end in (
        (name.end_byte, pattern.start_byte),
        (pattern.end_byte, body.start_byte),
        (body.end_byte, definition.end_byte),
    ):
        _blank(text, start, end)
    text[definition.start_byte : name.start_byte] = b"fn".ljust(name.start_byte - definition.start_byte)
    text[pattern.start_byte], text[pattern.end_byte - 1] = b"()"
    text[body.start_byte], text[body.end_byte - 1] = b"{}"
    for part in nodes(definition, "metavariable", "token_repetition", "token_repetition_pattern"):
        if part.type == "metavariable":
            text[part.start_byte : part.start_byte + 1] = b"_" if text[part.start_byte] == ord("$") else b" "
        else:
            _blank(text, part.start_byte, part.end_byte)


def _blank(text: bytearray, start: int, end: int) -> None:
    text[start:end] = b" " * (end - start)
