"""The expectations of a test file: its assertions, its calls of checkers, exceptions that must come.

The checkers are `assertX` of unittest and its relatives, `raises`, `warns`, numpy's, Django's and mocks'. The call of the checker stays,
and its expected argument is contradicted. Names are compared without case and underscores, so that `assert_equal` is `assertEqual`.
"""

import ast
from collections.abc import Callable, Iterator
from typing import TypeAlias

from workers.grading.controls.conditions import (
    close,
    contained,
    contradict,
    equal,
    instance,
    negation,
    ordered,
)
from workers.grading.controls.reaching import blocks
from workers.grading.controls.scopes import name_of_call, plain
from workers.grading.controls.spans import Edit, Expectation, Mode, Site, TestFile
from workers.grading.controls.values import Values, number_of

_Found: TypeAlias = Iterator[Expectation]
_Form: TypeAlias = Callable[[ast.Call, TestFile, Values], _Found]


def expected_by_call(call: ast.Call, file: TestFile, values: Values) -> _Found:
    """The expectations of the checker that `call` calls; nothing if it calls no checker."""
    name = plain(name_of_call(call))
    form = _FORMS.get(name)
    if form is None and not values.defines(name_of_call(call)):
        if _is_unknown_checker(name):
            form = _unknown
        elif values.is_checked_elsewhere(call):
            form = _written
    if form is not None:
        yield from form(call, file, values)


def _is_unknown_checker(name: str) -> bool:
    """Whether a function that is in no list may check a value.

    Names with a negation are excluded, because another value passes them too.
    """
    return name.startswith("assert") and not any(word in name for word in ("not", "no", "any"))


def expects_exception(call: ast.expr) -> bool:
    """Whether a context manager expects its body to raise."""
    return plain(name_of_call(call)).startswith(("raises", "assertraises", "failunlessraises"))


def _arguments(call: ast.Call, *names: str) -> list[ast.expr]:
    """Returns the arguments with these names, by position or keyword; [] if one is missing or may be in a starred argument."""
    found: list[ast.expr] = []
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    for place, name in enumerate(names):
        if place < len(call.args) and not any(
            isinstance(before, ast.Starred) for before in call.args[: place + 1]
        ):
            found.append(call.args[place])
        elif name in keywords:
            found.append(keywords[name])
        else:
            return []
    return found


def _keyword(call: ast.Call, name: str) -> list[ast.expr]:
    return [keyword.value for keyword in call.keywords if keyword.arg == name]


def _two(call: ast.Call) -> tuple[ast.expr, ast.expr] | None:
    """Returns the two operands that a checker compares; None if they are not in the call."""
    for names in (("first", "second"), ("actual", "desired"), ("x", "y"), ("expr1", "expr2")):
        match _arguments(call, *names):
            case [left, right]:
                return left, right
            case _:
                pass
    return None


def _at(operand: ast.expr, mode: Mode, *last: Edit, actual: ast.expr | None = None) -> _Found:
    if not isinstance(operand, ast.Starred):
        yield Expectation(operand, (Site(operand, mode, actual),), last=last)


def _equal(call: ast.Call, file: TestFile, values: Values) -> _Found:
    two = _two(call)
    if two is not None:
        yield equal(*two, file, values)


def _something_else(expected: ast.expr, file: TestFile, values: Values) -> _Found:
    """Yields the expectation of a checker with its own comparison: the expected value becomes a value that occurs nowhere by chance."""
    if not isinstance(expected, ast.Starred):
        yield from _at(expected, "equal", file.replace(expected, values.unlike(expected)))


def _almost(call: ast.Call, file: TestFile, values: Values) -> _Found:
    two = _two(call)
    if two is not None:
        given = [
            one for one in call.args[2:] if not (isinstance(one, ast.Constant) and isinstance(one.value, str))
        ]
        is_digits = not plain(name_of_call(call)).startswith(("assertallclose", "assertarraymaxulp"))
        # These arguments are numbers of digits
        digits = [one for one in given if is_digits and (number_of(one) or 0) >= 1]
        given = [one for one in given if one not in digits]
        shown = two[0] if number_of(two[0]) is not None else two[1]
        yield close(call, [shown], given, file, values, digits)


def _true(call: ast.Call, file: TestFile, values: Values) -> _Found:
    for condition in call.args[:1]:
        yield from contradict(condition, True, file, values)


def _false(call: ast.Call, file: TestFile, values: Values) -> _Found:
    for condition in call.args[:1]:
        yield from contradict(condition, False, file, values)


