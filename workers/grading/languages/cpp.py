"""C and C++: tests of GoogleTest, Catch2, doctest, cmocka, Unity and Boost.Test, and programs with `assert` that ctest or automake run.

Sources are parsed before the preprocessor runs, so the macros that open a test or a section are read first and replaced by the heads of
functions and conditions of the same length. A check is the call of a macro or function whose name says so, or a condition under which a
test fails. Its value is followed to where it is written: locals, constants, rows of tables, values of parametrized tests, arguments of
helper functions. A program that checks without a framework is one test, `main`.
"""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import tree_sitter_cpp
from tree_sitter import Language as Grammar
from tree_sitter import Node, Parser

from pipeline.task import ContradictionKind
from workers.grading.controls.spans import Candidate, Span
from workers.grading.languages import cpp_logs
from workers.grading.languages.language import (
    DeclaredTest,
    ExpectedPlace,
    Form,
    candidates_at,
    nodes,
    other_number,
    other_text,
    text_of,
)

_GRAMMAR = Grammar(tree_sitter_cpp.language())
_PROGRAM = "main"  # the test that is the whole program of a file
_TEST_PATH = re.compile(r"test|spec|check|unit", re.IGNORECASE)
_NO_TEST_PATH = re.compile(
    r"(?:^|/)(?:third[_-]?party|externals?|vendor|_deps|googletest|catch2?)/", re.IGNORECASE
)

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
_CHECK = re.compile(
    r"(?:(?:^|_)(?:EXPECT|ASSERT|REQUIRE|CHECK|VERIFY|ENSURE)|^BOOST_TEST|^(?:ck_|cr_|munit_)?(?:assert|expect)|^Q(?:COMPARE|VERIFY)(?:2$)?)_?"
)
# What a check expects, by the rest of its name; the first that is found counts.
_SHAPES = tuple(
    (shape, re.compile(pattern))
    for shape, pattern in {
        "no throw": r"no_?throw",
        "text of throw": r"throws?_(?:with|matches)|^(?:debug_)?death|^exit$",
        "throw": r"throw|exception",
        "matcher": r"^that$",
        "unequal": r"(?:^|_|str|case)ne(?:$|_)|not_?eq",
        "within": r"within",
        "close": r"near|close|delta|float|double",
        "order": r"^(?:lt|le|gt|ge)$",
        "text": r"str(?:ing)?_?(?:case)?_?eq|equal_string",
        "equal": r"(?:^|_)eq|equal|compare|same|memory",
        "false": r"false",
        "null": r"null",
    }.items()
)
# Both arguments of these checks become two that do not fit each other where the original ones do.
_SWAPPED = {
    "eq": "({}) == ({}), 0",
    "ne": "({}) != ({}), 1",
    "lt": "({}) < ({}), 0",
    "le": "({}) <= ({}), 0",
    "gt": "!(({}) > ({})), 0",
    "ge": "!(({}) >= ({})), 1",
}
_WITH_TOLERANCE = re.compile(r"\b(?:Approx|Within\w*|\w*Near\w*|\w*FloatEq|\w*DoubleEq)\b")
_COMPARES = re.compile(r"(?:std::)?(?:(?:w?str|mem|wcs)n?(?:case)?cmp)")  # 0 where both are equal
_EQUAL = re.compile(r"(?:\w+::)*(?:equal|almost_equal|nearly_equal|streq)")
_FAILS = re.compile(r"(?:\w+_)?(?:FAIL|FAILURE|FAIL_CHECK|FAIL_MESSAGE)|abort|fail\w*|ck_abort\w*")
_COUNTS_FAILURES = re.compile(r"fail|err|bad|wrong|result|status|^r[ce]?t?$", re.IGNORECASE)
# Calls that pass the value of their arguments on: conversions, constructors, matchers, methods of a text.
_PASSES_ON = re.compile(
    r"(?:\w+::)*(?:u?int\w*|u?long|short|unsigned|signed|double|float|char|bool|size_t|\w+_t|\w*string(?:_view)?|vector|array|list|set|map|pair"
    r"|tuple|optional|initializer_list|make_(?:pair|tuple|optional|unique|shared)|static_cast|span|complex|move"
    r"|Approx|Eq|StrEq|StrCaseEq|\w*DoubleEq|\w*FloatEq|\w*Near|Within\w+|ElementsAre\w*|UnorderedElementsAre\w*|Pair|Pointee|HasSubstr|StartsWith"
    r"|EndsWith|SizeIs|Each|Contains\w*|Equals\w*|Optional|Field|Property|AllOf|Key|Message\w*|Regex\w*|Matches\w*)"
)
_METHODS = frozenset(("c_str", "data", "str", "epsilon", "margin", "scale", "begin", "end", "value"))
_TEXTS = ("string_literal", "raw_string_literal", "char_literal")
_LITERALS = ("number_literal", *_TEXTS, "true", "false")
_NAMES = ("identifier", "field_identifier", "qualified_identifier")
_BINDING = ("init_declarator", "assignment_expression", "for_range_loop", "field_declaration")
_NODES = (
    *_BINDING,
    *_LITERALS,
    "if_statement",
    "call_expression",
    "lambda_expression",
)  # what is looked for in functions
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
_OTHER_ERRORS = ("std::bad_alloc", "std::bad_cast")

