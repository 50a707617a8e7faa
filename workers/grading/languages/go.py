"""Go: tests of the package `testing`, with testify, gocheck, quicktest and Gomega.

A failure of `testing` is a statement under a condition, `if got != want { t.Errorf(...) }`. So an expectation is a value in such a
condition, or in a call of a checking function; the value is followed to where it is written: a local variable, a constant, a column of
the table that a loop runs over, an argument of a helper function. Code that a changed literal or a negated condition belongs to still
compiles, because types stay and every variable is still used.
"""

import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
import tree_sitter_go
from tree_sitter import Language as Grammar
from tree_sitter import Node, Parser

from workers.grading.controls.spans import Candidate
from workers.grading.languages.language import (
    FAILED,
    PASSED,
    SKIPPED,
    DeclaredTest,
    ExpectedPlace,
    Form,
    candidates_at,
    joined,
    nodes,
    other_number,
    other_text,
    text_of,
)

_GRAMMAR = Grammar(tree_sitter_go.language())
_TEST = re.compile(r"(?:Test|Example|Fuzz)(?![a-z])\w*")
_NAME = re.compile(r"(?:(?P<package>[^\s:]+?)[.:])?(?P<test>(?:Test|Example|Fuzz)(?![a-z])\w*(?:/.*)?)")
_REPORT = re.compile(
    r"--- (?P<said>PASS|FAIL|SKIP): (?P<test>\S+) \([\d.]+s\)|^(?:ok  |FAIL|\?   )\t(?P<package>\S+)",
    re.MULTILINE,
)
_OUTCOMES = {"pass": PASSED, "fail": FAILED, "skip": SKIPPED}
_OUTPUT = re.compile(r"//\s*(?:unordered )?output:", re.IGNORECASE)

_FAILS = re.compile(r"(?:Error|Fatal)(?:f|ln)?|Fail(?:Now)?")
# Functions of two values, which are equal, or one of which contains the other, or whose difference is returned.
_COMPARES = re.compile(
    r"(?:reflect\.)?DeepEqual|\w+\.(?:Equal|EqualFold|Compare|Diff|Contains|HasPrefix|HasSuffix|Is|MatchString)"
)
_TESTING = re.compile(r"t|tb|b|f|\w+\.T\(\)|test\w*")  # the first argument of testify's functions
_CHECKER = re.compile(r"(?:assert|require|is|as|must|should|a|r|s|ts|suite)(?:\.(?:Assert|Require)\(\))?")
# Calls whose arguments are no inputs of the code under test.
_REPORTS = re.compile(r"\w+\.(?:Run|Logf?|Errorf?|Fatalf?|Skipf?)|panic|len|cap")
# Methods of testify with the places of the expected values among their arguments, those of its `t` and of messages left out.
_TESTIFY: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Equal", "EqualValues", "Exactly", "JSONEq", "YAMLEq", "ElementsMatch"), (0, 1)),
    **dict.fromkeys(("InDelta", "InEpsilon", "Same", "WithinDuration", "Subset"), (0, 1)),
    **dict.fromkeys(("Len", "Contains", "EqualError", "ErrorContains", "ErrorIs"), (1,)),
    **dict.fromkeys(
        ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "PanicsWithValue", "PanicsWithError"), (0, 1)
    ),
    "Regexp": (0,),
}
_TRUTHS = ("True", "False")
_GOCHECK = ("Assert", "Check")
# Matchers of Gomega whose argument is the expected value.
_GOMEGA = re.compile(
    r"(?:gomega\.)?(?:Equal|BeEquivalentTo|BeIdenticalTo|ContainSubstring|HaveLen|HaveCap|MatchError|ConsistOf|ContainElements?"
    r"|HaveKey|HaveKeyWithValue|HavePrefix|HaveSuffix|MatchJSON|BeNumerically)"
)
_COMPARED_BY_TYPE = ("Equal", "EqualValues", "Exactly")
# Calls that pass the value of their argument on.
_CONVERSIONS = re.compile(
    r"u?int(?:8|16|32|64)?|uintptr|float(?:32|64)|complex(?:64|128)|string|byte|rune|bool|\[\]\w+|errors\.New|fmt\.(?:Errorf|Sprintf)"
    r"|(?:json\.RawMessage|time\.Duration|append)"
)
_NUMBERS = ("int_literal", "float_literal", "imaginary_literal")
_TEXTS = ("interpreted_string_literal", "raw_string_literal", "rune_literal")
_BINDING = ("short_var_declaration", "assignment_statement", "var_spec", "const_spec", "range_clause")
_NODES = (*_BINDING, *_NUMBERS, *_TEXTS, "if_statement", "call_expression")  # what is looked for in functions
_TRIES = 4  # tries to find a literal that is new in a test
_DEEPEST = 8  # names that are followed from one to the next