def _is(call: ast.Call, file: TestFile, values: Values) -> _Found:
    for expected in call.args[1:2]:
        yield from _at(expected, "identical", file.replace(expected, values.equal_to_nothing()))


def _is_none(call: ast.Call, file: TestFile, values: Values) -> _Found:
    for actual in call.args[:1]:
        yield Expectation(
            actual, opposites=(file.wrap(actual, values.pick(["[", "(0, "]), "]"), negation(actual, file))
        )


def _is_not_none(call: ast.Call, file: TestFile, values: Values) -> _Found:
    for actual in call.args[:1]:
        yield Expectation(
            actual, opposites=(file.wrap(actual, "(", values.pick([", None)[1]", ", None)[-1]"])),)
        )


def _same_twice(call: ast.Call, file: TestFile, values: Values) -> _Found:
    """Two values that must differ become the same value, which is still computed once."""
    del values
    match call.args[:2]:
        case [left, right] if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
            start = file.start(left)
            text = file.source[start : file.end(right)].decode()
            missing = "".join(character for character in text[len(file.text(left)) :] if character in "\r\n")
            edit = Edit(start, file.end(right), f"*([{file.text(left)}] * 2{missing})")
            yield Expectation(call, opposites=(edit,))
        case _:
            return


def _greater_or_less(call: ast.Call, file: TestFile, values: Values) -> _Found:
    """One value must be larger: the checker becomes the one for the opposite direction."""
    name = name_of_call(call)
    others = {"Greater": "LessEqual", "GreaterEqual": "Less", "Less": "GreaterEqual", "LessEqual": "Greater"}
    other = others.get(name.removeprefix("assert"))
    match call.args[:2]:
        case [left, right] if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
            sites = ordered(left, ">" if "greater" in plain(name) else "<", right, values)
            end = file.end(call.func)
            opposites = () if other is None else (Edit(end - len(name), end, f"assert{other}"),)
            yield Expectation(
                call, sites, opposites, () if opposites else (file.replace(right, "float('nan')"),)
            )
        case _:
            return


def _in(call: ast.Call, file: TestFile, values: Values) -> _Found:
    match call.args[:2]:
        case [item, container]:
            yield contained(item, container, file, values)
        case _:
            return


def _not_in(call: ast.Call, file: TestFile, values: Values) -> _Found:
    """The container becomes one that contains everything: every value is equal to `ANY`."""
    del values
    for container in call.args[1:2]:
        edit = file.replace(container, "[__import__('unittest.mock').mock.ANY]")
        yield Expectation(container, opposites=(edit,))


def _is_instance(call: ast.Call, file: TestFile, values: Values) -> _Found:
    del file, values
    match call.args[:2]:
        case [actual, kind]:
            yield instance(call, actual, kind)
        case _:
            return


def _is_not_instance(call: ast.Call, file: TestFile, values: Values) -> _Found:
    del values
    for kind in call.args[1:2]:
        yield Expectation(kind, opposites=(file.replace(kind, "object"),))


def _raises(call: ast.Call, file: TestFile, values: Values) -> _Found:
    text = next(iter(_patterns(call)), None)
    for kind in call.args[:1] or _keyword(call, "expected_exception") or _keyword(call, "exception"):
        if not isinstance(kind, ast.Starred):
            yield Expectation(kind, (Site(kind, "error", text=text),))
    yield from _message(call, file, values)


def _warns(call: ast.Call, file: TestFile, values: Values) -> _Found:
    for kind in call.args[:1] or _keyword(call, "expected_warning"):
        yield from _at(kind, "warning")
    yield from _message(call, file, values)


def _message(call: ast.Call, file: TestFile, values: Values) -> _Found:
    """The text or pattern of the expected message becomes one that no message has."""
    for pattern in _patterns(call):
        yield from _at(pattern, "pattern", file.replace(pattern, values.quoted(pattern)))


def _patterns(call: ast.Call) -> list[ast.expr]:
    """The text or pattern that the message of an exception or a warning must have."""
    patterns = _keyword(call, "match") or _keyword(call, "expected_regex")
    if plain(name_of_call(call)).endswith(("regex", "regexp", "message")):
        patterns = patterns or call.args[1:2]
    return [one for one in patterns if not (isinstance(one, ast.Constant) and one.value is None)]


def _regex(call: ast.Call, file: TestFile, values: Values) -> _Found:
    for pattern in call.args[1:2]:
        yield from _at(pattern, "pattern", file.replace(pattern, values.quoted(pattern)))


def _not_regex(call: ast.Call, file: TestFile, values: Values) -> _Found:
    del values
    for pattern in call.args[1:2]:
        is_bytes = isinstance(pattern, ast.Constant) and isinstance(pattern.value, bytes)
        yield Expectation(pattern, opposites=(file.replace(pattern, "b'^'" if is_bytes else "'^'"),))


