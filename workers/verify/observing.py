"""Observes the values of expressions in test files in a run of the known fix, and which expectations are met in a run without it.

An expression is wrapped in a call that records its value and returns it (recorder/). Nothing else changes: the marked text has the same
number of lines, and the same syntax tree except for these calls. Every Python of the container runs the recorder as it starts, so that it
sees the files that are opened before the tests, too. Its records arrive over the side channel. If there are none, or if the marked tests of
a file do not pass, nothing is known about the file's expressions.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, cast

import msgspec

from pipeline.request import Claim, Limits
from pipeline.task import Contradiction, TextChange
from workers.grading.controls.expecting import expects_exception
from workers.grading.controls.placing import NotAsCalibrated
from workers.grading.controls.scopes import name_of_call, plain
from workers.grading.controls.spans import Edit, Span, TestFile, parse_expression, read
from workers.grading.controls.values import ORIGINAL, Observed
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded
from workers.verify.differing import Difference, equal_operands, met_parts
from workers.verify.recorder.meeting import AWAIT, COMPARE, MEET
from workers.verify.recorder.near_values import LONGEST_CHARS, MOST_NEAR
from workers.verify.recorder.recording import MOST_FILES, MOST_TYPES, SEE, WORKDIR
from workers.verify.trials import RunsTests

# Expressions that cannot be an argument of a call, or whose value is of no use.
_UNMARKED = (
    ast.Starred,
    ast.Slice,
    ast.GeneratorExp,
    ast.JoinedStr,
    ast.Yield,
    ast.YieldFrom,
    ast.Await,
    ast.NamedExpr,
)
# Expressions that cannot be moved into a function of their own.
_NOT_PUT_OFF = (
    ast.Await,
    ast.Yield,
    ast.YieldFrom,
    ast.NamedExpr,
)
# Fields that hold no expressions, or that need not be evaluated.
_APART = frozenset(["annotation", "returns", "type_params", "pattern"])


@dataclass(frozen=True, slots=True)
class MarkedFile:
    """Edits that mark the expressions at `spans`, which are numbered in this order."""

    spans: list[Span]
    edits: list[Edit]


def mark(text: bytes, wanted: list[Span], first_number: int) -> MarkedFile:
    """Marks those of the `wanted` expressions that can be marked; none if this interpreter cannot parse the file."""
    file = read(text)
    if file is None:
        return MarkedFile([], [])
    there = {(file.start(node), file.end(node)): node for node in _expressions(file.tree)}
    spans = sorted(span for span in {*wanted} if span in there and file.is_placed(there[span]))
    edits = list(_edits(text, spans, first_number))
    marked = read(_edited(text, edits))
    is_sound = marked is not None and ast.dump(_Unmarked().visit(marked.tree)) == ast.dump(file.tree)
    return MarkedFile(spans, edits) if is_sound else MarkedFile([], [])


def _expressions(tree: ast.Module) -> Iterator[ast.expr]:
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.JoinedStr) or type(node).__name__ == "TemplateStr":
            continue  # Python 3.11 gives wrong positions inside
        is_loaded = isinstance(getattr(node, "ctx", None) or ast.Load(), ast.Load)
        if isinstance(node, ast.expr) and is_loaded and not isinstance(node, _UNMARKED):
            yield node
        left.extend(_parts(node))


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    for name, value in ast.iter_fields(node):
        parts = cast("list[object]", value) if isinstance(value, list) else [value]
        yield from (part for part in parts if isinstance(part, ast.AST) and name not in _APART)


def _edits(text: bytes, spans: Sequence[Span], first_number: int) -> Iterator[Edit]:
    """One edit for each of `spans` that is inside no other one."""
    # Closing parentheses come first at the same position, and the outer of two expressions opens first.
    goes: list[tuple[int, int, int, str]] = []
    for number, (start, end) in enumerate(spans, first_number):
        space = (
            " " if start and (text[start - 1 : start].isalnum() or text[start - 1 : start] == b"_") else ""
        )
        goes += [(start, 1, -end, f"{space}{SEE}({number})(("), (end, 0, -start, "))")]
    goes.sort()
    next_one = 0
    for start, end in _outermost(spans):
        becomes, place = "", start
        while (
            next_one < len(goes)
            and goes[next_one][0] <= end
            and not (goes[next_one][0] == end and goes[next_one][1])
        ):
            at, _, _, added = goes[next_one]
            becomes += text[place:at].decode() + added
            place, next_one = at, next_one + 1
        yield Edit(start, end, becomes)


def _outermost(spans: Sequence[Span]) -> Iterator[Span]:
    """The spans, in order, that are inside no other one."""
    reached = 0
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if start >= reached:
            yield start, end
            reached = end


def _edited(text: bytes, edits: Iterable[Edit]) -> bytes:
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.becomes.encode() + text[edit.end :]
    return text


def mark_checks(text: bytes, first_number: int) -> MarkedFile:
    """Marks the expectations of the file. The recorder then notes whether each is met, and the test continues if one is not."""
    file = read(text)
    if file is None:
        return MarkedFile([], [])
    spans: list[Span] = []
    edits: list[Edit] = []
    for statement in _statements_of_functions(file.tree):
        for check in _checks(statement):
            nodes = [check.whole, *check.parts, *check.operands]
            if not all(map(file.is_placed, nodes)) or any(
                isinstance(node, _NOT_PUT_OFF) for node in ast.walk(check.whole)
            ):
                continue
            number = first_number + len(spans)
            spans += [(file.start(part), file.end(part)) for part in check.parts or [check.whole]]
            edits.append(check.edit(file, number))
    return MarkedFile(spans, edits) if file.stays_parsed(edits) else MarkedFile([], [])


def _statements_of_functions(tree: ast.Module) -> list[ast.stmt]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = {id(node): node for one in functions for node in ast.walk(one) if isinstance(node, ast.stmt)}
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Check:
    """A check of a statement. Its `parts` are recorded; it is recorded itself if it has none. Its two `operands` must be equal."""

    whole: ast.expr
    is_condition: bool = True
    parts: tuple[ast.expr, ...] = ()
    operands: tuple[ast.expr, ...] = ()

    def edit(self, file: TestFile, number: int) -> Edit:
        """The edit that marks the check with this number and, if it has parts, the next one."""
        if self.parts:
            return file.wrap(self.whole, f" {AWAIT}({number}, {number + 1})(", ")")
        space = " " if self.is_condition else ""  # in `assert(x)`; a statement of its own must not move
        if not self.operands:
            return file.wrap(self.whole, f"{space}{MEET}({number}, {self.is_condition})(lambda: (", "))")
        start, names = file.start(self.whole), ("_swerve_one", "_swerve_other")
        text = file.text(self.whole).encode()
        for operand, name in reversed([*zip(self.operands, names, strict=True)]):
            text = text[: file.start(operand) - start] + name.encode() + text[file.end(operand) - start :]
        before = (
            f"{space}{COMPARE}({number}, {self.is_condition})(lambda {', '.join(names)}: ({text.decode()})"
        )
        made = "".join(f", lambda: ({file.text(operand)})" for operand in self.operands)
        return Edit(start, file.end(self.whole), f"{before}{made})")


def _checks(statement: ast.stmt) -> Iterator[_Check]:
    match statement:
        case ast.Assert(test=ast.BoolOp(op=ast.And(), values=conditions)):
            yield from map(_of_condition, conditions)
        case ast.Assert(test=condition):
            yield _of_condition(condition)
        case ast.Expr(value=ast.Call() as call) if plain(name_of_call(call)).startswith("assert"):
            yield _Check(call, is_condition=False, operands=equal_operands(call))
        case ast.With(items=items):
            for item in items:
                call = item.context_expr
                if isinstance(call, ast.Call) and expects_exception(call) and call.args:
                    pattern = [one.value for one in call.keywords if one.arg == "match"] or call.args[1:2]
                    yield _Check(call, parts=(call.args[0], *(pattern or call.args[:1])))
        case _:
            pass


def _of_condition(condition: ast.expr) -> _Check:
    return _Check(condition, operands=equal_operands(condition))


class _Unmarked(ast.NodeTransformer):
    """Removes the marking calls from a syntax tree."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Call(func=ast.Name(id=name)), args=[value]) if name == SEE:
                return value
            case _:
                return node


