"""Contradictions of the expectations of a Python test file, one expectation each.

Any code that passes the original must fail every edited file: only expected values are changed, never the code's inputs. A value is
contradicted where it is made, by another of the same type, so that code which reads it there, or accepts anything of that type, is exposed.
Trial runs with the known fix show whether a test depends on an edit, so too many candidates are better than too few.

The candidates are literals in the file that may be expected values.
"""

import ast
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from pipeline.task import ContradictionKind
from workers.grading.controls.carrying import SILENT, Carriers, CaseNames, Saying, saying
from workers.grading.controls.conditions import name_of_call
from workers.grading.controls.expecting import expectations
from workers.grading.controls.flowing import Case, Flow, Flows
from workers.grading.controls.reaching import functions_of_tests
from workers.grading.controls.scopes import Names
from workers.grading.controls.spans import (
    Candidate,
    Cover,
    Edit,
    Expectation,
    Site,
    Span,
    TestFile,
    changed_span,
    parse_expression,
    read,
)
from workers.grading.controls.values import Observed, Values, has_literal, number_of

_READING_ALL = ("dir", "eval", "exec", "locals", "vars")  # functions that get a variable without its name
_EMPTY = ("dict", "frozenset", "list", "set", "tuple")


def written(tree: ast.Module, names: Names) -> Iterator[ast.expr]:
    """The literals, the empty collections and those without any literal, and the names of classes."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.JoinedStr():
                yield node
                continue  # Python 3.11 reports wrong positions for the nodes inside
            case ast.Constant(value=value) if value is not Ellipsis:
                yield node
            case ast.List(ctx=ast.Load()) | ast.Tuple(ctx=ast.Load()) | ast.Dict() | ast.Set():
                if not _has_literal_inside(node):
                    yield node
            case ast.Call(func=ast.Name(id=name) as function, args=[], keywords=[]) if name in _EMPTY:
                if not names.bindings_of(function):
                    yield node
            case ast.Name(id=name, ctx=ast.Load()) if name[:1].isupper() or name in (
                "int",
                "str",
                "float",
                "list",
                "dict",
            ):
                yield node
            case ast.Attribute(attr=name, ctx=ast.Load()) if name[:1].isupper():
                yield node
            case ast.AnnAssign(value=value, target=target):  # an annotation is not a value
                waiting += [target] if value is None else [target, value]
                continue
            case ast.arg():
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                waiting += [node.args, *node.body, *node.decorator_list]
                continue
            case _:
                pass
        waiting += ast.iter_child_nodes(node)


def followed(leaf: ast.expr, names: Names) -> ast.expr:
    """The expression whose value the leaf is: for a number, including its sign."""
    parent = names.parent(leaf)
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.USub):
        return parent
    return leaf


def _has_literal_inside(node: ast.AST) -> bool:
    elements = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
    return any(has_literal(one) for one in elements)


MOST = 2000
_MOST_PER_PLACE = 20  # largest number of written values that are considered per comparison
_MOST_PER_TEST: Mapping[ContradictionKind, int] = {"value": 5, "opposite": 3, "nothing": 2}
_MOST_PER_CASE: Mapping[ContradictionKind, int] = {"value": 2, "opposite": 1, "nothing": 1}
_KINDS: tuple[ContradictionKind, ...] = ("value", "opposite", "nothing")
_UNSEEN = Observed()
# Modes whose expectation is a class, not a value.
_OF_CLASSES = ("error", "warning", "type")
_OF_VALUES = ("equal", "close", "item")


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A candidate whose edits do not yet include other places that mention the changed value."""

    root: ast.expr  # the outermost expression that contains the first edit
    edits: tuple[Edit, ...]
    kind: ContradictionKind
    tests: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    said: Saying = SILENT
    checked: tuple[ast.expr, ...] = ()  # where the expectation is checked, if that is outside `root`


