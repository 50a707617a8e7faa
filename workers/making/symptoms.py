"""The problem of a task with planted bugs, as a user would report it: a call that fails, and what comes of it.

It is written from the failures of tests: the expression that a test checks, with the assignments that it needs, and the exception with its
message. What only the tests or the container know is left out: names of tests, paths of temporary files, addresses of objects. Nothing
here sees the difference that the bugs make.
"""

import ast
import builtins
import itertools
import posixpath
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from workers.grading.controls.spans import TestFile
from workers.making.reaching import Failure, RanTest

MOST_EXAMPLES = 3
MOST_CODE_LINES, MOST_CODE_CHARS, MOST_OUTPUT_LINES, MOST_LINE_CHARS = 12, 1000, 12, 300
# Names that need no explanation.
_GIVEN = frozenset({*dir(builtins), "tmp_path", "tmpdir", "monkeypatch", "capsys", "caplog", "self"})
_FAILED = ("AssertionError", "Failed")  # exceptions by which tests notice a wrong result
_RAISING = ("raises", "assertRaises", "assertRaisesRegex")
_EXPECTING = (*_RAISING, "warns", "assertWarns", "assertLogs")
_SETS_UP = ("setUp", "setup_method", "setup")
# As pytest and go name tests; after a slash go has methods of suites.
_NAMED_TEST = re.compile(r"(?:::|\.|/(?=Test[A-Z_]))([Tt]est\w+|(?:Example|Fuzz)[A-Z]\w*)")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
_TEMPORARY = re.compile(r"/tmp/pytest-of-[^/\s]+/pytest-\d+/[^/\s'\"]+|/tmp/tmp\w+")
_CUT = re.compile(
    r"^.*(?:Full output truncated|Full diff:|Use -v to get|use '-vv' to show).*$\n?", re.MULTILINE
)
_TEMPLATE = """# {title}

{examples}

Find the cause and correct it in the code, for every input and not for these alone. What works now has to go on working.{more}
"""
_MORE = " A function has lost its body, which has to be written anew; its docstring says what it does."


@dataclass(frozen=True, slots=True)
class Example:
    """A call that fails: code that shows it, the function that it calls, and what comes of it."""

    code: str
    called: str
    raised: str  # the exception of the code; "" if a wrong result is noticed
    output: str
    expected: str = ""  # the exception that the test expects

    @property
    def title(self) -> str:
        """What is wrong, in a line."""
        if self.raised == "NotImplementedError":
            return f"`{self.called}` is not implemented"
        return f"`{self.called}` " + (f"raises `{self.raised}`" if self.raised else "gives a wrong result")

    @property
    def text(self) -> str:
        is_silent = "DID NOT RAISE" in self.output
        exception = f"`{self.expected}`" if self.expected else "an exception"
        wanted = f"should raise {exception}" if self.expected or is_silent else "should work"
        return f"This {wanted}:\n\n```python\n{self.code}\n```\n\nIt ends with:\n\n```\n{self.output}\n```"


def example_of(
    failure: Failure, test: str, path: str, file: TestFile, callables: Collection[str]
) -> Example | None:
    """The example that the failure of a test gives; None if it shows no call of these functions, or has a name that only the test knows.

    `test` is the test's name, and `file` the text of its file at `path`.
    """
    in_test = [number for number, frame in enumerate(failure.frames) if frame.path == path]
    line = failure.frames[in_test[-1]].line if in_test else 0
    around = _statements_around(file.tree, line)
    shown = _shown(around[-1], line) if around else []
    needed = _needed(list(_before(around)), shown)
    entered = [frame.function for frame in failure.frames[in_test[-1] + 1 :] if frame.path] if in_test else []
    called = next(_called(entered, [*shown, *reversed(needed)], callables), "")
    names = {name for one in (*needed, *shown) for name in _names(one)}
    given = {
        name: value for name, value in failure.parameters.items() if name in names and _is_literal(value)
    }
    hidden = {*_arguments(around), *failure.parameters} - given.keys()
    outside = _outside(file, path, _unbound((*needed, *shown)) - given.keys(), hidden)
    if outside is None:
        return None
    imports, defined = outside
    lines = [*defined, *(f"{name} = {value}" for name, value in given.items())]
    code = "\n".join([*lines, *(_text(file, one) for one in (*needed, *shown))])
    output = _cleaned(f"{failure.exception}: {failure.message}" if failure.message else failure.exception)
    is_short = len(code) <= MOST_CODE_CHARS and code.count("\n") < MOST_CODE_LINES
    code = "\n".join([*imports, code])
    if not shown or not called or not is_short or _ADDRESS.search(code) or _is_named(test, path, code + output):
        return None
    is_noticed = failure.exception.rpartition(".")[2] in _FAILED or failure.frames[-1].path == path
    return Example(code, called, "" if is_noticed else failure.exception, output, _expected(around))