class _Event(msgspec.Struct):
    """A line of `go test -json`."""

    Action: str = ""
    Package: str = ""
    Test: str = ""


class Go:
    """The language Go."""

    endings = (".go",)

    def may_hold_tests(self, path: str) -> bool:
        return path.endswith("_test.go") and "vendor" not in path.split("/")

    def tests(self, source: bytes) -> list[DeclaredTest]:
        return [
            DeclaredTest(name, (f"/{name.partition('.')[2]}" if "." in name else name,))
            for name in _GoFile(source).tests
        ]

    def forms(self, name: str) -> list[Form]:
        found = _NAME.fullmatch(name)
        if found is None:
            return []
        function, _, rest = found["test"].partition("/")
        method = rest.partition("/")[0]
        forms = [Form(f"/{method}", found["package"] or "")] if _TEST.fullmatch(method) else []
        return [*forms, Form(function, found["package"] or "")]

    def outcomes(self, log: str) -> dict[str, str]:
        if '"Action"' in log:
            lines = log.splitlines()
            events = [event for line in lines if line.startswith("{") for event in _event(line)]
            plain = "\n".join(line for line in lines if not line.startswith("{"))
            return joined([*events, *_reported(plain)])
        return joined(_reported(log))

    def candidates(self, source: bytes, chance: random.Random) -> list[Candidate]:
        file = _GoFile(source)
        return candidates_at({test: list(_places(file, test, chance)) for test in file.tests}, chance)


LANGUAGE = Go()


def _event(line: str) -> Iterator[tuple[str, str]]:
    """The outcome in a line of `go test -json`, if it has one."""
    with suppress(msgspec.DecodeError, UnicodeError):
        event = msgspec.json.decode(line, type=_Event)
        if event.Test and event.Action in _OUTCOMES:
            yield f"{event.Package}.{event.Test}", _OUTCOMES[event.Action]


def _reported(log: str) -> Iterator[tuple[str, str]]:
    """The outcomes in the log of `go test -v`, which names the package of tests after them."""
    of_package: list[tuple[str, str]] = []
    for line in _REPORT.finditer(log):
        if line["package"]:
            yield from ((f"{line['package']}.{test}", outcome) for test, outcome in of_package)
            of_package = []
        else:
            of_package.append((line["test"], _OUTCOMES[line["said"].lower()]))
    yield from of_package