def _logs(call: ast.Call, file: TestFile, values: Values) -> _Found:
    for logger in call.args[:1] or _keyword(call, "logger"):
        yield from _at(logger, "item", file.replace(logger, f"'{values.word()}'"))


def _lines(call: ast.Call, file: TestFile, values: Values) -> _Found:
    """One of the lines that an output must have becomes another."""
    for lines in call.args[:1]:
        parts = lines.elts if isinstance(lines, ast.List | ast.Tuple) else []
        texts = [one for one in parts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        for text in texts[:3]:
            yield from _at(text, "pattern", file.replace(text, values.quoted(text)))
        if not texts:
            yield Expectation(lines, last=(file.replace(lines, f"['{values.word()}']"),))


def _called_with(call: ast.Call, file: TestFile, values: Values) -> _Found:
    """A mock was not called with something else."""
    expected = call.args or [keyword.value for keyword in call.keywords if keyword.arg is not None]
    for argument in expected[:2]:
        if not isinstance(argument, ast.Starred):
            yield from _at(argument, "equal", file.replace(argument, values.equal_to_nothing()))
    if not call.args and not call.keywords:
        yield from _renamed(call, file, f"{name_of_call(call)}({values.small()})")


def _calls(call: ast.Call, file: TestFile, values: Values) -> _Found:
    """One of the calls that a mock must have had becomes another."""
    for calls in call.args[:1]:
        yield from _at(calls, "equal", file.replace(calls, f"[{values.equal_to_nothing()}]"))


def _called(call: ast.Call, file: TestFile, values: Values) -> _Found:
    """`assert_called` becomes `assert_not_called` and the other way around."""
    del values
    name = name_of_call(call)
    if "_not_" in name:
        yield from _renamed(call, file, f"{name.replace('_not_', '_')}()")
    else:
        yield from _renamed(call, file, f"{name.replace('_once', '').replace('assert_', 'assert_not_')}()")


def _renamed(call: ast.Call, file: TestFile, becomes: str) -> _Found:
    """The call's last name and its empty parentheses become another call."""
    if isinstance(call.func, ast.Attribute) and not call.args and not call.keywords:
        start = file.end(call.func) - len(call.func.attr.encode())
        if not any(character in "\r\n" for character in file.source[start : file.end(call)].decode()):
            yield Expectation(call, opposites=(Edit(start, file.end(call), becomes),))


def _first(call: ast.Call, file: TestFile, values: Values) -> _Found:
    for expected in call.args[:1] or [keyword.value for keyword in call.keywords[:1]]:
        yield from _something_else(expected, file, values)


def _unknown(call: ast.Call, file: TestFile, values: Values) -> _Found:
    """A checker that is not in any list: its second argument counts as the expected one, or its only one."""
    if len(call.args) > 1:
        yield from _something_else(call.args[1], file, values)
    elif call.keywords and call.keywords[0].arg not in (None, "msg"):
        yield from _something_else(call.keywords[0].value, file, values)


def _written(call: ast.Call, file: TestFile, values: Values) -> _Found:
    """A checker in another file: it is unknown which of its arguments is expected, so each literal argument may be changed.

    A run with the known fix shows whether the test then fails.
    """
    del file, values
    for argument in (*call.args, *(keyword.value for keyword in call.keywords if keyword.arg is not None)):
        if not isinstance(argument, ast.Starred | ast.Call):
            yield Expectation(argument, (Site(argument, "equal"),))


_FAMILIES: dict[_Form, str] = {
    _equal: """assertequal assertequals failunlessequal assertlistequal asserttupleequal assertsetequal assertdictequal
        assertmultilineequal assertsequenceequal assertcountequal assertitemsequal eq assertarrayequal assertstringequal
        assertdictcontainssubset""",
    _almost: """assertalmostequal assertalmostequals failunlessalmostequal assertallclose assertapproxequal
        assertarrayalmostequal assertarrayalmostequalnulp assertarraymaxulp""",
    _true: "asserttrue assert failunless ok",
    _false: "assertfalse failif",
    _is: "assertis",
    _is_none: "assertisnone",
    _is_not_none: "assertisnotnone",
    _same_twice: """assertisnot assertnotequal assertnotequals failifequal assertnotalmostequal assertnotalmostequals
        failifalmostequal""",
    _greater_or_less: "assertgreater assertgreaterequal assertless assertlessequal assertarrayless",
    _in: "assertin",
    _not_in: "assertnotin",
    _is_instance: "assertisinstance",
    _is_not_instance: "assertnotisinstance",
    _raises: """raises assertraises failunlessraises assertraisesregex assertraisesregexp assertraisesmessage raisesgroup""",
    _warns: "warns assertwarns assertwarnsregex assertwarnsmessage",
    _regex: "assertregex assertregexpmatches assertmatches",
    _not_regex: "assertnotregex assertnotregexpmatches",
    _logs: "assertlogs",
    _lines: "fnmatchlines fnmatchlinesrandom rematchlines rematchlinesrandom",
    _called_with: """assertcalledwith assertcalledoncewith assertanycall assertawaitedwith assertawaitedoncewith
        assertanyawait""",
    _calls: "asserthascalls asserthasawaits",
    _called: "assertcalled assertcalledonce assertnotcalled assertawaited assertawaitedonce assertnotawaited",
    _first: "assertnumqueries assertinhtml asserttemplateused assertoutcomes assertaddsmessages",
}
_FORMS = {name: form for form, names in _FAMILIES.items() for name in names.split()}


_CATCHES_ALL = {"AssertionError", "Exception", "BaseException"}


def expectations(body: list[ast.stmt], file: TestFile, values: Values) -> Iterator[Expectation]:
    """The expectations in the statements, each with its checked expression."""
    for statement in body:
        match statement:
            case ast.Assert(test=test):
                yield from contradict(test, True, file, values)
                yield from _in_calls(test, file, values)
                continue
            case ast.If(test=test) if _only_fails(statement.body):
                yield from contradict(test, False, file, values)
            case ast.If(test=test) if _only_fails(statement.orelse):
                yield from contradict(test, True, file, values)
            case ast.If(test=test) if _only_gathers(statement.body):
                yield from _of_difference(test, file, values)
            case ast.AugAssign(op=ast.Add(), value=test):
                yield from _of_difference(test, file, values)
            case ast.Try():
                yield from _handled(statement)
            case _:
                pass
        for expression in _own_expressions(statement):
            yield from _in_calls(expression, file, values)
        unheard = _unheard(statement)
        for block in blocks(statement):
            if block is not unheard:
                yield from expectations(block, file, values)


def _in_calls(expression: ast.expr, file: TestFile, values: Values) -> Iterator[Expectation]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Call):
            yield from expected_by_call(node, file, values)


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement outside of its blocks."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.withitem):
            yield child.context_expr