def problem_with(examples: Sequence[Example], *, is_gone: bool = False) -> str:
    """The problem that shows these examples. `is_gone`: the body of a function is gone."""
    text = "\n\n".join(one.text for one in examples)
    return _TEMPLATE.format(title=examples[0].title, examples=text, more=_MORE if is_gone else "").strip()


def chosen(groups: Sequence[Collection[Example]]) -> list[Example]:
    """The shortest few of the examples, one of each code, and one of each group; none if a group has none of its own."""
    ordered = [
        sorted(group, key=lambda one: (len(one.code) + len(one.output), one.code, one.output))
        for group in groups
    ]
    found: dict[str, Example] = {}
    for one in (one for some in itertools.zip_longest(*ordered) for one in some if one):
        found.setdefault(one.code, one)
    return [*found.values()][: max(MOST_EXAMPLES, len(groups))] if all(ordered) else []


def names_tests(problem: str, tests: Iterable[RanTest]) -> bool:
    """Whether the problem has the name of one of these tests or of its file."""
    words = {posixpath.basename(test.path).removesuffix(".py") for test in tests}
    words |= {name for test in tests for name in _NAMED_TEST.findall(test.name.partition("[")[0])}
    return any(re.search(rf"\b{re.escape(word)}\b", problem) for word in words)


def _is_named(test: str, path: str, text: str) -> bool:
    """Whether the text has the name of the test, of its class or of its file."""
    names = test.partition("[")[0].split("::")[1:]
    return path in text or any(re.search(rf"\b{re.escape(name)}\b", text) for name in names)


def _statements_around(tree: ast.AST, line: int) -> list[ast.stmt]:
    """The statements that contain the line, the outermost first."""
    found: list[ast.stmt] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            found.append(node)
    return found


def _shown(statement: ast.stmt, line: int) -> list[ast.stmt | ast.expr]:
    """What is shown of the statement that fails: no assertion of a test's own, and no context that only expects something."""
    match statement:
        case ast.Assert(test=value) | ast.Return(value=ast.expr() as value):
            return [value]
        case ast.Expr(value=ast.Call(args=[first, *_])) if _is_check(statement):
            return [first]
        case ast.With(items=items, body=body) if statement.lineno == line:
            return [*body] if any(map(_is_check, items)) else [item.context_expr for item in items]
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Expr() | ast.Delete():
            return [statement]
        case _:
            return []


def _expected(around: Sequence[ast.stmt]) -> str:
    """The exception that the innermost statement around expects of what is in it; "" if none does."""
    calls = [item.context_expr for one in reversed(around) if isinstance(one, ast.With) for item in one.items]
    for call in calls:
        match call:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *_]) if name in _RAISING:
                return ast.unparse(first)
            case _:
                pass
    return ""


def _before(around: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs before a statement, as far as it is in the same class or in the outermost block of the same function."""
    for outer, inner in itertools.pairwise(around):
        if isinstance(outer, ast.ClassDef):
            for one in outer.body:
                if isinstance(one, ast.FunctionDef) and one.name in _SETS_UP and one is not inner:
                    yield from one.body
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from outer.body[: outer.body.index(inner)]
            return


def _needed(before: Sequence[ast.stmt], shown: Sequence[ast.AST]) -> list[ast.stmt]:
    """Those of the statements that have to do with the names in what is shown, without those that check something."""
    names = {name for one in shown for name in _names(one)}
    found: list[ast.stmt] = []
    for statement in reversed(before):
        if names.intersection(_names(statement)) and not any(map(_is_check, ast.walk(statement))):
            found.insert(0, statement)
            names |= {*_names(statement)}
    return found


def _is_literal(value: str) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _arguments(around: Sequence[ast.stmt]) -> set[str]:
    """The names of the arguments of the functions around a statement."""
    functions = [one for one in around if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {one.arg for function in functions for one in ast.walk(function.args) if isinstance(one, ast.arg)}


def _unbound(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that these nodes use and do not bind, without Python's own; attributes of `self` are names, too."""
    used, bound = set[str](), set[str]()
    for one in (inner for node in nodes for inner in ast.walk(node)):
        match one:
            case ast.Name(id=name, ctx=context):
                (used if isinstance(context, ast.Load) else bound).add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=context):
                (used if isinstance(context, ast.Load) else bound).add(f"self.{name}")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name.partition(".")[0])
            case _:
                pass
    free = used - bound - _GIVEN
    return {name for name in free if not name.startswith("self.")} if "self" in bound else free


