"""What the tests of a file in Java assert: the expressions that may hold an expected value, and what can be put in place of another one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tree_sitter import Node

from pipeline.task import ContradictionKind
from workers.grading.controls.spans import Span
from workers.grading.languages.java_source import (
    COMPARES,
    FLUENT_ROOTS,
    MATCHERS,
    NO_MATCHERS,
    NUMBERS,
    JavaFile,
    JavaMethod,
    arguments_of,
    is_assertion,
    makes_fail,
    name_of,
    root_of,
    some,
)
from workers.grading.languages.language import nodes, text_of

_EQUAL = re.compile(r"assert(?:Array|Iterable|Json)?Equals\w*|assertSame|assertLinesMatch")
_DIFFERENT = re.compile(r"assertNot(?:Equals|Same)")
_TRUTHS = ("assertTrue", "assertFalse")
_NULLS = ("assertNull", "assertNotNull")
_OF_CLASS = re.compile(
    r"assertThrows\w*|assertInstanceOf|expectThrows|expect|assertThatExceptionOfType|is(?:Exactly)?InstanceOf|has(?:Root)?CauseInstanceOf"
)
_FLUENT = re.compile(
    r"is(?:EqualTo\w*|SameAs|In|CloseTo|Between)|has[A-Z]\w*|contains\w*|starts?With\w*|ends?With\w*|matches|expectMessage|times"
)
_CHECKING = (
    "method_invocation",
    "assert_statement",
    "try_statement",
    "try_with_resources_statement",
    "if_statement",
)
_NO_ERROR = "StackOverflowError.class"  # an error that no code is expected to raise


@dataclass(frozen=True, slots=True)
class JavaCheck:
    """The place where something is expected: the expressions that may hold the value, and what else can be put in a place."""

    root: Node
    owner: JavaMethod
    expected: tuple[Node, ...] = ()
    others: tuple[tuple[Span, ContradictionKind, str], ...] = ()
    is_near: bool = False  # a number that is only a little different may be accepted


def checks(file: JavaFile, method: JavaMethod) -> Iterator[JavaCheck]:
    for node in method.of(*_CHECKING):
        if node.has_error:
            continue
        match node.type:
            case "method_invocation":
                yield from _of_call(file, method, node)
            case "assert_statement":
                condition = node.named_children[0]
                yield JavaCheck(node, method, tuple(_must_equal(condition, True)), (_negated(condition),))
            case "if_statement" if makes_fail(node.child_by_field_name("consequence")):
                for condition in some(node.child_by_field_name("condition")):
                    inner = condition.named_children[0]
                    yield JavaCheck(node, method, tuple(_must_equal(inner, False)), (_negated(inner),))
            case "try_statement" | "try_with_resources_statement" if makes_fail(
                node.child_by_field_name("body")
            ):
                for body in (
                    one.child_by_field_name("body") for one in node.children if one.type == "catch_clause"
                ):
                    if body is not None:
                        span = body.start_byte, body.start_byte + 1
                        yield JavaCheck(
                            node, method, (), ((span, "opposite", "{ if (true) throw new AssertionError();"),)
                        )
            case _:
                pass
    for annotation in method.annotations.values():
        for pair in nodes(annotation, "element_value_pair"):
            if text_of(pair.child_by_field_name("key")) in ("expected", "expectedExceptions"):
                for one in nodes(pair, "class_literal"):
                    span = one.start_byte, one.end_byte
                    yield JavaCheck(annotation, method, (), ((span, "opposite", _NO_ERROR),))


def _negated(condition: Node) -> tuple[Span, ContradictionKind, str]:
    return (condition.start_byte, condition.end_byte), "opposite", f"!({text_of(condition)})"


def _of_call(file: JavaFile, method: JavaMethod, call: Node) -> Iterator[JavaCheck]:
    """The expectation in a call of a method that asserts."""
    name, arguments = name_of(call), arguments_of(call)
    if not arguments and name not in ("isTrue", "isFalse", "isNull", "isNotNull"):
        return
    if _OF_CLASS.fullmatch(name):
        yield from _of_class(method, call, name, arguments)
    elif name in ("expectMessage", "times"):
        yield JavaCheck(call, method, tuple(arguments))
    elif not is_assertion(call) or file.called(call):
        return
    elif name == "assertThat" and len(arguments) > 1:
        yield from _of_matcher(method, call, arguments[-1])
    elif FLUENT_ROOTS.fullmatch(text_of(root_of(call).child_by_field_name("name"))):
        yield from _of_chain(method, call, name, arguments)
    else:
        yield from _of_junit(file, method, call, arguments)


def _of_class(method: JavaMethod, call: Node, name: str, arguments: list[Node]) -> Iterator[JavaCheck]:
    """The class that an error or a value must have."""
    for one in arguments:
        if one.type == "class_literal":
            span, said = (one.start_byte, one.end_byte), text_of(one).removesuffix(".class")
            is_used = (
                name.startswith("assert")
                and call.parent is not None
                and call.parent.type != "expression_statement"
            )
            becomes = f"(Class<{said}>) (Class<?>) {_NO_ERROR}" if is_used else _NO_ERROR
            yield JavaCheck(call, method, (), ((span, "opposite", becomes),))


def _of_matcher(method: JavaMethod, call: Node, matcher: Node) -> Iterator[JavaCheck]:
    name, span = name_of(matcher), (matcher.start_byte, matcher.end_byte)
    if matcher.type != "method_invocation" or not (MATCHERS.fullmatch(name) or NO_MATCHERS.fullmatch(name)):
        yield JavaCheck(call, method, tuple(_must_equal(matcher, True)))
        return
    opposite = f"org.hamcrest.CoreMatchers.not({text_of(matcher)})"
    yield JavaCheck(
        call,
        method,
        tuple(_matched(matcher)),
        ((span, "opposite", opposite),),
        is_near="closeTo" in text_of(matcher),
    )


def _matched(matcher: Node) -> Iterator[Node]:
    """The values in a matcher of Hamcrest that the actual value must match."""
    name = name_of(matcher)
    if matcher.type != "method_invocation" or not (MATCHERS.fullmatch(name) or NO_MATCHERS.fullmatch(name)):
        yield matcher
    elif MATCHERS.fullmatch(name):
        for one in arguments_of(matcher)[: 1 if name == "closeTo" else None]:
            yield from _matched(one)


def _of_chain(method: JavaMethod, call: Node, name: str, arguments: list[Node]) -> Iterator[JavaCheck]:
    """The expectation in a call of a chain of AssertJ or Truth."""
    before = call.child_by_field_name("object")
    actual = (
        arguments_of(before)[0]
        if before is not None and before.type == "method_invocation" and arguments_of(before)
        else None
    )
    is_direct = before is not None and name_of(before) == "assertThat" and actual is not None
    is_last = call.parent is not None and call.parent.type == "expression_statement"
    if name in ("isTrue", "isFalse") and is_direct and actual is not None:
        expected = tuple(_must_equal(actual, name == "isTrue"))
        yield JavaCheck(call, method, expected, (_negated(actual),))
    elif name in ("isNull", "isNotNull") and is_direct and is_last and actual is not None:
        yield JavaCheck(call, method, (), (_other_than_null(actual),))
    elif _FLUENT.fullmatch(name):
        one = arguments[0]
        wrapped = (
            (one.start_byte, one.end_byte),
            "nothing",
            f"(Object) java.util.Collections.singletonList({text_of(one)})",
        )
        yield JavaCheck(
            call, method, tuple(arguments), (wrapped,) if name == "isEqualTo" else (), is_near="Close" in name
        )


def _other_than_null(value: Node) -> tuple[Span, ContradictionKind, str]:
    return (
        (value.start_byte, value.end_byte),
        "opposite",
        f"(({text_of(value)}) == null ? new Object() : null)",
    )


def _of_junit(file: JavaFile, method: JavaMethod, call: Node, arguments: list[Node]) -> Iterator[JavaCheck]:
    """The expectation in a call of an assertion of JUnit or TestNG."""
    name, is_first = name_of(call), file.says_message_first(call)
    if name in (*_TRUTHS, *_NULLS):
        one = arguments[-1 if is_first else 0]
        if one.type == "lambda_expression":
            return
        expected = tuple(_must_equal(one, name == "assertTrue")) if name in _TRUTHS else ()
        yield JavaCheck(
            call, method, expected, (_negated(one) if name in _TRUTHS else _other_than_null(one),)
        )
        return
    is_message = arguments[0].type == "string_literal" or not _is_delta(arguments[-1])
    if is_first and (len(arguments) == 4 or (len(arguments) == 3 and is_message)):
        arguments = arguments[1:]
    if len(arguments) < 2:
        return
    expected, actual = arguments[:2]
    span = expected.start_byte, expected.end_byte
    is_near = len(arguments) == 3 and _is_delta(arguments[2])
    if _DIFFERENT.fullmatch(name) and actual.type in ("identifier", "field_access"):
        yield JavaCheck(call, method, (), ((span, "opposite", text_of(actual)),))
    elif _EQUAL.fullmatch(name):
        said = "Arrays.copyOf({}, 9973)" if name == "assertArrayEquals" else "Collections.singletonList({})"
        wrapped = f"java.util.{said.format(text_of(expected))}"
        is_object = not is_near and name in (
            "assertEquals",
            "assertSame",
            "assertArrayEquals",
            "assertIterableEquals",
        )
        yield JavaCheck(
            call, method, (expected, actual), ((span, "nothing", wrapped),) if is_object else (), is_near
        )


def _is_delta(argument: Node) -> bool:
    """Whether an argument is the largest difference of two numbers, and no message or value."""
    return (
        argument.type in NUMBERS
        or re.search(r"delta|eps|tolerance|precision", text_of(argument), re.IGNORECASE) is not None
    )


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
            elif operator in ("==", "!=") and (operator == "==") == passes:
                yield operand
    elif condition.type == "method_invocation" and passes and COMPARES.fullmatch(name_of(condition)):
        yield from some(condition.child_by_field_name("object"))
        yield from arguments_of(condition)