def _handled(statement: ast.Try) -> Iterator[Expectation]:
    """An exception that must be raised, or the test calls `fail`: its handler is changed to catch another one."""
    if _only_fails(statement.body[-1:]) or _only_fails(statement.orelse):
        for handler in statement.handlers:
            if handler.type is not None:
                yield Expectation(handler.type, (Site(handler.type, "error"),))


def _only_fails(body: list[ast.stmt]) -> bool:
    """Whether the statements end with a failure of the test."""
    if not body:
        return False
    match body[-1]:
        case ast.Expr(value=ast.Call() as call):
            return name_of_call(call) == "fail"
        case ast.Assert(test=ast.Constant(value=value)):
            return not value
        case ast.Raise(exc=error) if error is not None:
            return (name_of_call(error) or getattr(error, "id", "")) == "AssertionError"
        case _:
            return False


def _only_gathers(body: list[ast.stmt]) -> bool:
    """Whether the statements put something into a collection or count it, of which the test expects something."""
    match body:
        case [ast.Expr(value=ast.Call(func=ast.Attribute(attr="add" | "append")))]:
            return True
        case [ast.AugAssign(op=ast.Add())]:
            return True
        case _:
            return False


def _of_difference(test: ast.expr, file: TestFile, values: Values) -> _Found:
    """What a test expects that counts or gathers differences: values that are equal."""
    match test:
        case ast.Compare(left=left, ops=[ast.NotEq()], comparators=[right]):
            expectation = equal(left, right, file, values)
            yield Expectation(test, expectation.sites)
        case _:
            return


def _unheard(statement: ast.stmt) -> list[ast.stmt] | None:
    """The block of a statement in which a failure would not fail the test, or which is not meant to run to its end."""
    match statement:
        case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
            managers = [item.context_expr for item in items]
            if any(expects_exception(one) or name_of_call(one) == "suppress" for one in managers):
                return body
        case ast.Try(handlers=handlers, body=body):
            if any(_catches_all(handler) and not _only_fails(handler.body) for handler in handlers):
                return body
        case _:
            pass
    return None


def _catches_all(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {getattr(node, "id", "") for node in ast.walk(handler.type)}
    return bool(names & _CATCHES_ALL)