# Parts of a value: of each of its elements ("*"), the element at a place, or the field of a name.
_Steps: TypeAlias = tuple[str | int, ...]


class Cpp:
    """The languages C and C++; see `LanguageModule`."""

    endings = (".c", ".cc", ".cpp", ".cxx")

    def may_hold_tests(self, path: str) -> bool:
        return _TEST_PATH.search(path) is not None and not _NO_TEST_PATH.search(path)

    def tests(self, source: bytes) -> list[DeclaredTest]:
        return [DeclaredTest(name, (name,)) for name in _CppFile(source).tests]

    def forms(self, name: str) -> list[Form]:
        """A name may be that of a program, which is then looked for in the file of this name, or in the only file with tests."""
        head, _, case = name.partition(".")
        suites = [part for part in head.split("/") if not part.isdigit()] if case else []
        found = [Form(f"{suite}.{case.partition('/')[0]}") for suite in reversed(suites)]
        found += [Form(name), Form(name.partition("/")[0])]
        if re.fullmatch(r"[\w./+-]+", name) and not name.endswith(".py"):
            bare = re.sub(r"^(?:unit)?tests?[_-]|[_-](?:unit)?tests?$", "", name)
            places = (
                name,
                bare,
                f"test_{bare}",
                f"{bare}_test",
                f"test-{bare}",
                f"{bare}-test",
                f"{bare}_tests",
                "",
            )
            found += [Form(_PROGRAM, place, is_exact=True) for place in dict.fromkeys(places)]
        return found

    def outcomes(self, log: str) -> dict[str, str]:
        return cpp_logs.outcomes(log)

    def candidates(self, source: bytes, chance: random.Random) -> list[Candidate]:
        file = _CppFile(source)
        return candidates_at({test: list(_places(file, test, chance)) for test in file.tests}, chance)


LANGUAGE = Cpp()


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