RECORDER = Path(__file__).with_name("recorder")
MODULES = ("near_values", "recording", "meeting")
MOST_EXPRESSIONS = 4000  # limit for one task
MARKING_CPU_S = 120  # limit for one file
READING_CPU_S = 60
_BETWEEN_MODULES = re.compile(r"^from workers\.verify\.recorder\.\w+ import .*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ObservableFile:
    """A test file with expressions to observe, and the names of its tests that pass."""

    text: bytes
    spans: Sequence[Span]
    passing: Sequence[str]


class _Said(msgspec.Struct, frozen=True):
    """The report of one process about an expression."""

    near: Annotated[list[str], msgspec.Meta(max_length=MOST_NEAR)]
    low: float | None
    high: float | None
    types: Annotated[list[str], msgspec.Meta(max_length=MOST_TYPES)]
    values: list[int]
    files: Annotated[list[str], msgspec.Meta(max_length=MOST_FILES)]


async def observe(
    grader: RunsTests, claim: Claim, fix: bytes, files: Mapping[str, ObservableFile], workdir: str
) -> dict[str, dict[Span, Observed]]:
    """The observed values of the expressions in test files, by path and span, in a run of the known fix.

    Expressions that were not evaluated are left out, and so are files one of whose tests does not pass with the marks. Raises RolloutError.
    """
    marked = await _marked(files)
    if not any(file.spans for file in marked.values()):
        return {}
    texts = {path: file.text for path, file in files.items()}
    try:
        run = await grader.run_tests(claim, fix, _changes(marked, texts), at_start=recorder(workdir))
        seen = await isolation.call(read_notes, run.notes, workdir, cpu_s=READING_CPU_S)
    except (NotAsCalibrated, LimitExceeded):
        return {}
    outcomes = run.outcomes
    sound = {path for path in marked if all(outcomes.passed(name) for name in files[path].passing)}
    return _of_sound_files(marked, seen, sound)


async def met(
    grader: RunsTests, claim: Claim, patch: bytes, texts: Mapping[str, bytes], workdir: str, limits: Limits
) -> dict[str, list[Span]]:
    """The expectations in test files that are met whenever they are checked in a run of the patch, by path.

    Each test continues after an expectation that is not met. If the run does not end, the result is empty. Raises RolloutError.
    """
    marked: dict[str, MarkedFile] = {}
    number = 0
    for path, text in texts.items():
        with suppress(LimitExceeded):
            marked[path] = await isolation.call(mark_checks, text, number, cpu_s=MARKING_CPU_S)
            number += len(marked[path].spans)
    try:
        run = await grader.run_tests(
            claim, patch, _changes(marked, texts), limits, at_start=recorder(workdir)
        )
    except NotAsCalibrated:
        return {}
    if not run.outcomes.finished:
        return {}
    said = {*re.findall(rb"^met (\d{1,6}) ([01])$", run.notes, re.MULTILINE)}
    differing = read_differences(run.notes)
    number = 0
    found: dict[str, list[Span]] = {}
    for path, file in marked.items():
        numbers = {number + place: span for place, span in enumerate(file.spans)}
        number += len(numbers)
        unmet = {one: span for one, span in numbers.items() if (b"%d" % one, b"0") in said}
        spans = [span for one, span in numbers.items() if (b"%d" % one, b"1") in said and one not in unmet]
        checks = [(span, differing.get(one, [])) for one, span in unmet.items()]
        with suppress(LimitExceeded):
            spans += await isolation.call(met_parts, texts[path], checks, cpu_s=MARKING_CPU_S)
        if spans:
            found[path] = spans
    return found


def read_differences(notes: bytes) -> dict[int, list[Difference]]:
    """Where the two values of each check differ, by its number. Lines in another format are ignored, because any process may write them."""
    found: dict[int, list[Difference]] = defaultdict(list)
    for number, said in re.findall(rb"^differs (\d{1,6}) (\[.*\])$", notes, re.MULTILINE):
        with suppress(ValueError, msgspec.DecodeError):
            found[int(number)] += msgspec.json.decode(said, type=list[Difference])
    return dict(found)


def _changes(marked: Mapping[str, MarkedFile], texts: Mapping[str, bytes]) -> list[Contradiction]:
    """The marks as edits of the files that have some."""
    return [
        Contradiction(
            path=path,
            changes=tuple(
                TextChange(
                    offset_bytes=edit.start,
                    was=texts[path][edit.start : edit.end].decode(),
                    becomes=edit.becomes,
                )
                for edit in file.edits
            ),
            fails=(path,),
        )
        for path, file in marked.items()
        if file.edits
    ]


async def _marked(files: Mapping[str, ObservableFile]) -> dict[str, MarkedFile]:
    marked: dict[str, MarkedFile] = {}
    number = 0
    for path, file in files.items():
        wanted = [*file.spans][: MOST_EXPRESSIONS - number]
        with suppress(LimitExceeded):
            marked[path] = await isolation.call(mark, file.text, wanted, number, cpu_s=MARKING_CPU_S)
            number += len(marked[path].spans)
    return marked


def _of_sound_files(
    marked: Mapping[str, MarkedFile], seen: Mapping[int, Observed], sound: Collection[str]
) -> dict[str, dict[Span, Observed]]:
    """The observed values, by path and span. A file that other code opened, too, belongs to no expression."""
    places = dict(enumerate((path, span) for path, file in marked.items() for span in file.spans))
    others = {
        name
        for number, (path, _) in places.items()
        if path not in sound and number in seen
        for name in seen[number].files
    }
    found: dict[str, dict[Span, Observed]] = defaultdict(dict)
    for number, (path, span) in places.items():
        if path in sound and number in seen:
            own = tuple(name for name in seen[number].files if name not in others)
            found[path][span] = replace(seen[number], files=own)
    return dict(found)


def recorder(workdir: str) -> str:
    """The recorder as one file: its joined modules, without the lines with which they import each other."""
    texts = [_BETWEEN_MODULES.sub("", (RECORDER / f"{name}.py").read_text("utf-8")) for name in MODULES]
    return f"{''.join(texts)}\ninstall()\ninstall_meeting()\n".replace(
        repr(WORKDIR)[1:-1], f"{workdir.rstrip('/')}/"
    )


@dataclass(slots=True)
class _Notes:
    """The reports of all processes."""

    of_expression: dict[int, dict[bytes, _Said]] = field(default_factory=lambda: defaultdict(dict))
    opened: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))  # processes by file
    # Processes by file, for files that only marked expressions opened there.
    own: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))

    def enter(self, line: bytes) -> None:
        match line.split(b" ", 3 if line.startswith(b"observed") else 2):
            case [b"observed", process, number, said]:
                if int(number) < MOST_EXPRESSIONS:
                    self.of_expression[int(number)][process] = msgspec.json.decode(said, type=_Said)
            case [b"opened", process, path]:
                self.opened[msgspec.json.decode(path, type=str)].add(process)
            case [b"own", process, path]:
                self.own[msgspec.json.decode(path, type=str)].add(process)
            case _:
                pass


