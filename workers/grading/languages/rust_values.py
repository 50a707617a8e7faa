"""The literals that make the value of an expression in Rust, and other literals of the same type.

A value may come from a constant of the file, a local variable, a row of a table, or an argument of a helper function. A name that is also
used for anything but expected values may be an input of the code under test: its literals do not count.
"""

import random
import re
import string
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from tree_sitter import Node

from workers.grading.controls.spans import Span
from workers.grading.languages.language import nodes, other_number, other_text, text_of
from workers.grading.languages.rust_syntax import (
    LITERALS,
    arguments_of,
    attribute_name,
    name_of,
    names_in,
    parts_of,
    span_of,
    split,
    within,
    written,
)

# Expressions whose value is made by the value of their first part.
_ONE_PART = frozenset(
    f"{kind}_expression" for kind in ("index", "parenthesized", "reference", "type_cast", "unary")
)
# Methods that keep the value, methods that convert it and may be code under test if it is no value of the language, and functions that make
# a value of their argument without code under test.
_KEEPING = frozenset(
    ("as_slice", "clone", "cloned", "collect", "copied", "into_iter", "iter", "to_owned", "to_vec")
)
_CONVERTING = frozenset(("as_bytes", "as_ref", "as_str", "into", "to_string"))
_MAKING = frozenset(
    (
        *("Arc::new", "BTreeMap::from", "BTreeSet::from", "Box::new", "Duration::from_millis"),
        *("Duration::from_secs", "HashMap::from", "HashSet::from", "Path::new", "PathBuf::from", "Rc::new"),
        *("String::from", "Vec::from"),
    )
)
_EACH = "*"  # in a path to a part of a value: any element of an array
_CONVERTED = "="  # in such a path: all of a literal, or of an array, after a conversion
_OF_ARRAYS = ((), (_EACH,), (_CONVERTED,))
_MOST_NAMES = 8  # number of names that may replace one another
_MOST_TRIES = 5


@dataclass(frozen=True, slots=True)
class _RustName:
    """The use of a name that has a known value."""

    node: Node
    scope: Span  # where the name has this value
    path: tuple[str, ...]  # the part of the value: names of fields, indices, and _EACH for any element


@dataclass(frozen=True, slots=True)
class RustLiteral:
    """A literal that makes a value, and the names by which it gets there, the last one being the first to have it."""

    node: Node
    names: tuple[_RustName, ...]


# A value, the part of it to which a name is bound, and where the name has it.
_Binding: TypeAlias = tuple[Node, tuple[str, ...], Span]


