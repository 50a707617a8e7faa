"""Parsed sources in C and C++: their tests, functions and declarations.

Sources are parsed before the preprocessor runs, so the macros that open a test or a section are read first and replaced by the heads of
functions and conditions of the same length.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import tree_sitter_cpp
from tree_sitter import Language as Grammar
from tree_sitter import Node, Parser

from workers.grading.languages.cpp_checks import (
    CHECK,
    NAMES,
    CppCheck,
    arguments_of,
    called_name,
    calls_in,
    condition_of,
    declared_names,
    last_part,
    makes_fail,
    must_equal,
    of_check,
    of_truth,
    says_check,
    span_of,
)
from workers.grading.languages.language import nodes, text_of

_GRAMMAR = Grammar(tree_sitter_cpp.language())
PROGRAM = "main"  # the test that is the whole program of a file
# Strings, characters, comments and brackets of a source.
_TOKEN = re.compile(
    rb'R"(?P<mark>[^()\s\\]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n]){1,8}\'|//[^\n]*|/\*.*?\*/|[()]',
    re.DOTALL,
)
# Macros that open a test named by a suite and a name, by a text, or by a name; that open a section or a suite; and what ends a test.
_HEAD = re.compile(
    rb"(?:^|(?<=[{};]))[ \t]*(?:(?P<pair>(?:TYPED_)?TEST|TEST_[FP]|TYPED_TEST_P|GTEST_TEST)"
    rb"|(?P<text>(?:TEMPLATE_(?:PRODUCT_|LIST_)?)?TEST_CASE\w*|SCENARIO\w*)"
    rb"|(?P<word>BOOST_(?:AUTO|FIXTURE|DATA|PARAM)_TEST_CASE|START_TEST)"
    rb"|(?P<section>(?:DYNAMIC_)?SECTION|SUBCASE|(?:AND_)?(?:GIVEN|WHEN|THEN))|(?P<suite>TEST_SUITE))[ \t]*(?=\()|\bEND_TEST\b",
    re.MULTILINE,
)
_REGISTERED = re.compile(
    rb"\b(?:cmocka_unit_test\w*|unit_test\w*|RUN_TEST|tcase_add_test)\s*\(\s*(?:\w+\s*,\s*)?(\w+)\s*[,)]"
)
_TEXTS = ("string_literal", "raw_string_literal", "char_literal")
LITERALS = ("number_literal", *_TEXTS, "true", "false")
BINDING = ("init_declarator", "assignment_expression", "for_range_loop", "field_declaration")
# What is looked for in functions.
_NODES = (*BINDING, *LITERALS, "if_statement", "call_expression", "lambda_expression")


@dataclass(slots=True)
class CppFile:
    """A parsed file: its functions by name, of which tests have the names of tests, and what it declares elsewhere."""

    source: bytes
    functions: dict[str, Node] = field(default_factory=dict[str, Node])
    tests: list[str] = field(default_factory=list[str])
    structs: dict[str, Node] = field(default_factory=dict[str, Node])
    macros: set[str] = field(default_factory=set[str])  # macros of the file that check something
    # Variables, constants and fields outside of functions, and the generators of values of each suite.
    declarations: list[Node] = field(default_factory=list[Node])
    instances: dict[str, list[Node]] = field(default_factory=lambda: defaultdict(list))
    _inputs: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    _nodes: dict[str, list[Node]] = field(default_factory=dict[str, list[Node]])
    _calls: dict[str, list[tuple[str, Node]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        prepared, named = _heads(self.source)
        self._read(Parser(_GRAMMAR).parse(prepared).root_node, named)
        registered = {one.decode() for one in _REGISTERED.findall(self.source)}
        self.tests = [
            name for name, node in self.functions.items() if node.start_byte in named or name in registered
        ]
        if self.tests or PROGRAM in self.functions:
            self.tests = [*(name for name in self.tests if name != PROGRAM), PROGRAM]
        for owner in self.functions:
            for call in self.nodes_of(owner, "call_expression"):
                self._calls[called_name(call)].append((owner, call))

    def _read(self, root: Node, named: dict[int, str]) -> None:
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if node.type == "function_definition":
                name = named.get(node.start_byte) or declared_names(node)[0]
                self.functions[name if name not in self.functions else f"{name}@{node.start_byte}"] = node
                continue
            if node.type in ("struct_specifier", "class_specifier", "type_definition"):
                body = next(nodes(node, "field_declaration_list"), None)
                name = node.child_by_field_name("declarator" if node.type == "type_definition" else "name")
                if body is not None:
                    self.structs[text_of(name)] = body
            elif node.type == "preproc_function_def" and says_check(text_of(node)):
                self.macros.add(text_of(node.child_by_field_name("name")))
            elif node.type in BINDING:
                self.declarations.append(node)
            elif node.type == "call_expression" and text_of(node.child_by_field_name("function")).startswith(
                "INSTANTIATE_TEST"
            ):
                arguments = arguments_of(node)
                self.instances[text_of(arguments[1]) if len(arguments) > 2 else ""] += arguments[2:3]
            waiting += reversed(node.named_children)

    def nodes_of(self, function: str, *types: str) -> list[Node]:
        """The nodes of these types in a function, in the order of the source."""
        if function not in self._nodes:
            self._nodes[function] = list(nodes(self.functions[function], *_NODES))
        return [node for node in self._nodes[function] if node.type in types]

    def inputs(self, function: str) -> set[str]:
        """The names, and fields of names, that a function uses outside of its checks: the code under test may get them."""
        if function not in self._inputs:
            found: set[str] = set()
            waiting = [self.functions[function]]
            while waiting:
                node = waiting.pop()
                if node.type in (*NAMES, "field_expression"):
                    found.add(text_of(node))
                waiting += self._used_parts(node)
            for loop in self.nodes_of(function, "for_range_loop"):
                if declared_names(loop)[0] in found:
                    found.add(text_of(loop.child_by_field_name("right")))
            self._inputs[function] = found
        return self._inputs[function]

    def _used_parts(self, node: Node) -> list[Node]:
        """The parts of a node in which names are used, but for checks, declarations, and loops over a table."""
        parts = {name: node.child_by_field_name(name) for name in ("value", "right", "body", "argument")}
        kept: list[Node | None]
        match node.type:
            case "init_declarator":
                kept = [parts["value"]]
            case "assignment_expression":
                kept = [parts["right"]]
            case "for_range_loop":
                right = parts["right"]
                kept = [parts["body"], None if right is not None and right.type in NAMES else right]
            case "field_expression":
                argument = parts["argument"]
                if argument is not None and argument.type == "subscript_expression":
                    argument = argument.child_by_field_name("indices")  # of a row of a table
                kept = [None if argument is not None and argument.type == "identifier" else argument]
            case "parameter_list" | "function_declarator":
                kept = []
            case "call_expression" if any(self.of_call(node, "")):
                kept = [*calls_in(arguments_of(node))]
            case "if_statement" if any(self.of_condition(node, PROGRAM)):
                condition = condition_of(node)
                kept = [node.child_by_field_name("consequence"), node.child_by_field_name("alternative")]
                kept += calls_in([condition] if condition else [])
            case _:
                return node.named_children
        return [one for one in kept if one is not None]

    def reached(self, test: str) -> list[str]:
        """The functions of this file that a test calls, and those that they call, itself included; all of them for the program."""
        if test == PROGRAM:
            return list(self.functions)
        found = [test]
        by_last = defaultdict[str, list[str]](list)
        for name in self.functions:
            by_last[last_part(name)].append(name)
        for name in found:
            for call in self.nodes_of(name, "call_expression"):
                found += [
                    one for one in by_last[called_name(call)] if one not in found and one not in self.tests
                ]
        return found

    def calls_of(self, function: str, among: Collection[str]) -> list[tuple[str, Node]]:
        """The calls of a function within these functions, each with the function that it is in."""
        return [(owner, call) for owner, call in self._calls[last_part(function)] if owner in among]

    def checks(self, functions: Iterable[str]) -> "Iterator[CppCheck]":
        for owner in functions:
            for node in self.nodes_of(owner, "if_statement", "call_expression"):
                if node.has_error:
                    continue
                yield from (
                    self.of_condition(node, owner)
                    if node.type == "if_statement"
                    else self.of_call(node, owner)
                )

    def of_condition(self, statement: Node, owner: str) -> "Iterator[CppCheck]":
        """The expectation in `if (got != want) return 1;`, also where the failure is in `else`."""
        condition = condition_of(statement)
        fails = [
            makes_fail(statement.child_by_field_name(part), owner) for part in ("consequence", "alternative")
        ]
        if condition is not None and fails[0] != fails[1]:
            expected = tuple(must_equal(condition, passes=fails[1]))
            yield CppCheck(
                condition, owner, expected, opposite=(span_of(condition), f"!({text_of(condition)})")
            )

    def of_call(self, call: Node, owner: str) -> "Iterator[CppCheck]":
        """The expectation in the call of a checking macro or function."""
        name, arguments = called_name(call), arguments_of(call)
        if not arguments or name in self.functions:
            return
        found = CHECK.search(name)
        if name in self.macros:
            if len(arguments) > 1:
                yield CppCheck(call, owner, tuple(arguments[1:]))
            else:
                yield from of_truth(call, owner, arguments[0], passes=True)
        elif found is not None:
            yield from of_check(call, owner, name[found.end() :].lower(), arguments)


def _heads(source: bytes) -> tuple[bytes, dict[int, str]]:
    """The source with the macros that open tests and sections replaced by code of the same length, and the names of tests by the index of
    their first byte.
    """
    parts, at = list[bytes](), 0
    named: dict[int, str] = {}
    for head in _HEAD.finditer(source):
        start = head.start() + len(head[0]) - len(head[0].lstrip())
        end = _closing(source, head.end()) if head.lastgroup else head.end()
        if start < at or end is None:
            continue
        arguments = source[head.end() + 1 : end - 1].decode("utf-8", "replace") if head.lastgroup else ""
        if name := _name(head.lastgroup or "", head[0].strip().decode(), arguments):
            named[start] = name
        opens = {"section": (b"if(1", b")"), "suite": (b"namespace t", b""), None: (b"", b"")}.get(
            head.lastgroup, (b"void t(", b")")
        )
        inner = re.sub(rb"[^\n]", b" ", source[start:end])[len(opens[0]) : end - start - len(opens[1])]
        parts += [source[at:start], opens[0], inner, opens[1]]
        at = end
    return b"".join([*parts, source[at:]]), named


def _closing(source: bytes, opening: int) -> int | None:
    """The index after the parenthesis that closes the one at `opening`."""
    depth = 0
    for token in _TOKEN.finditer(source, opening):
        depth += (token[0] == b"(") - (token[0] == b")")
        if depth == 0:
            return token.end()
    return None


def _name(kind: str, macro: str, arguments: str) -> str:
    """The name of the test that a macro opens; "" if it opens none."""
    if kind == "pair":
        return ".".join(re.findall(r"\w+", arguments)[:2])
    if kind == "word":
        return next(iter(re.findall(r"\w+", arguments)), "")
    texts = re.findall(r'"(?:\\.|[^"\\])*"', arguments) if kind == "text" else []
    with suppress(ValueError, SyntaxError):
        name = str(ast.literal_eval(texts[0])) if texts else ""
        return f"Scenario: {name}" if macro.startswith("SCENARIO") and name else name
    return ""
