"""Calls of checkers: `assertX` of unittest and its relatives, `raises`, `warns`, numpy's, Django's and mocks' checkers.

An edit keeps the checker and contradicts what it is told to expect. Names are compared without case and underscores, so that
`assert_equal` is `assertEqual`.
"""

import ast
from collections.abc import Callable, Iterator
from typing import TypeAlias

from workers.grading.controls.conditions import (
    absent,
    contradict,
    elements,
    moved_away,
    name_of_call,
    negation,
    unequal,
)
from workers.grading.controls.spans import Edit, TestFile
from workers.grading.controls.values import Values, number_of

_Edits: TypeAlias = Iterator[Edit]
_Form: TypeAlias = Callable[[ast.Call, TestFile, Values], _Edits]


def contradict_call(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    """Edits after which the checker that `call` calls fails if it passed before; none if it calls no checker."""
    name = _plain(name_of_call(call))
    form = _FORMS.get(name)
    if form is None and _is_unknown_checker(name) and not values.defines(name_of_call(call)):
        form = _unknown
    if form is not None:
        yield from form(call, file, values)


def _is_unknown_checker(name: str) -> bool:
    """Whether a function of no list expects what it is given. Those that expect it not to be so cannot be told what to expect."""
    return name.startswith("assert") and not any(word in name for word in ("not", "no", "any"))


def expects_exception(call: ast.expr) -> bool:
    """Whether a context manager expects its body to raise."""
    return _plain(name_of_call(call)).startswith(("raises", "assertraises", "failunlessraises"))


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _arguments(call: ast.Call, *names: str) -> list[ast.expr]:
    """The arguments of these names, by place or by keyword; empty if one is missing or hidden behind a star."""
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


def _equal(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    match _arguments(call, "first", "second") or call.args[:2]:
        case [left, right]:
            yield from unequal(left, right, file, values)
        case _:
            return


def _alike(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    """Of two that are compared in the checker's own way, the second is something else altogether."""
    for expected in call.args[1:2]:
        yield from _something_else(expected, file, values)


def _something_else(expected: ast.expr, file: TestFile, values: Values) -> _Edits:
    if not isinstance(expected, ast.Starred):
        yield file.replace(expected, values.unlike(expected))


def _almost(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    match call.args[:2]:
        case [left, right] if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
            yield from moved_away(call, [left if number_of(left) is not None else right], file, values)
        case _:
            return


def _true(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    for condition in call.args[:1]:
        yield from contradict(condition, True, file, values)


def _false(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    for condition in call.args[:1]:
        yield from contradict(condition, False, file, values)


def _is(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    for expected in call.args[1:2]:
        yield file.replace(expected, values.equal_to_nothing())


def _is_none(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    for actual in call.args[:1]:
        yield file.wrap(actual, values.pick(["[", "(0, "]), "]")
        yield negation(actual, file)


def _is_not_none(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    for actual in call.args[:1]:
        yield file.wrap(actual, "(", values.pick([", None)[1]", ", None)[-1]"]))


def _same_twice(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    """Two that must differ become the same one, which is still computed once."""
    del values
    match call.args[:2]:
        case [left, right] if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
            start = file.start(left)
            text = file.source[start : file.end(right)].decode()
            missing = "".join(character for character in text[len(file.text(left)) :] if character in "\r\n")
            yield Edit(start, file.end(right), f"*([{file.text(left)}] * 2{missing})")
        case _:
            return


def _greater_or_less(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    del values
    for expected in call.args[1:2]:
        yield file.replace(expected, "float('nan')")


def _in(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    match call.args[:2]:
        case [item, container]:
            yield from absent(item, container, file, values)
        case _:
            return


def _not_in(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    """The container becomes one that has everything: what is compared with `ANY` is equal to it."""
    del values
    for container in call.args[1:2]:
        yield file.replace(container, "[__import__('unittest.mock').mock.ANY]")


def _is_instance(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    for kind in call.args[1:2]:
        yield file.replace(kind, values.unrelated_type(kind))


def _is_not_instance(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    del values
    for kind in call.args[1:2]:
        yield file.replace(kind, "object")


def _raises(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    expected = call.args[:1] or _keyword(call, "expected_exception") or _keyword(call, "exception")
    for kind in expected:
        error = None if isinstance(kind, ast.Starred) else values.unrelated_error(kind)
        if error is not None:
            yield file.replace(kind, error)
    yield from _message(call, file, values)


def _warns(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    for kind in call.args[:1] or _keyword(call, "expected_warning"):
        warning = None if isinstance(kind, ast.Starred) else values.unrelated_warning(kind)
        if warning is not None:
            yield file.replace(kind, warning)
    yield from _message(call, file, values)


def _message(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    """The text or pattern of the expected message becomes one that no message has."""
    patterns = _keyword(call, "match") or _keyword(call, "expected_regex")
    if _plain(name_of_call(call)).endswith(("regex", "regexp", "message")):
        patterns = patterns or call.args[1:2]
    for pattern in patterns:
        if not isinstance(pattern, ast.Starred) and not (
            isinstance(pattern, ast.Constant) and pattern.value is None
        ):
            yield file.replace(pattern, values.quoted(pattern))


def _regex(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    for pattern in call.args[1:2]:
        yield file.replace(pattern, values.quoted(pattern))


def _not_regex(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    del values
    for pattern in call.args[1:2]:
        yield file.replace(
            pattern,
            "b'^'" if isinstance(pattern, ast.Constant) and isinstance(pattern.value, bytes) else "'^'",
        )


def _logs(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    for logger in call.args[:1] or _keyword(call, "logger"):
        yield file.replace(logger, f"'{values.word()}'")


def _lines(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    """Of the lines that an output must have, one is another."""
    for lines in call.args[:1]:
        texts = [
            part for part in elements(lines) if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        if texts:
            text = values.pick(texts)
            yield file.replace(text, values.quoted(text))
        else:
            yield file.replace(lines, f"['{values.word()}']")


def _called_with(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    """A mock was not called with something else."""
    expected = call.args or [keyword.value for keyword in call.keywords if keyword.arg is not None]
    for argument in expected[:2]:
        if not isinstance(argument, ast.Starred):
            literals = list(values.other_literals(argument))
            yield from literals or [file.replace(argument, values.equal_to_nothing())]
    if not call.args and not call.keywords:
        yield from _renamed(call, file, f"{name_of_call(call)}({values.equal_to_nothing()})")


def _calls(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    """Of the calls that a mock must have had, one is another."""
    for calls in call.args[:1]:
        yield file.replace(calls, f"[{values.equal_to_nothing()}]")


def _called(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    """`assert_called` becomes `assert_not_called` and the other way around."""
    del values
    name = name_of_call(call)
    if "_not_" in name:
        yield from _renamed(call, file, f"{name.replace('_not_', '_')}()")
    else:
        yield from _renamed(call, file, f"{name.replace('_once', '').replace('assert_', 'assert_not_')}()")


def _renamed(call: ast.Call, file: TestFile, becomes: str) -> _Edits:
    """The call's last name and its empty parentheses become another call."""
    if isinstance(call.func, ast.Attribute) and not call.args and not call.keywords:
        start = file.end(call.func) - len(call.func.attr.encode())
        if not any(character in "\r\n" for character in file.source[start : file.end(call)].decode()):
            yield Edit(start, file.end(call), becomes)


def _first(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    for expected in call.args[:1] or [keyword.value for keyword in call.keywords[:1]]:
        yield from _something_else(expected, file, values)


def _unknown(call: ast.Call, file: TestFile, values: Values) -> _Edits:
    """A checker that is not in any list: its second argument is taken for the expected one, else its only one."""
    if len(call.args) > 1:
        yield from _alike(call, file, values)
    elif call.keywords and call.keywords[0].arg not in (None, "msg"):
        yield from _something_else(call.keywords[0].value, file, values)


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