class RustValues:
    """The names and the literals of one file, and the literals that make a value."""

    def __init__(self, root: Node, cases: Mapping[int, Sequence[Node]]) -> None:
        """Reads a file. `cases` are the attributes of its tests, by the ids of their functions."""
        self._cases = cases
        self._parents: dict[int, Node] = {}
        self._names: dict[str, list[Node]] = defaultdict(list)  # where names are used
        self._literals: dict[int, set[str]] = defaultdict(set)
        self._only_expected: set[int] = set()  # uses of names for expected values or messages alone
        self.functions: dict[int, Node] = {}  # the innermost function around each node
        self.inside: dict[int, list[Node]] = defaultdict(list)  # the expressions and names in each function
        self._walk(root)

    def _walk(self, root: Node) -> None:
        waiting = [root]
        while waiting:
            around = waiting.pop()
            function = around if around.type == "function_item" else self.functions.get(around.id)
            for node in around.children:
                self._parents[node.id] = around
                kind = node.type
                if function is not None:
                    self.functions[node.id] = function
                    if kind in LITERALS:
                        self._literals[function.id].add(text_of(node))
                    elif node.is_named:
                        self.inside[function.id].append(node)
                if kind == "identifier" and not _binds(around, node):
                    self._names[text_of(node)].append(node)
                if node.child_count:
                    waiting.append(node)

    def only_shown(self, nodes_of_messages: Iterable[Node]) -> None:
        """Notes that names in these expressions are read for messages alone."""
        for one in nodes_of_messages:
            self._only_expected.update(name.id for name in nodes(one, "identifier"))

    def expected(self, operand: Iterable[Node]) -> list[RustLiteral]:
        """The literals that make the value of an operand, and notes that their names are used for an expected value."""
        found = [literal for node in operand for literal in self._making(node, (), ())]
        self._only_expected.update(name.node.id for literal in found for name in literal.names)
        return found

    def is_no_input(self, literal: RustLiteral) -> bool:
        """Whether all names of the literal are used for nothing but expected values and messages, after all of these are noted."""
        return all(map(self._is_only_expected, literal.names))

    def other(self, literal: Node, chance: random.Random) -> str | None:
        """Another literal of the same type, which the same function does not have if possible; None if there is none."""
        around = self.functions.get(literal.id)
        taken = set[str]() if around is None else self._literals[around.id]
        is_negative = literal.prev_sibling is not None and literal.prev_sibling.type == "-"
        becomes = None
        for _ in range(_MOST_TRIES):
            becomes = _changed(literal.type, text_of(literal), is_negative, chance)
            if becomes is None or becomes not in taken:
                break
        return becomes if becomes != text_of(literal) else None

    def _making(
        self, node: Node, path: tuple[str, ...], names: tuple[_RustName, ...]
    ) -> Iterator[RustLiteral]:
        """The literals that make a part of the value of a node."""
        if node.type in LITERALS and path in ((), (_CONVERTED,)):
            yield RustLiteral(node, names)
        elif node.type == "identifier" and len(names) < _MOST_NAMES:
            for value, inner, scope in self._bound(node):
                yield from self._making(value, (*inner, *path), (*names, _RustName(node, scope, path)))
        else:
            for part, rest in _parts(node, path):
                yield from self._making(part, rest, names)

    def _bound(self, name: Node) -> Sequence[_Binding]:
        """The values that a name may have, as far as the file alone says it."""
        inner, text = name, text_of(name)
        while (around := self._parents.get(inner.id)) is not None:
            found = self._bound_by(around, inner, text)
            if found is not None:
                return found
            inner = around
        return ()

    def _bound_by(self, around: Node, inner: Node, name: str) -> Sequence[_Binding] | None:
        """The values to which a node binds a name for a node inside; none if these are unknown, None if it does not bind the name."""
        match around.type:
            case "block" | "declaration_list" | "source_file":
                return _bound_in_block(around, inner, name)
            case "for_expression" if inner.type == "block":
                return _bound_to(around, name, (_EACH,), span_of(inner))
            case "function_item" | "closure_expression":
                parameters = parts_of(around.child_by_field_name("parameters"))
                for number, parameter in enumerate(parameters):
                    if (path := _path_to(parameter, name)) is not None:
                        values = chain(self._arguments(around, number), self._in_cases(around, number))
                        return [(value, path, span_of(around)) for value in values]
                return None
            case "match_arm":
                return () if name in names_in(around.child_by_field_name("pattern")) else None
            case "if_expression" | "while_expression":
                conditions = nodes(around.child_by_field_name("condition") or around, "let_condition")
                patterns = [names_in(one.child_by_field_name("pattern")) for one in conditions]
                return () if any(name in one for one in patterns) else None
            case _:
                return None

    def _arguments(self, function: Node, number: int) -> Iterator[Node]:
        """The arguments with this number wherever the file calls a function or a closure."""
        named = function if function.type == "function_item" else self._parents[function.id]
        name = text_of(named.child_by_field_name("name") or named.child_by_field_name("pattern"))
        for use in self._names[name]:
            path = self._parents[use.id]
            call = self._parents[path.id] if path.type == "scoped_identifier" else path
            if call.type == "call_expression":
                yield from arguments_of(call)[number : number + 1]

    def _in_cases(self, function: Node, number: int) -> Iterator[Node]:
        """The values of a parameter in the attributes with the cases of a test."""
        children = [*getattr(function.child_by_field_name("parameters"), "named_children", ())]
        marked = [one.type == "attribute_item" and attribute_name(one) == "case" for one in children]
        given = [following.id for is_mark, following in zip(marked, children[1:], strict=False) if is_mark]
        parameter = [one for one in children if one.type != "attribute_item"][number]
        for attribute in self._cases.get(function.id, ()):
            tree = next(nodes(attribute, "token_tree"), None)
            if tree is None:
                continue
            if text_of(attribute).startswith(("#[case(", "#[case::")):
                place = given.index(parameter.id) if parameter.id in given else -1
            else:
                # Without a name of its own, the values make the name of the case.
                place = number if any(one.type == ";" for one in tree.children) else -1
            yield from chain(*(written(one) for one in split(tree)[place : place + 1]))

    def _is_only_expected(self, name: _RustName) -> bool:
        """Whether a name is used for nothing but expected values and messages, apart from other parts of its value."""
        for use in self._names[text_of(name.node)]:
            if within(use, name.scope) and use.id not in self._only_expected:
                parent = self._parents[use.id]
                part = parent.child_by_field_name("field") if parent.type == "field_expression" else None
                if part is None or not name.path or name.path[0] in (_EACH, _CONVERTED, text_of(part)):
                    return False
        return True


