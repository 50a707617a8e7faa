"""Text outside the code that repeats the expected value: the name of its test, comments, messages, docstrings, ids of cases.

Code under test may read it, so it is changed to the other value, too. Numbers are searched as digits and as English words, texts as whole
words.

The names that pytest gives the cases of parametrized tests are known if the source determines them.
"""

import ast
import builtins
import itertools
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import TypeAlias

from workers.grading.controls.flowing import Case, parameter_names
from workers.grading.controls.reaching import Definition
from workers.grading.controls.scopes import Names, decorator_name, is_fixture, listed, name_of_call, plain
from workers.grading.controls.spans import Edit, TestFile
from workers.grading.controls.values import outside_braces

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_MOST_NAMES = 100  # number of tests that one case may belong to
_UNNAMED = listed(
    "list dict set frozenset tuple Decimal Fraction date datetime timedelta array object OrderedDict"
)


@dataclass(frozen=True, slots=True)
class Renamed:
    """The tests that a case belongs to, and the name that each of them has when the case has another value."""

    tests: tuple[str, ...]
    names: dict[str, str]


class CaseNames:
    """Names the cases of one file's tests."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def renamed(
        self, case: Case, test: str, function: Function, leaf: ast.expr, becomes: str, given: str | None
    ) -> Renamed | None:
        """The tests of one case of the function `test` and their new names, if the value at `leaf` becomes `becomes` and the written id of
        the case becomes `given`; None if they are not known.
        """
        calls = self._calls(function)
        if case.call not in calls:
            return None
        ids = [self._ids(call) for call in calls]
        place = calls.index(case.call)
        was = ids[place][case.number] if case.number < len(ids[place]) else None
        new = given or self._new_id(case, was, leaf, becomes)
        others = [ids[number] if number != place else [""] for number in range(len(ids))]
        if was is None or new is None or any(None in some for some in others):
            return Renamed((test,), {}) if not self._is_named_by(case, leaf) else None
        if new != was and new in ids[place]:
            return None
        pairs: dict[str, str] = {}
        for combination in itertools.islice(itertools.product(*others), _MOST_NAMES):
            parts = [part or "" for part in combination]
            before, after = [*parts], [*parts]
            before[place], after[place] = was, new
            pairs[f"{test}[{'-'.join(before)}]"] = f"{test}[{'-'.join(after)}]"
        return Renamed(tuple(pairs), {one: other for one, other in pairs.items() if one != other})

    def uses(self, function: Function, fixture: str) -> bool:
        """Whether a function gets the fixture, directly or through others."""
        return any(getattr(one, "name", "") == fixture for one in self._fixtures(function))

    def written_id(self, case: Case) -> ast.Constant | None:
        """The id that is written in the source for a case."""
        rows = self._rows(case.call) or ()
        row = rows[case.number] if case.number < len(rows) else None
        ids = _keyword(case.call, "ids")
        found = _keyword(row, "id") if isinstance(row, ast.Call) and name_of_call(row) == "param" else None
        if found is None and isinstance(ids, ast.List | ast.Tuple) and case.number < len(ids.elts):
            found = ids.elts[case.number]
        return found if isinstance(found, ast.Constant) and isinstance(found.value, str) else None

    def _calls(self, function: Function) -> list[ast.Call]:
        """The calls that give the function its cases, in the order in which their parts appear in names."""
        fixtures = [
            one
            for one in self._fixtures(function)
            if any(_keyword(call, "params") for call in _calls_of(one))
        ]
        owners: list[ast.AST] = [*fixtures, function]
        owners += [one for one in self._names.around(function) if isinstance(one, ast.ClassDef)]
        return [
            decorator
            for owner in owners
            if isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            for decorator in reversed(owner.decorator_list)
            if isinstance(decorator, ast.Call) and decorator_name(decorator) in ("parametrize", "fixture")
        ]

    def _fixtures(self, function: Function) -> list[Function]:
        """The fixtures of the file that a function gets, directly or through other fixtures."""
        found: dict[int, Function] = {}
        waiting = [function]
        while waiting:
            for argument in waiting.pop().args.args:
                for one in self._names.functions.get(argument.arg, []):
                    if is_fixture(one) and id(one) not in found:
                        found[id(one)] = one
                        waiting.append(one)
        return list(found.values())

    def _is_named_by(self, case: Case, leaf: ast.expr) -> bool:
        """Whether the name of the case may contain the value at `leaf`."""
        if any(keyword.arg == "ids" for keyword in case.call.keywords):
            return False  # a value that the ids do not mention may be tried
        return case.is_value and not isinstance(leaf, ast.List | ast.Tuple | ast.Dict)

    def _new_id(self, case: Case, was: str | None, leaf: ast.expr, becomes: str) -> str | None:
        rows = self._rows(case.call)
        if was is None or rows is None:
            return None
        given = self._given_id(case.call, rows, case.number)
        if given is not None or not case.is_value:
            return was if given != "" else None
        parts = self._parts(case.call, rows[case.number], case.number)
        sign = "-" if isinstance(self._names.parent(leaf), ast.UnaryOp) else ""
        try:
            new = self._word(
                ast.parse(f"{sign}{becomes.strip()}", mode="eval").body,
                f"{case.parameter}{case.number}",
                by_str=_by_str(case.call),
            )
        except SyntaxError:
            return None
        if parts is None or new is None or case.part >= len(parts):
            return None
        return "-".join([*parts[: case.part], new, *parts[case.part + 1 :]])

    def _ids(self, call: ast.Call) -> list[str | None]:
        rows = self._rows(call)
        if rows is None:
            return [None]
        found: list[str | None] = []
        for number, row in enumerate(rows):
            given = self._given_id(call, rows, number)
            parts = self._parts(call, row, number) if given is None else None
            found.append(
                given or None if given is not None else "-".join(parts) if parts is not None else None
            )
        counts = Counter(found)
        return [one if counts[one] == 1 else None for one in found]

    def _rows(self, call: ast.Call) -> Sequence[ast.expr] | None:
        keyword = "params" if name_of_call(call) == "fixture" else "argvalues"
        values = _keyword(call, keyword) or (call.args[1] if len(call.args) > 1 else None)
        values = self._made(values)
        if not isinstance(values, ast.List | ast.Tuple) or any(
            isinstance(one, ast.Starred) for one in values.elts
        ):
            return None
        return values.elts

    def _made(self, values: ast.expr | None) -> ast.expr | None:
        """The expression that is the value of a name, or of a call of a function of the file."""
        name = values.func if isinstance(values, ast.Call) else values
        bindings = self._names.bindings_of(name) if isinstance(name, ast.Name) else []
        match [self._names.parent(one) for one in bindings], bindings:
            case [ast.Assign(value=value)], _ if name is values:
                return value
            case _, [ast.FunctionDef(body=[*_, ast.Return(value=value)])] if name is not values:
                return value
            case _:
                return values

    def _given_id(self, call: ast.Call, rows: Sequence[ast.expr], number: int) -> str | None:
        """The id that is given to a case; None if it has none, empty if it is not known."""
        row = rows[number]
        if name_of_call(row) == "param" and isinstance(row, ast.Call):
            given = _keyword(row, "id")
            if given is not None:
                return str(given.value) if isinstance(given, ast.Constant) else ""
        ids = _keyword(call, "ids")
        match ids:
            case None | ast.Constant(value=None) | ast.Name(id="str"):
                return None
            case ast.List(elts=elements) | ast.Tuple(elts=elements) if number < len(elements):
                element = elements[number]
                if not isinstance(element, ast.Constant):
                    return ""
                return None if element.value is None else str(element.value)
            case _:
                return ""

    def _parts(self, call: ast.Call, row: ast.expr, number: int) -> list[str] | None:
        """The words of an automatic id, one for each parameter."""
        if name_of_call(call) == "fixture":
            owner = self._names.parent(call)
            names = [getattr(owner, "name", "")]
        else:
            names = parameter_names(call)
        values = [row]
        if isinstance(row, ast.Call) and name_of_call(row) == "param":
            values = row.args
        elif len(names) > 1:
            values = row.elts if isinstance(row, ast.Tuple | ast.List) else []
        if len(values) != len(names):
            return None
        words = [
            self._word(value, f"{name}{number}", by_str=_by_str(call))
            for name, value in zip(names, values, strict=True)
        ]
        return None if None in words else [word for word in words if word is not None]

    def _word(self, value: ast.expr, unnamed: str, *, by_str: bool) -> str | None:
        """The word for one value in an id, which `str` or pytest itself makes."""
        try:
            known = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError):
            return None if by_str else self._word_of_name(value, unnamed)
        known = str(known) if by_str else known
        match known:
            case str():
                return known.encode("unicode_escape").decode("ascii")
            case bytes():
                text = known.decode("ascii", "backslashreplace")
                return text if text.isprintable() else None
            case None | bool() | int() | float() | complex():
                return str(known)
            case _:
                return unnamed

    def _word_of_name(self, value: ast.expr, unnamed: str) -> str | None:
        match value:
            case (
                ast.List()
                | ast.Tuple()
                | ast.Dict()
                | ast.Set()
                | ast.ListComp()
                | ast.SetComp()
                | ast.DictComp()
            ):
                return unnamed
            case ast.Lambda():
                return "<lambda>"
            case ast.Call() if name_of_call(value) in _UNNAMED:
                return unnamed
            case ast.Name(id=name):
                bindings = self._names.bindings_of(value)
                if not bindings:
                    return name if hasattr(getattr(builtins, name, None), "__name__") else None
                is_class = (
                    any(one.islower() for one in name) and name[0].isupper() and self._names.module_of(value)
                )
                is_defined = all(isinstance(one, ast.FunctionDef | ast.ClassDef) for one in bindings)
                return name if is_defined or is_class else None
            case ast.Attribute(attr=name) if name[0].isupper() and any(one.islower() for one in name):
                return name if self._names.module_of(value) else None
            case _:
                return None


def _calls_of(function: Function) -> Iterator[ast.Call]:
    return (one for one in function.decorator_list if isinstance(one, ast.Call))


def _by_str(call: ast.Call) -> bool:
    ids = _keyword(call, "ids")
    return isinstance(ids, ast.Name) and ids.id == "str"


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


_NUMBERS = listed("""zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty""")
_SHORTEST = 2  # characters of the shortest text that is looked for
_MOST_FUNCTIONS = 10
_UNSPEAKABLE = re.compile(r"[\\'\"{}#\r\n]")  # characters that change the meaning of text around them
_MESSAGES = ("msg", "err_msg", "message", "reason")


@dataclass(frozen=True, slots=True)
class Saying:
    """The form in which a text mentions a value, and the form in which it mentions the other value instead."""

    pairs: tuple[tuple[str, str], ...]

    def in_text(self, text: str) -> str:
        for was, becomes in self.pairs:
            text = re.sub(rf"(?<![\w.]){re.escape(was)}(?!\w|\.\d)", becomes.replace("\\", r"\\"), text)
        return text

    def in_name(self, name: str) -> str:
        for was, becomes in self.pairs:
            if re.fullmatch(r"[A-Za-z0-9]+", was) and re.fullmatch(r"[A-Za-z0-9_]+", becomes):
                for one, other in {was.lower(): becomes.lower(), was: becomes}.items():
                    name = re.sub(rf"(?<![A-Za-z0-9]){one}(?![A-Za-z0-9])", other, name)
        return name


SILENT = Saying(())


def saying(was: object, becomes: object) -> Saying:
    """The mentions of one literal, and of another literal of its type."""
    pairs = [(str(was), str(becomes))]
    match was, becomes:
        case (bool(), _) | (None, _):
            pairs = []
        case int(), int():
            words = [_NUMBERS[one] if 0 <= one < len(_NUMBERS) else str(one) for one in (was, becomes)]
            if words[0] in _NUMBERS:
                pairs += [(word(words[0]), word(words[1])) for word in (str, str.capitalize, str.upper)]
        case float(), float():
            pass
        case str(), str():
            if (
                len(was) < _SHORTEST
                or not any(one.isalnum() for one in was)
                or _UNSPEAKABLE.search(was + becomes)
            ):
                pairs = []
        case _:
            pairs = []
    return Saying(tuple(pairs))


@dataclass(slots=True)
class Carriers:
    """Finds the text that mentions values in one file."""

    file: TestFile
    names: Names
    reached: Sequence[tuple[Definition, tuple[str, ...]]]
    _comments: list[tuple[int, int, int]] = field(init=False)  # line, and the bytes where it starts and ends
    _num_uses: Counter[str] = field(init=False)  # number of uses of each word
    _definitions: dict[str, list[Function]] = field(init=False)  # the functions that are a test

    def __post_init__(self) -> None:
        self._comments = list(_comments(self.file))
        self._num_uses = Counter(re.findall(r"\w+", self.file.source.decode()))
        self._definitions = defaultdict(list)
        for definition, reaching in self.reached:
            if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
                for test in reaching:
                    if test.rpartition("::")[2] == definition.name:
                        self._definitions[test].append(definition)

    def edits(self, said: Saying, root: ast.expr, tests: Iterable[str]) -> Iterator[Edit]:
        """Edits of comments, docstrings and messages of the tests, and of comments beside the value."""
        if not said.pairs:
            return
        lines = {*range(root.lineno, (root.end_lineno or root.lineno) + 1)}
        functions = self._functions(tests)[:_MOST_FUNCTIONS]
        around = self.names.function_around(root)
        for function in {id(one): one for one in (*functions, around) if one is not None}.values():
            lines |= {*range(function.lineno, (function.end_lineno or function.lineno) + 1)}
            for text in self._texts(function):
                yield from self._said_otherwise(text, said)
        for line, start, end in self._comments:
            if line in lines:
                was = self.file.source[start:end].decode()
                becomes = said.in_text(was)
                if becomes != was:
                    yield Edit(start, end, becomes)

    def renamed(self, said: Saying, tests: Sequence[str]) -> tuple[list[Edit], dict[str, str]]:
        """Edits that rename the functions of these tests so that the names do not mention the value, and the new names of the tests."""
        edits: list[Edit] = []
        renamed: dict[str, str] = {}
        if not any("[" in test for test in tests):
            for function in self._functions(tests)[:_MOST_FUNCTIONS]:
                places, becomes = self._name_otherwise(function, said)
                edits += [Edit(place, place + len(function.name.encode()), becomes) for place in places]
                for test, definitions in self._definitions.items() if places else ():
                    if function in definitions:
                        renamed[test] = f"{test.removesuffix(function.name)}{becomes}"
        return edits, renamed

    def _name_otherwise(self, function: Function, said: Saying) -> tuple[list[int], str]:
        """The positions of a function's name, and the new name; no positions if it does not change."""
        name = function.name
        becomes = said.in_name(name)
        if becomes == name or not becomes.isidentifier() or self._num_uses[becomes]:
            return [], name
        reads = [*self.names.module.uses.get(name, []), *self.names.attributes.get(name, [])]
        if self._num_uses[name] != len(reads) + 1:  # a text may name it
            return [], name
        start = self.file.line_starts[function.lineno - 1] + function.col_offset
        defined = re.match(rb"(?:async\s+)?def\s+", self.file.source[start:])
        if defined is None:
            return [], name
        return [start + defined.end(), *(self.file.end(read) - len(name.encode()) for read in reads)], becomes

    def _functions(self, tests: Iterable[str]) -> list[Function]:
        found = {id(one): one for test in tests for one in self._definitions[test.partition("[")[0]]}
        return list(found.values())

    def _texts(self, function: Function) -> Iterator[ast.expr]:
        """The docstring and the messages of a function."""
        match function.body:
            case [ast.Expr(value=ast.Constant(value=str()) as docstring), *_]:
                yield docstring
            case _:
                pass
        for node in ast.walk(function):
            messages: list[ast.expr] = []
            if isinstance(node, ast.Assert) and node.msg is not None:
                messages = [node.msg]
            elif isinstance(node, ast.Call) and plain(name_of_call(node)).startswith("assert"):
                messages = [keyword.value for keyword in node.keywords if keyword.arg in _MESSAGES]
                messages += [one for one in node.args[2:] if isinstance(one, ast.Constant | ast.JoinedStr)]
            elif name_of_call(node) == "fail" and isinstance(node, ast.Call):
                messages = node.args[:1]
            for message in messages:
                if isinstance(message, ast.JoinedStr) or (
                    isinstance(message, ast.Constant) and isinstance(message.value, str)
                ):
                    yield message

    def _said_otherwise(self, text: ast.expr, said: Saying) -> Iterator[Edit]:
        if not self.file.is_placed(text):
            return
        was = self.file.text(text)
        if isinstance(text, ast.JoinedStr):
            free = {*outside_braces(was)}
            becomes = "".join(
                said.in_text("".join(was[place] for place in part)) if part[0] in free else was[part[0]]
                for part in _runs(len(was), free)
            )
        else:
            becomes = said.in_text(was)
        if becomes != was:
            yield Edit(self.file.start(text), self.file.end(text), becomes)


def _runs(length: int, free: set[int]) -> Iterator[list[int]]:
    """Positions in a text: neighbouring free ones together in runs, each other one alone."""
    run: list[int] = []
    for place in range(length):
        if place in free:
            run.append(place)
            continue
        if run:
            yield run
            run = []
        yield [place]
    if run:
        yield run


def _comments(file: TestFile) -> Iterator[tuple[int, int, int]]:
    mark_bytes = file.line_starts[0]
    try:
        for token in tokenize.tokenize(BytesIO(file.source[mark_bytes:]).readline):
            if token.type == tokenize.COMMENT:
                line = token.start[0]
                before = token.line[: token.start[1]]
                start = file.line_starts[line - 1] + len(before.encode())
                if file.source[start : start + 1] == b"#":
                    yield line, start, start + len(token.string.encode())
    except (tokenize.TokenError, SyntaxError):
        return