@dataclass(slots=True)
class _CppFile:
    """A parsed file: its functions by name, of which tests have the names of tests, and what it declares elsewhere."""

    source: bytes
    functions: dict[str, Node] = field(default_factory=dict[str, Node])
    tests: list[str] = field(default_factory=list[str])
    structs: dict[str, Node] = field(default_factory=dict[str, Node])
    macros: set[str] = field(default_factory=set[str])  # macros of the file that check something
    declarations: list[Node] = field(
        default_factory=list[Node]
    )  # variables, constants and fields outside of functions
    instances: dict[str, list[Node]] = field(
        default_factory=lambda: defaultdict(list)
    )  # generators of values, by suite
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
        if self.tests or _PROGRAM in self.functions:
            self.tests = [*(name for name in self.tests if name != _PROGRAM), _PROGRAM]
        for owner in self.functions:
            for call in self.nodes_of(owner, "call_expression"):
                self._calls[_last_name(call)].append((owner, call))

    def _read(self, root: Node, named: dict[int, str]) -> None:
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if node.type == "function_definition":
                name = named.get(node.start_byte) or _declared(node)[0]
                self.functions[name if name not in self.functions else f"{name}@{node.start_byte}"] = node
                continue
            if node.type in ("struct_specifier", "class_specifier", "type_definition"):
                body = next(nodes(node, "field_declaration_list"), None)
                name = node.child_by_field_name("declarator" if node.type == "type_definition" else "name")
                if body is not None:
                    self.structs[text_of(name)] = body
            elif node.type == "preproc_function_def" and _says_check(text_of(node)):
                self.macros.add(text_of(node.child_by_field_name("name")))
            elif node.type in _BINDING:
                self.declarations.append(node)
            elif node.type == "call_expression" and text_of(node.child_by_field_name("function")).startswith(
                "INSTANTIATE_TEST"
            ):
                arguments = _arguments(node)
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
                if node.type in (*_NAMES, "field_expression"):
                    found.add(text_of(node))
                waiting += self._used_parts(node)
            for loop in self.nodes_of(function, "for_range_loop"):
                if _declared(loop)[0] in found:
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
                kept = [parts["body"], None if right is not None and right.type in _NAMES else right]
            case "field_expression":
                argument = parts["argument"]
                if argument is not None and argument.type == "subscript_expression":
                    argument = argument.child_by_field_name("indices")  # of a row of a table
                kept = [None if argument is not None and argument.type == "identifier" else argument]
            case "parameter_list" | "function_declarator":
                kept = []
            case "call_expression" if any(self.of_call(node, "")):
                kept = [*_calls_in(_arguments(node))]
            case "if_statement" if any(self.of_condition(node, _PROGRAM)):
                condition = _condition(node)
                kept = [node.child_by_field_name("consequence"), node.child_by_field_name("alternative")]
                kept += _calls_in([condition] if condition else [])
            case _:
                return node.named_children
        return [one for one in kept if one is not None]

    def reached(self, test: str) -> list[str]:
        """The functions of this file that a test calls, and those that they call, itself included; all of them for the program."""
        if test == _PROGRAM:
            return list(self.functions)
        found = [test]
        by_last = defaultdict[str, list[str]](list)
        for name in self.functions:
            by_last[_last(name)].append(name)
        for name in found:
            for call in self.nodes_of(name, "call_expression"):
                found += [
                    one for one in by_last[_last_name(call)] if one not in found and one not in self.tests
                ]
        return found

    def calls_of(self, function: str, among: Collection[str]) -> list[tuple[str, Node]]:
        """The calls of a function within these functions, each with the function that it is in."""
        return [(owner, call) for owner, call in self._calls[_last(function)] if owner in among]

    def checks(self, functions: Iterable[str]) -> "Iterator[_CppCheck]":
        for owner in functions:
            for node in self.nodes_of(owner, "if_statement", "call_expression"):
                if node.has_error:
                    continue
                yield from (
                    self.of_condition(node, owner)
                    if node.type == "if_statement"
                    else self.of_call(node, owner)
                )

    def of_condition(self, statement: Node, owner: str) -> "Iterator[_CppCheck]":
        """The expectation in `if (got != want) return 1;`, also where the failure is in `else`."""
        condition = _condition(statement)
        fails = [
            _makes_fail(statement.child_by_field_name(part), owner) for part in ("consequence", "alternative")
        ]
        if condition is not None and fails[0] != fails[1]:
            expected = tuple(_must_equal(condition, passes=fails[1]))
            yield _CppCheck(
                condition, owner, expected, opposite=(_span(condition), f"!({text_of(condition)})")
            )

    def of_call(self, call: Node, owner: str) -> "Iterator[_CppCheck]":
        """The expectation in the call of a checking macro or function."""
        name, arguments = _last_name(call), _arguments(call)
        if not arguments or name in self.functions:
            return
        found = _CHECK.search(name)
        if name in self.macros:
            if len(arguments) > 1:
                yield _CppCheck(call, owner, tuple(arguments[1:]))
            else:
                yield from _of_truth(call, owner, arguments[0], passes=True)
        elif found is not None:
            yield from _of_check(call, owner, name[found.end() :].lower(), arguments)


def _says_check(text: str) -> bool:
    """Whether a text names a macro or function that checks or fails."""
    return any(_CHECK.search(word) or _FAILS.fullmatch(word) for word in re.findall(r"\w+", text))


def _last(name: str) -> str:
    return re.split(r"::|@", name)[-1] if "::" in name else name.partition("@")[0]


def _last_name(call: Node) -> str:
    """The last part of the name of the function that is called, without arguments of templates."""
    name = text_of(call.child_by_field_name("function")).partition("<")[0]
    return re.split(r"::|\.|->", name)[-1]


def _span(node: Node, last: Node | None = None) -> Span:
    return node.start_byte, (last or node).end_byte


def _arguments(call: Node) -> list[Node]:
    arguments = call.child_by_field_name("arguments")
    return [] if arguments is None else [one for one in arguments.named_children if one.type != "comment"]


def _condition(statement: Node) -> Node | None:
    """The condition of an `if` that declares nothing."""
    clause = statement.child_by_field_name("condition")
    value = clause.child_by_field_name("value") if clause is not None else None
    return None if value is None or value.type == "declaration" else value


