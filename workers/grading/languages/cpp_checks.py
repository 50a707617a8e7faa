"""What the checks of tests in C and C++ expect.

A check is the call of a macro or function whose name says so, such as `EXPECT_EQ`, `REQUIRE` or `assert_int_equal`, or a condition under
which a program fails.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tree_sitter import Node

from workers.grading.controls.spans import Span
from workers.grading.languages.language import text_of

CHECK = re.compile(
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
PASSES_ON = re.compile(
    r"(?:\w+::)*(?:u?int\w*|u?long|short|unsigned|signed|double|float|char|bool|size_t|\w+_t|\w*string(?:_view)?|vector|array|list|set|map|pair"
    r"|tuple|optional|initializer_list|make_(?:pair|tuple|optional|unique|shared)|static_cast|span|complex|move"
    r"|Approx|Eq|StrEq|StrCaseEq|\w*DoubleEq|\w*FloatEq|\w*Near|Within\w+|ElementsAre\w*|UnorderedElementsAre\w*|Pair|Pointee|HasSubstr|StartsWith"
    r"|EndsWith|SizeIs|Each|Contains\w*|Equals\w*|Optional|Field|Property|AllOf|Key|Message\w*|Regex\w*|Matches\w*)"
)
NAMES = ("identifier", "field_identifier", "qualified_identifier")
_OTHER_ERRORS = ("std::bad_alloc", "std::bad_cast")


@dataclass(frozen=True, slots=True)
class CppCheck:
    """The place where something is expected: the expressions that may hold the value, and what else can be changed."""

    root: Node
    owner: str  # the function that it is in
    expected: tuple[Node, ...] = ()
    is_close: bool = False  # the value may differ a little
    opposite: tuple[Span, str] | None = None
    nothing: tuple[Span, str] | None = None


def of_truth(call: Node, owner: str, condition: Node, passes: bool) -> Iterator[CppCheck]:
    expected = tuple(must_equal(condition, passes))
    is_close = _WITH_TOLERANCE.search(text_of(condition)) is not None
    yield CppCheck(call, owner, expected, is_close, opposite=(span_of(condition), f"!({text_of(condition)})"))


def of_check(call: Node, owner: str, rest: str, arguments: Sequence[Node]) -> Iterator[CppCheck]:
    """The expectation of a check with a name that ends with `rest`."""
    shape = next((shape for shape, pattern in _SHAPES if pattern.search(rest)), "")
    first, texts = arguments[0], [text_of(one) for one in arguments]
    if len(arguments) == 1 and shape in ("throw", "no throw"):
        # GoogleTest takes statements, the others expressions.
        throws = f"{texts[0]}; throw 1" if "_throw" in rest else f"((void)({texts[0]}), throw 1)"
        becomes = throws if shape == "no throw" else f"[&] {{ try {{ {texts[0]}; }} catch (...) {{}} }}()"
        yield CppCheck(call, owner, opposite=(span_of(first), becomes))
    elif shape == "null":
        yield CppCheck(call, owner, opposite=(span_of(first), f"({texts[0]}) ? NULL : (void *)1"))
    elif len(arguments) == 1 or shape in ("", "false"):
        yield from of_truth(call, owner, first, passes=shape != "false")
    elif shape == "text of throw":
        yield CppCheck(call, owner, tuple(arguments[1:]))
    elif shape == "throw":
        other = next(one for one in _OTHER_ERRORS if last_part(one) not in texts[1])
        yield CppCheck(call, owner, opposite=(span_of(arguments[1]), other))
    elif shape == "matcher":
        is_catch = not text_of(call).startswith(("EXPECT", "ASSERT"))
        becomes = f"!({texts[1]})" if is_catch else f"::testing::Not({texts[1]})"
        is_close = _WITH_TOLERANCE.search(texts[1]) is not None
        yield CppCheck(call, owner, (arguments[1],), is_close, opposite=(span_of(arguments[1]), becomes))
    elif shape in ("close", "within"):
        tolerance = (span_of(arguments[2]), "-1.0") if rest == "near" and len(arguments) > 2 else None
        yield CppCheck(
            call,
            owner,
            tuple(arguments[1:3] if shape == "within" else arguments[:2]),
            True,
            opposite=tolerance,
        )
    elif shape == "text":
        nothing = (span_of(arguments[1]), r'"\001"') if not texts[1].startswith(("L", "u", "U")) else None
        yield CppCheck(call, owner, tuple(arguments[:2]), nothing=nothing)
    else:
        operation = rest if rest in _SWAPPED else {"equal": "eq", "unequal": "ne"}.get(shape, "")
        swapped = _SWAPPED[operation].format(*texts[:2]) if operation else ""
        expected = () if shape in ("unequal", "order") else tuple(arguments[:2])
        yield CppCheck(
            call, owner, expected, opposite=(span_of(first, arguments[1]), swapped) if swapped else None
        )


def must_equal(condition: Node, passes: bool) -> Iterator[Node]:
    """The operands of a condition that must be equal for the test to pass. `passes`: it passes if this is true."""
    match condition.type:
        case "parenthesized_expression" if condition.named_children:
            yield from must_equal(condition.named_children[0], passes)
        case "unary_expression" if text_of(condition.child_by_field_name("operator")) in ("!", "not"):
            yield from must_equal(condition.named_children[-1], not passes)
        case "binary_expression":
            operator = text_of(condition.child_by_field_name("operator"))
            operands = [one for one in condition.named_children if one.type != "comment"]
            compared = [
                one for one in operands if _COMPARES.fullmatch(text_of(one.child_by_field_name("function")))
            ]
            if operator in ("&&", "||", "and", "or"):
                for operand in operands:
                    yield from must_equal(operand, passes)
            elif (operator == "==") == passes and operator in ("==", "!="):
                yield from (operands if not compared else arguments_of(compared[0])[:2])
        case "call_expression":
            name = text_of(condition.child_by_field_name("function"))
            if (not passes and _COMPARES.fullmatch(name)) or (passes and _EQUAL.fullmatch(name)):
                yield from arguments_of(condition)[:2]
        case _:
            pass


def calls_in(parts: Iterable[Node]) -> list[Node]:
    """The outermost calls and functions within these, through conversions and comparisons."""
    found: list[Node] = []
    for part in parts:
        name = text_of(part.child_by_field_name("function")).partition("<")[0]
        passes_on = PASSES_ON.fullmatch(name) or _COMPARES.fullmatch(name)
        if part.type == "lambda_expression" or (part.type == "call_expression" and not passes_on):
            found.append(part)
        else:
            found += calls_in(part.named_children)
    return found


def makes_fail(branch: Node | None, owner: str) -> bool:
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
                called_name(inner) + text_of(inner.child_by_field_name("arguments")),
            )
            if ends or _FAILS.fullmatch(called_name(inner)):
                return True
        if inner.type in ("update_expression", "assignment_expression") and _COUNTS_FAILURES.search(
            text_of(inner)
        ):
            return not text_of(inner).endswith(("= 0", "= true"))
        if inner.type == "binary_expression" and re.match(
            r"(?:GTEST_FAIL|FAIL|ADD_FAILURE)\(", text_of(inner)
        ):
            return True
        if inner.type in ("compound_statement", "else_clause") and makes_fail(inner, owner):
            return True
    return False


def says_check(text: str) -> bool:
    """Whether a text names a macro or function that checks or fails."""
    return any(CHECK.search(word) or _FAILS.fullmatch(word) for word in re.findall(r"\w+", text))


def last_part(name: str) -> str:
    return re.split(r"::|@", name)[-1] if "::" in name else name.partition("@")[0]


def called_name(call: Node) -> str:
    """The last part of the name of the function that is called, without arguments of templates."""
    name = text_of(call.child_by_field_name("function")).partition("<")[0]
    return re.split(r"::|\.|->", name)[-1]


def span_of(node: Node, last: Node | None = None) -> Span:
    return node.start_byte, (last or node).end_byte


def arguments_of(call: Node) -> list[Node]:
    arguments = call.child_by_field_name("arguments")
    return [] if arguments is None else [one for one in arguments.named_children if one.type != "comment"]


def condition_of(statement: Node) -> Node | None:
    """The condition of an `if` that declares nothing."""
    clause = statement.child_by_field_name("condition")
    value = clause.child_by_field_name("value") if clause is not None else None
    return None if value is None or value.type == "declaration" else value


def declared_names(node: Node) -> list[str]:
    """The name that a declaration gives a value, or the names between which a structured binding divides it; [""] if there is none."""
    inner: Node | None = node
    while inner is not None and inner.type not in NAMES:
        if inner.type == "structured_binding_declarator":
            return [text_of(one) for one in inner.named_children]
        declarator = inner.child_by_field_name("declarator") or inner.child_by_field_name("left")
        is_wrapped = inner.type in ("reference_declarator", "parenthesized_declarator")
        inner = declarator or (inner.named_children[0] if is_wrapped and inner.named_children else None)
    return [last_part(text_of(inner))]