def read_notes(notes: bytes, workdir: str) -> dict[int, Observed]:
    """The observed values of each expression by number. Lines in another format are ignored, because any process may write them."""
    found = _Notes()
    for line in notes.split(b"\n"):
        try:
            found.enter(line)
        except (ValueError, msgspec.DecodeError):
            continue
    own = frozenset(path for path, processes in found.opened.items() if processes == found.own.get(path))
    return {
        number: _merged(list(said.values()), own, f"{workdir.rstrip('/')}/")
        for number, said in found.of_expression.items()
        if any(one.types or one.files for one in said.values())
    }


def _merged(said: Sequence[_Said], own: frozenset[str], workdir: str) -> Observed:
    """The combined report of several processes."""
    lows = [one.low for one in said if one.low is not None]
    highs = [one.high for one in said if one.high is not None]
    are_numbers = len(lows) == len(highs) == len(said)
    files = {path for one in said for path in one.files if path in own and path.startswith(workdir)}
    return Observed(
        near=tuple(text for text in _in_all([one.near for one in said]) if _is_expression(text)),
        low=min(lows) if are_numbers else None,
        high=max(highs) if are_numbers else None,
        types=tuple(_in_all([one.types for one in said])),
        num_values=len({value for one in said for value in one.values}),
        files=tuple(sorted(path.removeprefix(workdir) for path in files)),
    )


def _in_all(lists: Sequence[Sequence[str]]) -> Iterable[str]:
    return [text for text in lists[0] if all(text in other for other in lists)]


def _is_expression(text: str) -> bool:
    is_short = (
        len(text) <= LONGEST_CHARS and text.count(ORIGINAL) <= 1 and "\n" not in text and "\r" not in text
    )
    return (
        is_short and bool(text.strip()) and parse_expression(text.replace(ORIGINAL, "original")) is not None
    )