def _declared(node: Node) -> list[str]:
    """The name that a declaration gives a value, or the names between which a structured binding divides it; [""] if there is none."""
    inner: Node | None = node
    while inner is not None and inner.type not in _NAMES:
        if inner.type == "structured_binding_declarator":
            return [text_of(one) for one in inner.named_children]
        declarator = inner.child_by_field_name("declarator") or inner.child_by_field_name("left")
        is_wrapped = inner.type in ("reference_declarator", "parenthesized_declarator")
        inner = declarator or (inner.named_children[0] if is_wrapped and inner.named_children else None)
    return [_last(text_of(inner))]


@dataclass(frozen=True, slots=True)
class _CppCheck:
    """The place where something is expected: the expressions that may hold the value, and what else can be changed."""

    root: Node
    owner: str  # the function that it is in
    expected: tuple[Node, ...] = ()
    is_close: bool = False  # the value may differ a little
    opposite: tuple[Span, str] | None = None
    nothing: tuple[Span, str] | None = None


def _of_truth(call: Node, owner: str, condition: Node, passes: bool) -> Iterator[_CppCheck]:
    expected = tuple(_must_equal(condition, passes))
    is_close = _WITH_TOLERANCE.search(text_of(condition)) is not None
    yield _CppCheck(call, owner, expected, is_close, opposite=(_span(condition), f"!({text_of(condition)})"))


def _of_check(call: Node, owner: str, rest: str, arguments: Sequence[Node]) -> Iterator[_CppCheck]:
    """The expectation of a check with a name that ends with `rest`."""
    shape = next((shape for shape, pattern in _SHAPES if pattern.search(rest)), "")
    first, texts = arguments[0], [text_of(one) for one in arguments]
    if len(arguments) == 1 and shape in ("throw", "no throw"):
        # GoogleTest takes statements, the others expressions.
        throws = f"{texts[0]}; throw 1" if "_throw" in rest else f"((void)({texts[0]}), throw 1)"
        becomes = throws if shape == "no throw" else f"[&] {{ try {{ {texts[0]}; }} catch (...) {{}} }}()"
        yield _CppCheck(call, owner, opposite=(_span(first), becomes))
    elif shape == "null":
        yield _CppCheck(call, owner, opposite=(_span(first), f"({texts[0]}) ? NULL : (void *)1"))
    elif len(arguments) == 1 or shape in ("", "false"):
        yield from _of_truth(call, owner, first, passes=shape != "false")
    elif shape == "text of throw":
        yield _CppCheck(call, owner, tuple(arguments[1:]))
    elif shape == "throw":
        other = next(one for one in _OTHER_ERRORS if _last(one) not in texts[1])
        yield _CppCheck(call, owner, opposite=(_span(arguments[1]), other))
    elif shape == "matcher":
        is_catch = not text_of(call).startswith(("EXPECT", "ASSERT"))
        becomes = f"!({texts[1]})" if is_catch else f"::testing::Not({texts[1]})"
        is_close = _WITH_TOLERANCE.search(texts[1]) is not None
        yield _CppCheck(call, owner, (arguments[1],), is_close, opposite=(_span(arguments[1]), becomes))
    elif shape in ("close", "within"):
        tolerance = (_span(arguments[2]), "-1.0") if rest == "near" and len(arguments) > 2 else None
        yield _CppCheck(
            call,
            owner,
            tuple(arguments[1:3] if shape == "within" else arguments[:2]),
            True,
            opposite=tolerance,
        )
    elif shape == "text":
        nothing = (_span(arguments[1]), r'"\001"') if not texts[1].startswith(("L", "u", "U")) else None
        yield _CppCheck(call, owner, tuple(arguments[:2]), nothing=nothing)
    else:
        operation = rest if rest in _SWAPPED else {"equal": "eq", "unequal": "ne"}.get(shape, "")
        swapped = _SWAPPED[operation].format(*texts[:2]) if operation else ""
        expected = () if shape in ("unequal", "order") else tuple(arguments[:2])
        yield _CppCheck(
            call, owner, expected, opposite=(_span(first, arguments[1]), swapped) if swapped else None
        )