def _bound_in_block(block: Node, inner: Node, name: str) -> Sequence[_Binding] | None:
    lets = [
        one
        for one in block.named_children
        if one.type == "let_declaration" and _path_to(one.child_by_field_name("pattern"), name) is not None
    ]
    before = [one for one in lets if one.end_byte <= inner.start_byte]
    if before:
        after = [one.end_byte for one in lets if one.start_byte >= inner.start_byte]
        return _bound_to(before[-1], name, (), (before[-1].end_byte, min(after, default=block.end_byte)))
    for one in block.named_children:
        if one.type in ("const_item", "static_item") and text_of(one.child_by_field_name("name")) == name:
            value = one.child_by_field_name("value")
            is_public = any(part.type == "visibility_modifier" for part in one.children)
            return () if value is None or is_public else [(value, (), (one.end_byte, block.end_byte))]
    return None


def _bound_to(declaration: Node, name: str, path: tuple[str, ...], scope: Span) -> Sequence[_Binding] | None:
    """The value of a `let` or a `for` if it binds the name."""
    inner = _path_to(declaration.child_by_field_name("pattern"), name)
    value = declaration.child_by_field_name("value")
    if inner is None:
        return None
    is_changed = any(one.type == "mutable_specifier" for one in declaration.children)
    return () if is_changed or value is None else [(value, (*path, *inner), scope)]


def _path_to(pattern: Node | None, name: str) -> tuple[str, ...] | None:
    """The part of a value to which a pattern binds a name; None if it does not."""
    if pattern is None:
        return None
    parts: list[tuple[str | None, Node | None]] = []
    match pattern.type:
        case "identifier" | "shorthand_field_identifier":
            return () if text_of(pattern) == name else None
        case "tuple_pattern":
            parts = [(str(number), one) for number, one in enumerate(parts_of(pattern))]
        case "tuple_struct_pattern":
            parts = [(str(number), one) for number, one in enumerate(parts_of(pattern)[1:])]
        case "struct_pattern":
            fields = [(one, one.child_by_field_name("name")) for one in nodes(pattern, "field_pattern")]
            parts = [(text_of(named), one.child_by_field_name("pattern") or named) for one, named in fields]
        case "parameter" | "reference_pattern" | "ref_pattern":
            parts = [(None, pattern.child_by_field_name("pattern") or parts_of(pattern)[-1])]
        case _:
            pass
    for step, part in parts:
        if (rest := _path_to(part, name)) is not None:
            return rest if step is None else (step, *rest)
    return None