@dataclass(slots=True)
class _GoFile:
    """A parsed file: its functions by name, a method as `Type.name`, and its other declarations."""

    source: bytes
    functions: dict[str, Node] = field(default_factory=dict[str, Node])
    structs: dict[str, Node] = field(default_factory=dict[str, Node])
    declarations: list[Node] = field(default_factory=list[Node])  # variables and constants of the file
    _inputs: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    _nodes: dict[str, list[Node]] = field(default_factory=dict[str, list[Node]])
    _calls: dict[str, list[tuple[str, Node]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for node in Parser(_GRAMMAR).parse(self.source).root_node.children:
            name = text_of(node.child_by_field_name("name"))
            if node.type == "function_declaration":
                self.functions[name] = node
            elif node.type == "method_declaration":
                receiver = re.findall(r"\w+", text_of(node.child_by_field_name("receiver")))
                self.functions[f"{receiver[-1] if receiver else ''}.{name}"] = node
            else:
                self.declarations += nodes(node, "var_spec", "const_spec")
                for declared in nodes(node, "type_spec"):
                    self.structs |= {
                        text_of(declared.child_by_field_name("name")): one
                        for one in nodes(declared, "struct_type")
                    }
        for owner in self.functions:
            for call in self.nodes_of(owner, "call_expression"):
                self._calls[_last_name(call)].append((owner, call))

    def nodes_of(self, function: str, *types: str) -> list[Node]:
        """The nodes of these types in a function, in the order of the source."""
        if function not in self._nodes:
            self._nodes[function] = list(nodes(self.functions[function], *_NODES))
        return [node for node in self._nodes[function] if node.type in types]

    @property
    def tests(self) -> list[str]:
        """The functions that the runner calls, and the methods that a suite does."""
        return [name for name in self.functions if _TEST.fullmatch(_last(name))]

    def inputs(self, function: str) -> set[str]:
        """The names, and fields of names, that a function uses outside of its checks: the code under test may get them."""
        if function not in self._inputs:
            found: set[str] = set()
            waiting = [self.functions[function]]
            while waiting:
                node = waiting.pop()
                if node.type in ("identifier", "selector_expression"):
                    found.add(text_of(node))
                waiting += _used_parts(node)
            for loop in self.nodes_of(function, "range_clause"):
                left, right = loop.child_by_field_name("left"), text_of(loop.child_by_field_name("right"))
                if left is not None and any(text_of(one) in found for one in left.named_children[1:]):
                    found.add(right)
            self._inputs[function] = found
        return self._inputs[function]

    def reached(self, test: str) -> list[str]:
        """The functions of this file that a test calls, and those that they call, itself included."""
        by_last = defaultdict[str, list[str]](list)
        for name in self.functions:
            by_last[_last(name)].append(name)
        found = [test]
        for name in found:
            for call in self.nodes_of(name, "call_expression"):
                called = by_last[_last_name(call)]
                found += [one for one in called if one not in found and not _TEST.fullmatch(_last(one))]
        return found

    def calls_of(self, function: str, among: Collection[str]) -> list[tuple[str, Node]]:
        """The calls of a function within these functions, each with the function that it is in."""
        return [(owner, call) for owner, call in self._calls[_last(function)] if owner in among]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _last_name(call: Node) -> str:
    """The last part of the name of the function that is called."""
    return _last(text_of(call.child_by_field_name("function")))


@dataclass(frozen=True, slots=True)
class _GoCheck:
    """The place where something is expected: the expressions that may hold the value, and what else can be changed."""

    root: Node
    owner: str  # the function that it is in
    expected: tuple[Node, ...]
    condition: Node | None = None  # is negated
    compared: Node | None = None  # becomes a value of another type


def _places(file: _GoFile, test: str, chance: random.Random) -> Iterator[ExpectedPlace]:
    """The places where something can be changed that a test expects."""
    reached = file.reached(test)
    values = _GoValues(file, reached)
    literals = {text_of(node) for name in reached for node in file.nodes_of(name, *_NUMBERS, *_TEXTS)}
    for check in _checks(file, reached):
        checked = check.root.start_byte, check.root.end_byte
        for leaf in (leaf for one in check.expected for leaf in values.leaves(one, check.owner)):
            span = leaf.start_byte, leaf.end_byte
            yield ExpectedPlace(span, "value", checked, partial(_other, leaf, literals, chance))
        if (node := check.condition) is not None:
            span = node.start_byte, node.end_byte
            yield ExpectedPlace(span, "opposite", checked, partial("!({})".format, text_of(node)))
        if (node := check.compared) is not None:
            span = node.start_byte, node.end_byte
            yield ExpectedPlace(
                span, "nothing", checked, partial("[]interface{{}}{{{}}}".format, text_of(node))
            )
    yield from _of_output(file, test, chance)


def _checks(file: _GoFile, functions: Iterable[str]) -> Iterator[_GoCheck]:
    for owner in functions:
        for node in file.nodes_of(owner, "if_statement", "call_expression"):
            if node.has_error:
                continue
            if node.type == "if_statement":
                yield from _of_condition(node, owner)
            else:
                yield from _of_call(node, owner)


def _of_condition(statement: Node, owner: str) -> Iterator[_GoCheck]:
    """The expectation in `if got != want { t.Fatal(...) }`, also where the failure is in `else`."""
    condition, fails = statement.child_by_field_name("condition"), _failing(statement)
    if condition is None or fails[0] == fails[1]:
        return
    # A message that reads a part of what is nil would end all tests.
    read = re.fullmatch(r"(\w+) != nil", text_of(condition))
    is_read = read is not None and f"{read[1]}." in text_of(statement.child_by_field_name("consequence"))
    expected = tuple(_must_equal(condition, passes=fails[1]))
    yield _GoCheck(statement, owner, expected, None if is_read else condition)


def _must_equal(condition: Node, passes: bool) -> Iterator[Node]:
    """The operands of a condition that must be equal, or contain each other, for the test to pass. `passes`: it passes if this is true."""
    if condition.type == "parenthesized_expression":
        yield from _must_equal(condition.named_children[0], passes)
    elif condition.type == "unary_expression":
        yield from _must_equal(condition.named_children[0], not passes)
    elif condition.type == "binary_expression":
        operator = text_of(condition.child_by_field_name("operator"))
        for operand in condition.named_children:
            if operator in ("&&", "||"):
                yield from _must_equal(operand, passes)
            elif operator not in ("==", "!=") or (operator == "==") == passes:
                yield operand
    elif passes:
        yield condition


def _used_parts(node: Node) -> list[Node]:
    """The parts of a node in which names are used, but for checks, declarations, loops over a table, and tables."""
    name = text_of(node.child_by_field_name("function"))
    if node.type in ("short_var_declaration", "assignment_statement", "range_clause"):
        right = node.child_by_field_name("right")
        is_table = node.type == "range_clause" and right is not None and right.type == "identifier"
        return [] if right is None or is_table else [right]
    if node.type == "selector_expression":
        operand = node.child_by_field_name("operand")
        return [operand] if operand is not None and operand.type != "identifier" else []
    if node.type in ("composite_literal", "parameter_list"):
        return []
    if node.type == "call_expression" and (_REPORTS.fullmatch(name) or any(_of_call(node, ""))):
        return _calls_in(_arguments(node))
    if node.type == "if_statement" and any(_of_condition(node, "")):
        kept = [node.child_by_field_name(part) for part in ("initializer", "consequence", "alternative")]
        condition = node.child_by_field_name("condition")
        return [*(one for one in kept if one is not None), *_calls_in([condition] if condition else [])]
    return node.children


def _calls_in(parts: Iterable[Node]) -> list[Node]:
    """The outermost calls and functions within these, through conversions and comparisons."""
    found: list[Node] = []
    for part in parts:
        name = text_of(part.child_by_field_name("function"))
        passes_on = _CONVERSIONS.fullmatch(name) or _COMPARES.fullmatch(name) or _REPORTS.fullmatch(name)
        if part.type == "func_literal" or (part.type == "call_expression" and not passes_on):
            found.append(part)
        else:
            found += _calls_in(part.named_children)
    return found


def _makes_fail(branch: Node) -> bool:
    """Whether the branch makes the test fail, itself or in both branches of a condition in it."""
    for one in branch.named_children:
        if one.type == "call_expression" and _FAILS.fullmatch(_last_name(one)):
            return True
        if one.type in ("statement_list", "expression_statement") and _makes_fail(one):
            return True
        if one.type == "if_statement" and all(_failing(one)):
            return True
    return False


def _failing(statement: Node) -> list[bool]:
    """Whether each of the two branches of a condition makes the test fail."""
    branches = [statement.child_by_field_name(name) for name in ("consequence", "alternative")]
    return [branch is not None and _makes_fail(branch) for branch in branches]


def _of_call(call: Node, owner: str) -> Iterator[_GoCheck]:
    """The expectation in a call of a checking function."""
    function = text_of(call.child_by_field_name("function"))
    name, arguments = _last(function), _arguments(call)
    if _GOMEGA.fullmatch(function):
        yield _GoCheck(call, owner, tuple(arguments))
        return
    if "." not in function or not arguments:
        return
    if name in _GOCHECK and len(arguments) > 2:
        yield _GoCheck(call, owner, tuple(arguments[2:]))
        return
    if len(arguments) > 1 and _TESTING.fullmatch(text_of(arguments[0])):
        arguments = arguments[1:]
    elif not _CHECKER.fullmatch(function.rpartition(".")[0]):
        return  # of another package, such as `bytes.Equal`
    name = name.removesuffix("f")
    if name in _TRUTHS:
        yield _GoCheck(call, owner, (), condition=arguments[0])
    elif name in _TESTIFY and len(arguments) > max(_TESTIFY[name]):
        expected = [arguments[place] for place in _TESTIFY[name]]
        compared = expected[0] if name in _COMPARED_BY_TYPE else None
        yield _GoCheck(call, owner, tuple(expected), compared=compared)


def _arguments(call: Node) -> list[Node]:
    arguments = call.child_by_field_name("arguments")
    return [] if arguments is None else [one for one in arguments.named_children if one.type != "comment"]


@dataclass(slots=True)
class _GoValues:
    """Follows expected values to the literals that they are made of, within the functions that a test reaches."""

    file: _GoFile
    functions: list[str]

    def leaves(self, expression: Node, owner: str) -> list[Node]:
        """The literals that an expression consists of, or that the names in it were given."""
        found = [one for node, _ in self._written(expression, owner, _DEEPEST) for one in _literals(node)]
        return list({(one.start_byte, one.end_byte): one for one in found}.values())

    def _written(self, node: Node, owner: str, depth: int) -> Iterator[tuple[Node, str]]:
        """The expressions whose value this one has, as far as they are written out, each with the function that it is in."""
        if depth == 0:
            return
        match node.type:
            case "identifier":
                for value, place, in_elements in self._bound(text_of(node), owner):
                    for one, there in self._written(value, place, depth - 1):
                        for element in _elements(one) if in_elements else [one]:
                            yield from (
                                self._written(element, there, depth - 1) if in_elements else [(one, there)]
                            )
            case "selector_expression" | "index_expression":
                operand, name = (
                    node.child_by_field_name("operand"),
                    text_of(node.child_by_field_name("field")),
                )
                if operand is None or text_of(node) in self.file.inputs(owner):
                    return
                for value, place in self._written(operand, owner, depth - 1):
                    for part in _column(self.file, value, name) if name else _elements(value):
                        yield from self._written(part, place, depth - 1)
            case "parenthesized_expression" | "unary_expression" | "literal_element":
                for child in node.named_children:
                    yield from self._written(child, owner, depth - 1)
            case "call_expression":
                name = text_of(node.child_by_field_name("function"))
                if _CONVERSIONS.fullmatch(name) or _COMPARES.fullmatch(name):
                    for argument in _arguments(node):
                        yield from self._written(argument, owner, depth - 1)
            case _:
                yield node, owner

    def _bound(self, name: str, owner: str) -> Iterator[tuple[Node, str, bool]]:
        """The expressions that a name is given: in its function, by the calls of the function, or in the file. The last value says whether
        the name gets each of the expression's elements.
        """
        found = [(*one, owner) for node in self.file.nodes_of(owner, *_BINDING) for one in _given(node, name)]
        if name in self.file.inputs(owner):
            return
        parameters = _parameters(self.file.functions[owner])
        if not found and name in parameters:
            place = parameters.index(name)
            for caller, call in self.file.calls_of(owner, self.functions):
                found += [(one, False, caller) for one in _arguments(call)[place : place + 1]]
        if not found:
            found = [(*one, owner) for node in self.file.declarations for one in _given(node, name)]
        yield from ((value, place, in_elements) for value, in_elements, place in found)


def _given(node: Node, name: str) -> Iterator[tuple[Node, bool]]:
    """What a declaration, an assignment or a loop gives to a name, if that is written out; and whether it gets each of its elements."""
    if node.type in ("var_spec", "const_spec"):
        names = [text_of(one) for one in node.children_by_field_name("name")]
        values = node.child_by_field_name("value")
    else:
        left, values = node.child_by_field_name("left"), node.child_by_field_name("right")
        names = [text_of(one) for one in left.named_children] if left else []
    if name not in names or values is None:
        return
    if node.type == "range_clause":
        if names.index(name) == 1:
            yield values, True
        return
    given = values.named_children if values.type == "expression_list" else [values]
    if len(given) == len(names):
        yield given[names.index(name)], False


def _parameters(function: Node) -> list[str]:
    parameters = function.child_by_field_name("parameters")
    declared = parameters.named_children if parameters else []
    return [text_of(name) for one in declared for name in one.children_by_field_name("name")]


def _elements(value: Node) -> list[Node]:
    """The elements of a composite literal, without their keys."""
    body = value.child_by_field_name("body") if value.type == "composite_literal" else value
    if body is None or body.type != "literal_value":
        return []
    found = [one for one in body.named_children if one.type in ("literal_element", "keyed_element")]
    return [one.named_children[-1] if one.type == "keyed_element" else one for one in found]


def _column(file: _GoFile, row: Node, name: str) -> Iterator[Node]:
    """The element of a row that is the field `name` of its struct."""
    body = row.child_by_field_name("body") if row.type == "composite_literal" else row
    if body is None or body.type != "literal_value":
        return
    keyed = [one for one in body.named_children if one.type == "keyed_element"]
    for one in keyed:
        if text_of(one.named_children[0]) == name:
            yield one.named_children[-1]
    if not keyed and name in (fields := _fields(file, row)):
        elements = _elements(row)
        if len(elements) == len(fields):
            yield elements[fields.index(name)]


def _fields(file: _GoFile, row: Node) -> list[str]:
    """The names of the fields of a row, from its own type or from that of the table around it."""
    around: Node | None = row
    while around is not None and around.type != "composite_literal":
        around = around.parent
    kind = around.child_by_field_name("type") if around else None
    declared = next(nodes(kind, "struct_type"), None) if kind else None
    if declared is None and kind is not None:
        declared = file.structs.get(re.findall(r"\w+", text_of(kind))[-1])
    fields = nodes(declared, "field_declaration") if declared else ()
    return [text_of(name) for one in fields for name in one.children_by_field_name("name")]


def _literals(value: Node) -> Iterator[Node]:
    """The literals that a value consists of, without the keys of its elements and the arguments of calls."""
    if value.type in (*_NUMBERS, *_TEXTS, "true", "false"):
        yield value
    elif value.type in ("composite_literal", "literal_value"):
        for element in _elements(value):
            yield from _literals(element)
    elif value.type in (
        "literal_element",
        "parenthesized_expression",
        "unary_expression",
        "binary_expression",
    ):
        for child in value.named_children:
            yield from _literals(child)
    elif value.type == "call_expression" and _CONVERSIONS.fullmatch(
        text_of(value.child_by_field_name("function"))
    ):
        for argument in _arguments(value):
            yield from _literals(argument)


def _other(leaf: Node, literals: Collection[str], chance: random.Random) -> str | None:
    """Another literal of the same type, that does not occur in the test if there is one."""
    text, becomes = text_of(leaf), None
    if leaf.type in ("true", "false"):
        return "false" if leaf.type == "true" else "true"
    for _ in range(_TRIES):
        if leaf.type in _NUMBERS:
            becomes = other_number(text, chance)
        elif len(text) > 2:
            inner = other_text(text[1:-1], chance)
            becomes = None if inner is None else f"{text[0]}{inner}{text[-1]}"
        elif leaf.type != "rune_literal":
            becomes = f"{text[0]}{chance.choice('abcdeinorst')}{text[-1]}"
        if becomes not in literals:
            break
    return becomes


def _of_output(file: _GoFile, test: str, chance: random.Random) -> Iterator[ExpectedPlace]:
    """The expected output of an example, which is its last comment."""
    comments = list(nodes(file.functions[test], "comment"))
    first = next((n for n, one in enumerate(comments) if _OUTPUT.match(text_of(one))), len(comments))
    for comment in comments[first:]:
        marked = _OUTPUT.match(text_of(comment))
        span = comment.start_byte + (marked.end() if marked else len("//")), comment.end_byte
        text = file.source[slice(*span)].decode("utf-8", "replace")
        yield ExpectedPlace(span, "value", span, partial(other_text, text, chance))