def _must_equal(condition: Node, passes: bool) -> Iterator[Node]:
    """The operands of a condition that must be equal for the test to pass. `passes`: it passes if this is true."""
    match condition.type:
        case "parenthesized_expression" if condition.named_children:
            yield from _must_equal(condition.named_children[0], passes)
        case "unary_expression" if text_of(condition.child_by_field_name("operator")) in ("!", "not"):
            yield from _must_equal(condition.named_children[-1], not passes)
        case "binary_expression":
            operator = text_of(condition.child_by_field_name("operator"))
            operands = [one for one in condition.named_children if one.type != "comment"]
            compared = [
                one for one in operands if _COMPARES.fullmatch(text_of(one.child_by_field_name("function")))
            ]
            if operator in ("&&", "||", "and", "or"):
                for operand in operands:
                    yield from _must_equal(operand, passes)
            elif (operator == "==") == passes and operator in ("==", "!="):
                yield from (operands if not compared else _arguments(compared[0])[:2])
        case "call_expression":
            name = text_of(condition.child_by_field_name("function"))
            if (not passes and _COMPARES.fullmatch(name)) or (passes and _EQUAL.fullmatch(name)):
                yield from _arguments(condition)[:2]
        case _:
            pass


def _calls_in(parts: Iterable[Node]) -> list[Node]:
    """The outermost calls and functions within these, through conversions and comparisons."""
    found: list[Node] = []
    for part in parts:
        name = text_of(part.child_by_field_name("function")).partition("<")[0]
        passes_on = _PASSES_ON.fullmatch(name) or _COMPARES.fullmatch(name)
        if part.type == "lambda_expression" or (part.type == "call_expression" and not passes_on):
            found.append(part)
        else:
            found += _calls_in(part.named_children)
    return found


def _makes_fail(branch: Node | None, owner: str) -> bool:
    """Whether the branch makes the test or the program fail."""
    for one in (
        []
        if branch is None
        else branch.named_children
        if branch.type in ("compound_statement", "else_clause")
        else [branch]
    ):
        inner = one.named_children[0] if one.type == "expression_statement" and one.named_children else one
        if inner.type == "return_statement" and re.search(r"main|test|check", owner, re.IGNORECASE):
            return re.fullmatch(r"return\s*\(?(?:-?[1-9]\d*|EXIT_FAILURE)\)?;", text_of(inner)) is not None
        if inner.type == "call_expression":
            ends = re.fullmatch(
                r"_?exit\(\s*(?:-?[1-9]\d*|EXIT_FAILURE)\s*\)",
                _last_name(inner) + text_of(inner.child_by_field_name("arguments")),
            )
            if ends or _FAILS.fullmatch(_last_name(inner)):
                return True
        if inner.type in ("update_expression", "assignment_expression") and _COUNTS_FAILURES.search(
            text_of(inner)
        ):
            return not text_of(inner).endswith(("= 0", "= true"))
        if inner.type == "binary_expression" and re.match(
            r"(?:GTEST_FAIL|FAIL|ADD_FAILURE)\(", text_of(inner)
        ):
            return True
        if inner.type in ("compound_statement", "else_clause") and _makes_fail(inner, owner):
            return True
    return False


def _places(file: _CppFile, test: str, chance: random.Random) -> Iterator[ExpectedPlace]:
    """The places where something can be changed that a test expects."""
    reached = file.reached(test)
    values = _CppValues(file, reached)
    literals = {text_of(node) for name in reached for node in file.nodes_of(name, *_LITERALS)}
    for check in file.checks(reached):
        checked = _span(check.root)
        for leaf in (leaf for one in check.expected for leaf in values.leaves(one, check.owner)):
            yield ExpectedPlace(
                _span(leaf), "value", checked, partial(_other, leaf, literals, check.is_close, chance)
            )
        others: tuple[tuple[ContradictionKind, tuple[Span, str] | None], ...] = (
            ("opposite", check.opposite),
            ("nothing", check.nothing),
        )
        for kind, change in others:
            if change is not None and b"#" not in file.source[slice(*change[0])]:
                yield ExpectedPlace(change[0], kind, checked, partial(str, change[1]))