def _parts(node: Node, path: tuple[str, ...]) -> Iterator[tuple[Node, tuple[str, ...]]]:
    """The nodes that make a part of the value of a node, each with the part of its own value."""
    children = parts_of(node)
    match node.type:
        case "array_expression":
            is_repeated = any(one.type == ";" for one in node.children)
            elements = children[:1] if is_repeated else children
            yield from ((one, path[1:]) for one in elements if path[:1] in _OF_ARRAYS)
        case "tuple_expression":
            yield from _elements(children, path)
        case "struct_expression":
            for one in parts_of(node.child_by_field_name("body")):
                value = one.child_by_field_name("value") or one
                if path[:1] in ((), (text_of(one.child_by_field_name("field") or one),)):
                    yield (value, path[1:]) if value is not one else (parts_of(one)[0], path[1:])
        case "field_expression":
            yield children[0], (text_of(node.child_by_field_name("field")), *path)
        case "call_expression":
            yield from _parts_of_call(node, path)
        case "macro_invocation" if name_of(node) == "json" and not path:
            yield children[-1], ()
        case "token_tree" if not path:
            yield from ((one, ()) for one in written(node.children))
        case kind if kind in _ONE_PART:
            yield next((one for one in children if one.type != "mutable_specifier"), node), path
        case _:
            pass


def _parts_of_call(call: Node, path: tuple[str, ...]) -> Iterator[tuple[Node, tuple[str, ...]]]:
    function, name, arguments = call.child_by_field_name("function"), name_of(call), arguments_of(call)
    if function is not None and function.type == "field_expression":
        receiver = parts_of(function)[0]
        if name in _KEEPING:
            yield receiver, path
        elif name in _CONVERTING:
            yield receiver, (_CONVERTED, *path)
        elif name == "enumerate" and path[:2] == (_EACH, "1"):
            yield receiver, (_EACH, *path[2:])
        elif name == "zip" and path[:1] == (_EACH,) and path[1:2] in (("0",), ("1",)):
            yield (receiver, arguments[0])[int(path[1])], (_EACH, *path[2:])
    elif text_of(function) in _MAKING:
        yield from ((one, path) for one in arguments)
    elif name[:1].isupper():
        yield from _elements(arguments, path)
    elif name in ("concat", "format") and not path:
        yield from ((one, ()) for one in arguments[:1])


def _elements(elements: Sequence[Node], path: tuple[str, ...]) -> Iterator[tuple[Node, tuple[str, ...]]]:
    for number, one in enumerate(elements):
        if path[:1] in ((), (str(number),)):
            yield one, path[1:]


def _binds(around: Node, name: Node) -> bool:
    """Whether a name is given to a value here, not used."""
    is_pattern = around.type.endswith(("_pattern", "_parameters"))
    return is_pattern or around.child_by_field_name("pattern") == name


def _changed(kind: str, text: str, is_negative: bool, chance: random.Random) -> str | None:
    """Another literal of the same type, written as `text` is."""
    letter = chance.choice(string.ascii_lowercase)
    if kind == "boolean_literal":
        return "false" if text == "true" else "true"
    if kind == "char_literal":
        start = text.index("'") + 1
        return f"{text[:start]}{other_text(text[start:-1], chance) or letter}'"
    if kind in ("string_literal", "raw_string_literal"):
        found = re.fullmatch(r'([a-z]*#*")(.*)("#*)', text, re.DOTALL)
        if found is None:
            return None
        other = other_text(found[2], chance)
        if other is None and "b" not in found[1]:  # the length of a byte string belongs to its type
            other = f"{found[2]}{letter}"
        return None if other is None else f"{found[1]}{other}{found[3]}"
    if (digits := re.fullmatch(r"(0[bo][0-7_]*)([0-7])(_*[iu]\w+)?", text)) is not None:
        return f"{digits[1]}{'1' if digits[2] == '0' else '0'}{digits[3] or ''}"
    least = re.fullmatch(r"(0x[\da-fA-F_]+?|[\d_]+?)(_?i\w+)?", text) if is_negative else None
    if least is not None:  # one more may be too small for the type
        number = int(least[1].replace("_", ""), 16 if least[1].startswith("0x") else 10)
        less = abs(number - 1)
        return f"{less:#x}{least[2] or ''}" if least[1].startswith("0x") else f"{less}{least[2] or ''}"
    return other_number(text, chance)