def _outside(
    file: TestFile, path: str, names: set[str], hidden: Collection[str]
) -> tuple[list[str], list[str]] | None:
    """The imports and the definitions of the test file that give these names; None if it does not give one, or an argument hides it."""
    given = {name: one for one in file.tree.body for name in _defined(one)}
    imports, definitions = dict[str, None](), dict[int, str]()
    waiting = sorted(names, reverse=True)
    while waiting:
        name = waiting.pop()
        statement = given.get(name)
        if statement is None or name in hidden:
            return None
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports[_import_of(statement, name, path)] = None
        elif statement.lineno not in definitions:
            definitions[statement.lineno] = _text(file, statement)
            waiting += sorted(_unbound([statement]), reverse=True)
    return sorted(imports), [definitions[line] for line in sorted(definitions)]


def _defined(statement: ast.stmt) -> list[str]:
    """The names that a statement of a module gives to examples: no fixtures, and no tests."""
    match statement:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [one.asname or one.name.partition(".")[0] for one in names]
        case ast.Assign(targets=targets):
            return [one.id for one in targets if isinstance(one, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return [name]
        case ast.FunctionDef(name=name, decorator_list=[]) | ast.ClassDef(name=name, decorator_list=[]):
            return [] if name.lower().startswith("test") else [name]
        case _:
            return []


def _import_of(statement: ast.Import | ast.ImportFrom, name: str, path: str) -> str:
    """The import of this name alone, from the root of the repository where it is relative to the file at `path`."""
    alias = next(one for one in statement.names if (one.asname or one.name.partition(".")[0]) == name)
    imported = ast.unparse(ast.Import([alias]))
    if isinstance(statement, ast.Import):
        return imported
    around = path.split("/")[: -statement.level] if statement.level else []
    module = ".".join([*around, *filter(None, [statement.module])])
    return f"from {module} {imported}"


def _is_check(node: ast.AST) -> bool:
    """Whether the node is an assertion, or a context that expects an exception or a warning."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return name.startswith("assert")
        case ast.withitem(context_expr=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))):
            return name in _EXPECTING
        case _:
            return isinstance(node, ast.Assert)


def _names(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        match one:
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case _:
                pass


def _called(entered: Sequence[str], nodes: Sequence[ast.AST], callables: Collection[str]) -> Iterator[str]:
    """Those of these functions that may be named as the one that fails, the likeliest first: the one through which an exception came, the
    public ones that are called, the others, properties.
    """
    calls, properties = list[str](), list[str]()
    for one in (inner for node in nodes for inner in ast.walk(node)):
        match one:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                calls.append(name)
            case ast.Attribute(attr=name):
                properties.append(name)
            case _:
                pass
    found = [*entered[:1], *sorted(calls, key=lambda name: name.startswith("_")), *properties]
    return (name for name in found if name in callables)


def _text(file: TestFile, node: ast.AST) -> str:
    """The source of a statement or an expression, without its indentation."""
    assert isinstance(node, ast.stmt | ast.expr)
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    start = file.line_starts[node.lineno - 1] + node.col_offset
    start = min([start, *(file.start(one) - len("@") for one in decorators)])
    end = file.line_starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
    text = file.source[start:end].decode()
    return textwrap.dedent(" " * node.col_offset + text)


def _cleaned(output: str) -> str:
    """The output of a failure without what differs from run to run, cut where it is long."""
    output = _TEMPORARY.sub("/tmp/directory", _ADDRESS.sub("0x...", _CUT.sub("", output)))
    lines = [line[:MOST_LINE_CHARS].rstrip() for line in output.strip().split("\n")]
    return "\n".join(lines[:MOST_OUTPUT_LINES] + ["..."] * (len(lines) > MOST_OUTPUT_LINES))