@dataclass(slots=True)
class _CppValues:
    """Follows expected values to the literals that they are made of, within the functions that a test reaches."""

    file: _CppFile
    functions: list[str]

    def leaves(self, expression: Node, owner: str) -> list[Node]:
        """The literals that an expression consists of, or that the names in it were given."""
        found = [one for node in self._written(expression, owner, (), _DEEPEST) for one in _literals(node)]
        return list({_span(one): one for one in found}.values())

    def _written(self, node: Node, owner: str, steps: _Steps, depth: int) -> Iterator[Node]:
        """The expressions whose value this part of an expression has, as far as they are written out."""
        if depth == 0:
            return
        further = partial(self._further, depth=depth - 1)
        match node.type:
            case "identifier" | "qualified_identifier" | "field_identifier":
                for value, place, more in self._bound(_last(text_of(node)), owner):
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
        function, arguments = call.child_by_field_name("function"), _arguments(call)
        name = text_of(function)
        if function is not None and function.type == "field_expression":
            operand = function.child_by_field_name("argument")
            if _last_name(call) in _METHODS and operand is not None:
                yield from self._written(operand, owner, steps, depth)
        elif _last_name(call) == "GetParam":
            for generator in self.file.instances[owner.partition(".")[0]]:
                yield from self._of_generator(generator, owner, steps, depth)
        elif (place := re.search(r"\bget<\s*(\d+)\s*>$", name)) is not None:
            yield from self._further(arguments[:1], owner, (int(place[1]), *steps), depth=depth)
        elif steps:
            yield from self._further(_parts(self.file, call, steps[0]), owner, steps[1:], depth=depth)
        elif _PASSES_ON.fullmatch(name.partition("<")[0]) or name in self.file.structs:
            yield from self._further(arguments, owner, (), depth=depth)

    def _of_generator(self, generator: Node, owner: str, steps: _Steps, depth: int) -> Iterator[Node]:
        """The values of `Values`, `ValuesIn` or `Combine`."""
        arguments = _arguments(generator)
        match _last_name(generator):
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
        found = [(*one, owner) for node in self.file.nodes_of(owner, *_BINDING) for one in _given(node, name)]
        callers: list[tuple[list[str], list[tuple[str, Node]]]] = []
        for one in self.file.nodes_of(owner, "lambda_expression") if not found else ():
            called = (
                _declared(one.parent)[0]
                if one.parent is not None and one.parent.type == "init_declarator"
                else ""
            )
            callers.append((_parameters(one), self.file.calls_of(called, [owner]) if called else []))
        callers.append((_parameters(self.file.functions[owner]), self.file.calls_of(owner, self.functions)))
        for parameters, calls in callers if not found else ():
            if name in parameters:
                place = parameters.index(name)
                found += [
                    (one, (), caller) for caller, call in calls for one in _arguments(call)[place : place + 1]
                ]
        if not found and not any(name in parameters for parameters, _ in callers):
            found = [(*one, owner) for node in self.file.declarations for one in _given(node, name)]
            setting = [one for one in self.file.functions if _last(one) in ("SetUp", "SetUpTestSuite")]
            found += [
                (*given, one)
                for one in setting
                for node in self.file.nodes_of(one, *_BINDING)
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
    names = _declared(node)
    if name in names:
        place: _Steps = (names.index(name),) if len(names) > 1 else ()
        yield value, ("*", *place) if node.type == "for_range_loop" else place


def _parameters(function: Node) -> list[str]:
    listed = next(nodes(function, "parameter_list"), None)
    return [_declared(one)[0] for one in listed.named_children if one.type != "comment"] if listed else []


def _elements(value: Node) -> list[Node]:
    """The elements of a list of values, of a structure or of a constructor's arguments."""
    body = value.child_by_field_name("arguments") or value.child_by_field_name("value") or value
    if body.type not in ("initializer_list", "argument_list"):
        return []
    found = [one for one in body.named_children if one.type != "comment"]
    # `Type table{{...}}` and `Type table({...})` have one list around the list.
    is_alone = len(found) == 1 and found[0].type == "initializer_list"
    return _elements(found[0]) if is_alone and body.type == "argument_list" else found


def _parts(file: _CppFile, value: Node, step: str | int) -> list[Node]:
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


def _fields(file: _CppFile, row: Node) -> list[str]:
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
    if value.type in _LITERALS:
        yield value
    elif value.type in ("user_defined_literal", "initializer_pair", "compound_literal_expression"):
        place = 0 if value.type == "user_defined_literal" else -1
        yield from _literals(value.named_children[place])
    elif value.type in _LISTS:
        for child in value.named_children:
            yield from _literals(child)
    elif value.type == "call_expression" and _PASSES_ON.fullmatch(
        text_of(value.child_by_field_name("function")).partition("<")[0]
    ):
        for argument in _arguments(value):
            yield from _literals(argument)


def _other(leaf: Node, literals: Collection[str], is_close: bool, chance: random.Random) -> str | None:
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