def candidates(
    source: bytes,
    chance: random.Random,
    observed: Mapping[Span, Observed] | None = None,
    met: Iterable[Span] = (),
    modules: Collection[str] = (),
) -> list[Candidate]:
    """Contradictions of the expectations in a test file; none if it is not UTF-8 or not Python as we parse it.

    `observed` are the observed values of its expressions, by their spans in bytes. Expectations within `met`, which the code without the
    fix also satisfies, come last for each test. The text of `modules`, names by which the file calls them, is a part of `source`.
    """
    file = read(source)
    if file is not None and modules:
        _InOneFile(modules).visit(file.tree)
    return [] if file is None else _Writer(file, chance, observed or {}, Cover(met)).write()


class _InOneFile(ast.NodeTransformer):
    """Replaces `module.name` by `name` for modules whose text is in the same file."""

    def __init__(self, modules: Collection[str]) -> None:
        self._modules = modules

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        match node.value:
            case ast.Name(id=name) if name in self._modules and isinstance(node.ctx, ast.Load):
                return ast.copy_location(ast.Name(node.attr, node.ctx), node)
            case _:
                self.generic_visit(node)
                return node


# Calls that read a file, or parse what was read, and that do not involve the code under test.
_READING = {"open", "read", "read_bytes", "read_text", "readlines"}
_TAKING_APART = {
    "decode",
    "joinpath",
    "list",
    "lstrip",
    "rstrip",
    "set",
    "split",
    "splitlines",
    "str",
    "strip",
    "with_name",
    "Path",
}


def _only_reads(node: ast.expr) -> bool:
    names = {name_of_call(one) for one in ast.walk(node) if isinstance(one, ast.Call)}
    return bool(names & _READING) and names <= _READING | _TAKING_APART


@dataclass(frozen=True, slots=True)
class Observable:
    """The span of an expression whose value helps to contradict an expectation; `is_expected`: it makes the expected value."""

    span: Span
    is_expected: bool


def observable(source: bytes) -> list[Observable]:
    """The expressions of a test file whose values help, in order."""
    file = read(source)
    return [] if file is None else _Writer(file, random.Random(0), {}, Cover()).observable()


class _Writer:
    """Finds the expectations of one file, the expressions that make their values, and edits that contradict them."""

    def __init__(
        self, file: TestFile, chance: random.Random, observed: Mapping[Span, Observed], met: Cover
    ) -> None:
        self._file = file
        self._met = met
        self._chance = chance
        self._observed = observed
        self._names = Names(file.tree)
        self._values = Values(file, self._names, chance, met)
        self._case_names = CaseNames(self._names)
        self._reached = functions_of_tests(file.tree)
        self._tests = {id(definition): tests for definition, tests in self._reached}
        self._carriers = Carriers(file, self._names, self._reached)
        self._found = list(self._expectations())
        sites: dict[int, list[Site]] = defaultdict(list)
        self._tests_of_site: dict[int, tuple[str, ...]] = {}
        for expectation, tests in self._found:
            for site in expectation.sites:
                sites[id(site.operand)].append(site)
                self._tests_of_site[id(site)] = tests
        self._sites = sites
        self._flows = Flows(self._names, sites)

    def write(self) -> list[Candidate]:
        """Returns a bounded number of candidates; for each test, those come first that prove the most."""
        found, made = self._of_leaves()
        for expectation, tests in self._found:
            found += self._of_expectation(expectation, tests, made)
        finished = [self._finished(proposal) for proposal in self._selected(found)]
        return [one for one in finished if one is not None]

    def _of_leaves(self) -> tuple[list[_Proposal], set[int]]:
        """Returns contradictions of literal values, and the ids of the sites that compare these values."""
        made: set[int] = set()
        found: list[_Proposal] = []
        num_of: dict[tuple[int, ...], int] = defaultdict(int)
        leaves = list(written(self._file.tree, self._names))
        self._chance.shuffle(leaves)
        for leaf in leaves:
            flow = self._flows.of(followed(leaf, self._names))
            is_made_here = flow.is_safe and not (flow.is_changed and flow.same)
            alone = None if is_made_here else self._checked_alone(leaf)
            flow, others = alone or (flow, ())
            is_made_here |= alone is not None
            place = (
                *sorted(flow.sites),
                *(number for case in flow.cases for number in (id(case.call), case.number)),
            )
            if flow.sites and num_of[place] < _MOST_PER_PLACE:
                proposals = list(self._of_leaf(leaf, flow) if is_made_here else self._at_uses(leaf, flow))
                if proposals:
                    num_of[place] += 1
                    made.update(flow.sites)
                    found += [replace(one, edits=(*one.edits, *others)) for one in proposals]
        return found, made

    def observable(self) -> list[Observable]:
        """Expressions that are compared, or that make a compared value, and are not literals."""
        _, made = self._of_leaves()
        actual: list[ast.expr] = []
        expected: list[ast.expr] = []
        for expectation, _ in self._found:
            is_made = not made.isdisjoint(id(site) for site in expectation.sites)
            for site in expectation.sites:
                if site.mode in ("under", "over", "type") and site.actual is not None:
                    actual.append(site.actual)
                elif site.mode in (*_OF_VALUES, "identical") and site.is_expected and not is_made:
                    expected += [site.operand, *self._origins(site)]
                elif site.mode == "container" and _only_reads(site.operand):
                    expected.append(site.operand)
        spans = [self._spans(one) for one in (actual, expected)]
        return [Observable(span, span in spans[1]) for span in sorted(spans[0] | spans[1])]

    def _spans(self, expressions: Iterable[ast.expr]) -> set[tuple[int, int]]:
        return {
            self._span(one)
            for one in expressions
            if self._file.is_placed(one) and number_of(one) is None and not isinstance(one, ast.Starred)
        }

    def _expectations(self) -> Iterator[tuple[Expectation, tuple[str, ...]]]:
        seen: dict[int, None] = {}
        for definition, tests in self._reached:
            for expectation in expectations([definition], self._file, self._values):
                if id(expectation.root) not in seen or not expectation.sites:
                    yield expectation, tests
                seen[id(expectation.root)] = None

    def _of_leaf(self, leaf: ast.expr, flow: Flow) -> Iterator[_Proposal]:
        """Yields contradictions that change a value at the place where it is written."""
        site = min(flow.sites.values(), key=_rank)
        if site.mode in ("under", "over", "pattern", *_OF_CLASSES) and id(site) not in flow.same:
            return
        if site.mode == "close" and id(site) not in flow.whole:
            return
        if site.mode not in _OF_CLASSES and isinstance(leaf, ast.Name | ast.Attribute):
            return
        whole = followed(leaf, self._names) if site.mode in ("under", "over") else leaf
        becomes = self._values.changed(whole, site, self._seen(site.actual))
        if becomes is None:
            return
        kind: ContradictionKind = "opposite" if site.mode in _OF_CLASSES else "value"
        proposal = _Proposal(
            leaf,
            (self._file.replace(whole, becomes),),
            kind,
            (),
            said=_said(whole, becomes),
            checked=tuple(one.operand for one in flow.sites.values()),
        )
        if flow.cases:
            yield from self._of_cases(proposal, flow, leaf, becomes)
        else:
            yield from self._sound(replace(proposal, root=whole, tests=self._tests_of(leaf, flow)))

    def _of_cases(self, proposal: _Proposal, flow: Flow, leaf: ast.expr, becomes: str) -> Iterator[_Proposal]:
        """Yields contradictions of a value that belongs to one case of parametrized tests."""
        tests = {test for reader in flow.readers for test in self._tests.get(reader, ())}
        renamed: dict[str, str] = {}
        edits = list(proposal.edits)
        for case in flow.cases:
            given, edit = self._id_otherwise(case, proposal.said)
            edits += [edit] if edit is not None and edit not in edits else []
            for definition, test in self._tests_with(case):
                tests.discard(test)
                named = self._case_names.renamed(case, test, definition, leaf, becomes, given)
                if named is None:
                    return
                tests.update(named.tests)
                renamed.update(named.names)
        yield from self._sound(
            replace(proposal, edits=tuple(edits), tests=tuple(sorted(tests)), renamed=renamed)
        )

    def _tests_with(self, case: Case) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
        """The test functions that get a case, and their tests."""
        fixture = getattr(case.owner, "name", "")
        for definition, reaching in self._reached:
            if isinstance(definition, ast.Assign | ast.AnnAssign) or not definition.name.startswith("test"):
                continue
            is_owned = case.owner is definition or case.owner in self._names.around(definition)
            if is_owned or self._case_names.uses(definition, fixture):
                for test in reaching:
                    if test.rpartition("::")[2] == definition.name:
                        yield definition, test

    def _id_otherwise(self, case: Case, said: Saying) -> tuple[str | None, Edit | None]:
        """The id of a case after its written id no longer mentions the contradicted value, and the edit that writes it."""
        written_id = self._case_names.written_id(case)
        if written_id is None:
            return None, None
        becomes = said.in_text(said.in_name(str(written_id.value)))
        if becomes == written_id.value:
            return None, None
        return becomes, self._file.replace(written_id, repr(becomes))

    def _checked_alone(self, leaf: ast.expr) -> tuple[Flow, tuple[Edit, ...]] | None:
        """The flow of a local variable's value into the checks that compare it, and edits that write it wherever else the variable is read.

        So the checks get another value from the variable, and everything else gets the value that it had. None if that is not possible.
        """
        value = followed(leaf, self._names)
        statement, function = self._names.parent(value), self._names.function_around(leaf)
        match statement, leaf:
            case ast.Assign(targets=[ast.Name(id=name) as variable]), ast.Constant() if function is not None:
                nodes = list(ast.walk(function))
            case _:
                return None
        bound = {
            one: self._names.bindings_of(one)
            for one in nodes
            if isinstance(one, ast.Name) and one.id == name and one is not variable
        }
        reads = [one for one, bindings in bound.items() if variable in bindings]
        if any(len(bound[one]) > 1 for one in reads) or any(map(_reads_any, nodes)):
            return None
        sites = {
            id(site): site
            for one in reads
            for site in self._sites.get(id(one), ())
            if site.mode in _OF_VALUES
        }
        others = [one for one in reads if id(one) not in self._sites]
        text = self._file.text(value)
        if not sites or "\n" in text or not all(map(self._file.is_placed, reads)):
            return None
        flow = Flow(sites=sites, whole={*sites}, same={*sites}, ends={id(function)})
        return flow, tuple(self._file.replace(one, f"({text})") for one in others)

    def _at_uses(self, leaf: ast.expr, flow: Flow) -> Iterator[_Proposal]:
        """Yields contradictions at the comparisons of a value, for a value that is also passed to something else."""
        for site in flow.sites.values():
            if (
                id(site) not in flow.same
                or not isinstance(site.operand, ast.Name)
                or isinstance(leaf, ast.Name)
            ):
                continue
            becomes = (
                self._values.changed(leaf, site, self._seen(site.actual)) if site.mode in _OF_VALUES else None
            )
            sign = "-" if followed(leaf, self._names) is not leaf else ""
            if becomes is not None and "\n" not in becomes and not flow.is_changed:
                edit = self._file.replace(site.operand, f"{sign}{becomes}")
                yield from self._sound(
                    _Proposal(site.operand, (edit,), "value", self._tests_of_site[id(site)])
                )

    def _of_expectation(
        self, expectation: Expectation, tests: tuple[str, ...], made: set[int]
    ) -> Iterator[_Proposal]:
        """Yields contradictions of an expectation that has no literal value, and its opposite conditions."""
        has_value = not made.isdisjoint(id(site) for site in expectation.sites)
        for site in expectation.sites:
            if not has_value and site.is_expected:
                for candidate in self._of_value_seen(site, tests):
                    has_value = True
                    yield candidate
        if not has_value:
            for proposal in self._of_classes(expectation, tests):
                has_value = True
                yield proposal
        for edit in expectation.opposites:
            yield from self._sound(_Proposal(expectation.root, (edit,), "opposite", tests))
        for site in expectation.sites:
            if site.mode == "container":
                yield from self._other_container(site, tests)
        if not has_value and not expectation.opposites:
            for root, edit in self._last(expectation):
                is_text = any(site.mode == "pattern" for site in expectation.sites)
                kind: ContradictionKind = "value" if is_text else "nothing"
                yield from self._sound(_Proposal(root, (edit,), kind, tests, checked=(expectation.root,)))

    def _last(self, expectation: Expectation) -> Iterator[tuple[ast.expr, Edit]]:
        """Yields edits that insert a value equal to nothing where the expected value is made, or else where it is compared."""
        for site in expectation.sites:
            for origin in self._origins(site) if site.mode == "equal" and site.is_expected else ():
                yield origin, self._file.replace(origin, self._values.equal_to_nothing())
                return
        yield from ((expectation.root, edit) for edit in expectation.last)

    def _of_classes(self, expectation: Expectation, tests: tuple[str, ...]) -> Iterator[_Proposal]:
        """Yields contradictions that replace an expected class or pattern by another."""
        for site in expectation.sites:
            if site.mode in (*_OF_CLASSES, "pattern"):
                becomes = self._values.changed(site.operand, site, self._seen(site.actual))
                if becomes is not None:
                    edit = self._file.replace(site.operand, becomes)
                    yield from self._sound(_Proposal(site.operand, (edit,), "opposite", tests))

    def _of_value_seen(self, site: Site, tests: tuple[str, ...]) -> Iterator[_Proposal]:
        """Yields contradictions of a value that is not a literal, at the place where it is made, or else where it is compared."""
        for origin in (*self._origins(site), site.operand):
            seen = self._seen(origin)
            becomes = self._values.observed_otherwise(origin, site, seen, self._seen(site.actual))
            if becomes is not None and self._file.is_placed(origin):
                yield from self._sound(
                    _Proposal(
                        origin,
                        (self._file.replace(origin, becomes),),
                        "value",
                        tests,
                        checked=(site.operand,),
                    )
                )
                return

    def _origins(self, site: Site) -> Iterator[ast.expr]:
        """Yields the expressions that make the value of a name, if only checks use that value."""
        if isinstance(site.operand, ast.Name):
            for binding in self._names.bindings_of(site.operand):
                match self._names.parent(binding):
                    case ast.Assign(value=value) | ast.NamedExpr(value=value):
                        flow = self._flows.of(value)
                        if flow.is_safe and not flow.is_changed and id(site) in flow.same:
                            yield value
                    case _:
                        pass

    def _other_container(self, site: Site, tests: tuple[str, ...]) -> Iterator[_Proposal]:
        """Yields contradictions of a collection display in which every element becomes one that it does not have."""
        elements = site.operand.elts if isinstance(site.operand, ast.List | ast.Tuple | ast.Set) else []
        edits: list[Edit] = []
        for element in elements:
            becomes = self._values.changed(element, Site(element, "equal"), _UNSEEN)
            if becomes is None or _parsed_as(becomes) in map(ast.dump, elements):
                return
            edits.append(self._file.replace(element, becomes))
        if edits:
            yield from self._sound(_Proposal(site.operand, tuple(edits), "value", tests))

    def _tests_of(self, leaf: ast.expr, flow: Flow) -> tuple[str, ...]:
        """The tests whose outcome a value may change."""
        read = {test for reader in flow.readers for test in self._tests.get(reader, ())}
        for node in self._names.around(leaf):
            if id(node) in self._tests:
                tests = self._tests[id(node)]
                is_used = id(node) in flow.ends or not flow.readers
                return tests if is_used else tuple(test for test in tests if test in read)
        return tuple(sorted(read | {test for site in flow.sites for test in self._tests_of_site[site]}))

    def _sound(self, proposal: _Proposal) -> Iterator[_Proposal]:
        """Yields the proposal, if it concerns a test and its first edit changes the expression."""
        is_placed = bool(proposal.tests) and self._file.is_placed(proposal.root)
        if is_placed and self._file.stays_sound(proposal.root, proposal.edits[0]):
            yield proposal

    def _is_met(self, proposal: _Proposal) -> bool:
        edit = proposal.edits[0]
        was = self._file.source[edit.start : edit.end].decode()
        if self._met.has(changed_span(edit.start, was, edit.becomes)):
            return True
        return all(self._met.has(self._span(one)) for one in proposal.checked or (proposal.root,))

    def _finished(self, proposal: _Proposal) -> Candidate | None:
        """Returns the candidate with the edits of other places that mention its value; without them if the file would become invalid."""
        edits, renamed = list(proposal.edits), dict(proposal.renamed)
        more, names = self._carriers.renamed(proposal.said, proposal.tests)
        if not names or not renamed:
            renamed.update(names)
            more += self._carriers.edits(proposal.said, proposal.root, proposal.tests)
        for edit in more:
            if all(edit.end <= other.start or other.end <= edit.start for other in edits):
                edits.append(edit)
        operands = proposal.checked or (proposal.root,)
        checked = tuple(map(self._span, operands))
        sites = [site for one in operands for site in self._sites.get(id(one), ())]
        texts = tuple(self._span(site.text) for site in sites if site.text is not None)
        for some in (edits, list(proposal.edits)):
            if self._file.stays_parsed(some):
                names = renamed if some is edits else proposal.renamed
                return Candidate(proposal.tests, tuple(some), proposal.kind, names, checked, texts)
        return None

    def _seen(self, node: ast.expr | None) -> Observed:
        return _UNSEEN if node is None else self._observed.get(self._span(node), _UNSEEN)

    def _span(self, node: ast.expr) -> Span:
        return self._file.start(node), self._file.end(node)

    def _selected(self, found: list[_Proposal]) -> list[_Proposal]:
        """Selects a limited number of proposals for each test and kind; within a kind, those come first that code without the fix does
        not meet, and of these those of few tests.
        """
        self._chance.shuffle(found)
        found.sort(key=lambda one: (_KINDS.index(one.kind), self._is_met(one), len(one.tests)))
        num_of: dict[tuple[str, str], int] = defaultdict(int)
        selected: list[_Proposal] = []
        seen: set[tuple[Edit, ...]] = set()
        for one in found:
            most = _MOST_PER_CASE if "[" in one.tests[0] else _MOST_PER_TEST
            if one.edits in seen or all(num_of[test, one.kind] >= most[one.kind] for test in one.tests):
                continue
            seen.add(one.edits)
            selected.append(one)
            for test in one.tests:
                num_of[test, one.kind] += 1
        return selected[:MOST]


def _reads_any(node: ast.AST) -> bool:
    """Whether variables may be read here without their names, or by other functions."""
    return isinstance(node, ast.Global | ast.Nonlocal) or (
        isinstance(node, ast.Name) and node.id in _READING_ALL
    )


def _parsed_as(text: str) -> str:
    """The syntax tree of an expression, as a text that can be compared."""
    parsed = parse_expression(text)
    return "" if parsed is None else ast.dump(parsed)


def _said(leaf: ast.expr, becomes: str) -> Saying:
    """The forms in which a literal and its changed value appear in names and texts."""
    if not isinstance(leaf, ast.Constant):
        return SILENT
    try:
        return saying(leaf.value, ast.literal_eval(becomes.strip()))
    except (ValueError, SyntaxError):
        return SILENT


def _rank(site: Site) -> int:
    order = (
        "equal",
        "identical",
        "close",
        "item",
        "pattern",
        "error",
        "warning",
        "type",
        "under",
        "over",
        "container",
    )
    return order.index(site.mode)
