"""Follows a value that is written in a test file: finds what compares it, and whether anything else receives it.

A value may be contradicted where it is made only if only checks and messages receive it: passed to the code under test, it would
change what is tested. The value is followed through names, tables, loops, fixtures, attributes, cases of
parametrized tests, and functions of the file. A part of a collection is followed by its path, so that the other parts may be
given to the code.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from workers.grading.controls.scopes import (
    METHODS_THAT_ADD,
    METHODS_THAT_CHANGE,
    METHODS_THAT_MAKE,
    Names,
    all_arguments,
    decorator_name,
    fields_of_rows,
    is_fixture,
    name_of_call,
    role_of,
)
from workers.grading.controls.spans import Site

# The way to a part of a collection: `("at", 1)`, `("key", "a")` for a value of a dictionary, `("key",)` if its key is not
# written down, `("keys",)` for any of its keys, `("any",)` for any element, `("field", "name", 1)` for a row with names.
Selector: TypeAlias = tuple[object, ...]
Path: TypeAlias = tuple[Selector, ...]

ANY: Selector = ("any",)
# Functions that iterate over a collection; for a dictionary, they get the keys.
_ITERATING = ("enumerate", "frozenset", "iter", "list", "reversed", "set", "sorted", "tuple")
_MOST_STEPS = 500  # limit for one value
_MOST_STEPS_OF_ALL = 1_000_000
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Case:
    """Case `number` of a decorator `parametrize`, or of the `params` of a fixture."""

    call: ast.Call
    number: int
    owner: ast.AST  # the function or class that is decorated
    part: int  # index of the parameter to which the value belongs
    parameter: str
    is_value: bool  # the parameter is the value itself, not a collection that holds it


@dataclass(frozen=True, slots=True)
class _Step:
    """A node whose value is the followed one, or contains it at `path`."""

    node: ast.AST
    path: Path = ()
    is_whole: bool = True  # whether it is the value itself, or a collection that holds it
    is_made: bool = False  # whether it was passed to a call that may construct a class of the code under test


@dataclass(slots=True)
class Flow:
    """The comparisons and functions that a value reaches."""

    is_safe: bool = True  # whether only checks and messages receive it
    sites: dict[int, Site] = field(default_factory=dict[int, Site])
    # The sites whose operand is the value, or a collection that holds it.
    whole: set[int] = field(default_factory=set[int])
    # The sites whose operand is the value itself, not a collection that holds it.
    same: set[int] = field(default_factory=set[int])
    cases: list[Case] = field(default_factory=list[Case])
    # Ids of the functions in which it is checked or put into a message.
    ends: set[int] = field(default_factory=set[int])
    # Ids of the functions that get it in another way than from their callers.
    readers: set[int] = field(default_factory=set[int])
    # Whether it is a collection to which elements are added, or a number that is counted up
    is_changed: bool = False


class Flows:
    """Follows the values of one file."""

    def __init__(self, names: Names, sites: Mapping[int, Sequence[Site]]) -> None:
        self._names = names
        self._sites = sites  # keys are ids of the operands' nodes
        self._fields = fields_of_rows(names)
        self._num_steps = 0
        self._known_to_tests_only: dict[int, bool] = {}

    def of(self, node: ast.expr) -> Flow:
        """Follows the value of an expression."""
        flow = Flow(is_safe=self._num_steps < _MOST_STEPS_OF_ALL)
        waiting = [_Step(node)]
        seen: set[tuple[int, Path]] = set()
        while waiting and flow.is_safe:
            step = waiting.pop()
            if (id(step.node), step.path) in seen:
                continue
            seen.add((id(step.node), step.path))
            is_read = _is_read(step.node) and step.is_whole and not step.is_made
            sites = [one for one in self._sites.get(id(step.node), ()) if one.is_expected or is_read]
            for site in sites:
                flow.sites[id(site)] = site
                if step.is_whole and not step.is_made:
                    flow.whole.add(id(site))
                    if not step.path:
                        flow.same.add(id(site))
            following = self._next(step, flow) if id(step.node) not in self._sites else []
            flow.is_safe &= following is not None and len(seen) < _MOST_STEPS
            waiting += following or ()
            if not following:
                flow.ends.add(id(self._names.function_around(step.node)))
        self._num_steps += len(seen)
        return flow

    def _next(self, step: _Step, flow: Flow) -> list[_Step] | None:
        """Returns the nodes that receive the value next; None if it may go anywhere."""
        parent = self._names.parent(step.node)
        match parent:
            case ast.Expr() | ast.Assert() | ast.Delete():
                return []
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr():
                return self._assigned(parent, step, flow)
            case ast.For(iter=source, target=target) | ast.AsyncFor(iter=source, target=target):
                return self._iterated(step, target, flow) if step.node is source else None
            case ast.comprehension(iter=source, target=target):
                return self._iterated(step, target, flow) if step.node is source else None
            case ast.Return() | ast.Yield():
                return self._read_by(self._returned(parent, step), flow)
            case ast.arguments():
                return self._default(parent, step)
            case ast.withitem(optional_vars=None):
                return []
            case ast.expr() | ast.keyword():
                return self._in_expression(parent, step, flow)
            case _:
                return None

    def _read_by(self, steps: list[_Step] | None, flow: Flow) -> list[_Step] | None:
        flow.readers.update(id(self._names.function_around(step.node)) for step in steps or ())
        return steps

    def _in_expression(self, parent: ast.expr | ast.keyword, step: _Step, flow: Flow) -> list[_Step] | None:
        match parent:
            case (
                ast.List()
                | ast.Tuple()
                | ast.Set()
                | ast.Starred()
                | ast.Dict()
                | ast.ListComp()
                | ast.SetComp()
            ):
                return self._collected(parent, step)
            case ast.GeneratorExp() | ast.DictComp():
                return self._collected(parent, step)
            case ast.Subscript(value=value):
                return self._selected(parent, step) if value is step.node else None
            case ast.Attribute():
                return self._attribute(parent, step, flow)
            case ast.Call() | ast.keyword():
                return self._called(parent, step, flow)
            case ast.IfExp(test=test):
                return (
                    None if test is step.node else [self._moved(parent, step, step.path, whole=step.is_whole)]
                )
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                return []
            case ast.BinOp() if self._is_mixed(parent, step.node):
                return None
            case ast.BinOp():
                path = (ANY, *step.path[1:]) if step.path else ()
                return [self._moved(parent, step, path, whole=bool(step.path))]
            case ast.Compare() | ast.UnaryOp() | ast.BoolOp() | ast.JoinedStr() | ast.FormattedValue():
                return [self._moved(parent, step, ())]
            case _:
                return None

    def _moved(self, node: ast.AST, step: _Step, path: Path, *, whole: bool = False) -> _Step:
        return _Step(node, path, whole and step.is_whole, step.is_made)

    def _collected(self, parent: ast.expr, step: _Step) -> list[_Step] | None:
        path = step.path
        match parent:
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                place = [element is step.node for element in elements].index(True)
                is_after_star = any(isinstance(element, ast.Starred) for element in elements[: place + 1])
                rest = path[1:] if isinstance(step.node, ast.Starred) else path
                path = (ANY if is_after_star else ("at", place), *rest)
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if value is step.node and (written := _written(key)) is not None:
                        path = (("key", written), *step.path)
                    elif value is step.node and key is not None:
                        path = (("key",), *step.path)
                    elif key is step.node:
                        path = (("keys",), *step.path)
            case ast.Set():
                path = (ANY, *path)
            case ast.DictComp(key=key):
                path = (("keys",) if key is step.node else ("key",), *path)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                path = (ANY, *path)
            case _:
                pass
        return [self._moved(parent, step, path, whole=True)]

    def _selected(self, parent: ast.Subscript, step: _Step) -> list[_Step] | None:
        if step.is_made and not step.path:
            return None
        if isinstance(parent.ctx, ast.Store | ast.Del):
            return []
        if not step.path:
            return [self._moved(parent, step, ())]
        match parent.slice:
            case ast.Slice() as part:
                selector = _sliced(step.path[0], part)
                return (
                    []
                    if selector is None
                    else [self._moved(parent, step, (selector, *step.path[1:]), whole=True)]
                )
            case key if (written := _written(key)) is not None:
                return self._by_key(parent, step, written)
            case _ if step.path[0] == ("keys",):
                return []
            case _:
                return [self._moved(parent, step, step.path[1:], whole=True)]

    def _by_key(self, parent: ast.expr, step: _Step, key: object) -> list[_Step]:
        match step.path[0]:
            case ("at" | "key", other) if other != key:
                return []
            case ("field", _, int(place)) if place != key:
                return []
            case ("keys",):
                return []
            case _:
                return [self._moved(parent, step, step.path[1:], whole=True)]

    def _attribute(self, parent: ast.Attribute, step: _Step, flow: Flow) -> list[_Step] | None:
        call = self._names.parent(parent)
        if isinstance(call, ast.Call) and call.func is parent:
            return self._method(call, parent.attr, step, flow)
        match step.path[:1]:
            case (("field", name, _),):
                return [self._moved(parent, step, step.path[1:], whole=True)] if name == parent.attr else []
            case ():
                return None if step.is_made else [self._moved(parent, step, ())]
            case _:
                return None

    def _method(self, call: ast.Call, name: str, step: _Step, flow: Flow) -> list[_Step] | None:
        if name in METHODS_THAT_CHANGE and step.is_whole and not step.is_made:
            flow.is_changed = True
            return [self._moved(call, step, step.path[1:], whole=True)] if name.startswith("pop") else []
        match name, step.path:
            case "items", (("keys",), *rest):
                return [self._moved(call, step, (ANY, ("at", 0), *rest), whole=True)]
            case "items", (_, *rest):
                return [self._moved(call, step, (ANY, ("at", 1), *rest), whole=True)]
            case "keys", (first, *rest):
                return [self._moved(call, step, (ANY, *rest), whole=True)] if first == ("keys",) else []
            case "values", (first, *rest):
                return [] if first == ("keys",) else [self._moved(call, step, (ANY, *rest), whole=True)]
            case "get", (_, *_) if call.args and isinstance(call.args[0], ast.Constant):
                return self._by_key(call, step, call.args[0].value)
            case (("get" | "__getitem__"), (_, *rest)):
                return [self._moved(call, step, tuple(rest), whole=True)]
            case "copy", _:
                return [self._moved(call, step, step.path, whole=True)]
            case _ if name in METHODS_THAT_MAKE and not step.is_made:
                return [self._moved(call, step, ())]
            case _:
                return None

    def _called(self, parent: ast.Call | ast.keyword, step: _Step, flow: Flow) -> list[_Step] | None:
        keyword = parent.arg if isinstance(parent, ast.keyword) else None
        call = self._names.parent(parent) if isinstance(parent, ast.keyword) else parent
        if not isinstance(call, ast.Call) or call.func is step.node:
            return None
        place = next((number for number, one in enumerate(call.args) if one is step.node), None)
        functions = self._functions_called(call)
        if functions:
            return self._into_functions(call, functions, place, parent, step)
        if name_of_call(call) == "fixture" and call in getattr(
            self._names.parent(call), "decorator_list", ()
        ):
            return self._into_params(call, keyword, step, flow)
        fields = self._fields.get(name_of_call(call))
        if fields is not None:
            return self._into_row(call, fields, place, keyword, step)
        match role_of(call, self._names):
            case "checker" | "said":
                return []
            case "raiser":
                is_expected = place == 0 or keyword in (
                    "match",
                    "msg",
                    "expected_exception",
                    "expected_warning",
                )
                return [] if is_expected or (place == 1 and len(call.args) == 2) else None
            case "case":
                return (
                    []
                    if place is None
                    else [self._moved(call, step, (("case", place), *step.path), whole=True)]
                )
            case "cases":
                return self._into_cases(call, place, keyword, step, flow)
            case "keeps" | "parts" | "makes" as role:
                return self._made(call, role, place, keyword, step)
            case "object":
                return [_Step(call, (), False, is_made=True)]
            case _ if any(
                isinstance(one, ast.Assert) and one.msg is not None and inner is one.msg
                for inner, one in self._pairs_around(call)
            ):
                return []
            case _:
                return self._added(call, step)

    def _pairs_around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        for parent in self._names.around(node):
            yield node, parent
            node = parent

    def _added(self, call: ast.Call, step: _Step) -> list[_Step] | None:
        """Follows a value that a method adds to a named collection: returns the reads of the collection; None if it is not added."""
        match call.func:
            case ast.Attribute(value=ast.Name() as receiver, attr=name) if name in METHODS_THAT_ADD:
                rest = step.path if name in ("append", "add", "appendleft", "insert") else step.path[1:]
                steps = [
                    read
                    for binding in self._names.bindings_of(receiver)
                    if isinstance(binding, ast.Name)
                    for read in self._bound(binding, _Step(call, (ANY, *rest), True, step.is_made), None)
                    or ()
                ]
                return [one for one in steps if one.node is not receiver]
            case _:
                return None

    def _made(
        self, call: ast.Call, role: str, place: int | None, keyword: str | None, step: _Step
    ) -> list[_Step] | None:
        name, path = name_of_call(call), step.path
        if name in ("isinstance", "issubclass", "callable"):
            return []  # the changed value has the same type
        if _is_value_of_dict(path) and name in _ITERATING:
            return []
        if name == "len" and path and path[0][0] in ("at", "key", "field"):
            return []  # the changed collection has as many elements
        if self._is_mixed(call, step.node):
            return None
        if name == "enumerate" and place == 0 and path:
            return [self._moved(call, step, (ANY, ("at", 1), *path[1:]), whole=True)]
        if name == "zip" and place is not None and path:
            return [self._moved(call, step, (ANY, ("at", place), *path[1:]), whole=True)]
        if keyword is not None and name in ("dict", "OrderedDict", "SimpleNamespace"):
            first: Selector = ("field", keyword, None) if name == "SimpleNamespace" else ("key", keyword)
            return [self._moved(call, step, (first, *path), whole=True)]
        if role == "keeps" and place == 0:
            return [self._moved(call, step, path, whole=True)]
        if role == "parts" and path:
            return [self._moved(call, step, (ANY, *path[1:]), whole=True)]
        return [self._moved(call, step, ())]

    def _is_mixed(self, parent: ast.AST, node: ast.AST) -> bool:
        """Whether the value is combined with results of the code under test, or passed to it, for example to a key function."""
        others = [one for one in ast.iter_child_nodes(parent) if one is not node]
        if isinstance(parent, ast.Call):
            others = [one for one in others if one is not parent.func and getattr(one, "arg", "") != "dtype"]
            others = [one.value if isinstance(one, ast.keyword) else one for one in others]
            if any(self._is_foreign(one) for one in others):
                return True
        calls = [one for other in others for one in ast.walk(other) if isinstance(one, ast.Call)]
        return any(
            role_of(one, self._names) == "unknown" and not self._functions_called(one) for one in calls
        )

    def _is_foreign(self, node: ast.AST) -> bool:
        """Whether an argument may be a function of the code under test."""
        match node:
            case ast.Lambda():
                return True
            case ast.Name():
                return any(
                    isinstance(one, ast.alias | ast.FunctionDef) for one in self._names.bindings_of(node)
                )
            case ast.Attribute(value=ast.Name() as value):
                return any(isinstance(one, ast.alias) for one in self._names.bindings_of(value))
            case _:
                return False

    def _into_row(
        self, call: ast.Call, fields: Sequence[str], place: int | None, keyword: str | None, step: _Step
    ) -> list[_Step] | None:
        if place is not None and place < len(fields) and not isinstance(step.node, ast.Starred):
            return [self._moved(call, step, (("field", fields[place], place), *step.path), whole=True)]
        if keyword in fields:
            selector = ("field", keyword, fields.index(keyword))
            return [self._moved(call, step, (selector, *step.path), whole=True)]
        return None

    def _into_cases(
        self, call: ast.Call, place: int | None, keyword: str | None, step: _Step, flow: Flow
    ) -> list[_Step] | None:
        """Follows a value among the cases of a parametrized test."""
        if keyword in ("ids", "argnames") or place == 0:
            return []
        if _is_value_of_dict(step.path) and (keyword == "argvalues" or place == 1):
            return []
        names = parameter_names(call)
        owner = self._names.parent(call)
        is_indirect = any(one.arg == "indirect" for one in call.keywords)
        if not names or is_indirect or not isinstance(owner, _FUNCTIONS | ast.ClassDef):
            return None
        match step.path:
            case (("at", int(number)), ("case", int(part)), *rest) if part < len(names):
                pass
            case (("at", int(number)), *rest) if len(names) == 1:
                part = 0
            case (("at", int(number)), ("at", int(part)) | ("field", _, int(part)), *rest) if part < len(
                names
            ):
                pass
            case _:
                return None
        flow.cases.append(Case(call, number, owner, part, names[part], is_value=not rest and step.is_whole))
        functions = [owner] if isinstance(owner, _FUNCTIONS) else _methods(owner)
        functions += [one for some in self._names.functions.values() for one in some if is_fixture(one)]
        return self._parameters(functions, names[part], self._moved(call, step, tuple(rest), whole=True))

    def _into_params(
        self, call: ast.Call, keyword: str | None, step: _Step, flow: Flow
    ) -> list[_Step] | None:
        """Follows a value among the `params` of a fixture, which reads it as `request.param`."""
        owner = self._names.parent(call)
        if _is_value_of_dict(step.path) and keyword == "params":
            return []
        match step.path:
            case (("at", int(number)), ("case", 0), *rest) if isinstance(owner, _FUNCTIONS):
                pass
            case (("at", int(number)), *rest) if isinstance(owner, _FUNCTIONS):
                pass
            case _:
                return None
        if keyword != "params":
            return None
        flow.cases.append(Case(call, number, owner, 0, owner.name, is_value=not rest and step.is_whole))
        steps = self._parameters([owner], "request", self._moved(call, step, tuple(rest), whole=True))
        reads = [(one, self._names.parent(one.node)) for one in steps]
        return [
            _Step(read, one.path, one.is_whole, one.is_made)
            for one, read in reads
            if isinstance(read, ast.Attribute) and read.attr == "param"
        ]

    def _parameters(self, functions: Sequence[ast.AST], name: str, step: _Step) -> list[_Step]:
        """The reads of the parameter `name` in these functions."""
        found: list[_Step] = []
        for function in functions:
            scope = self._names.scope_of(function)
            if scope is not None and any(isinstance(one, ast.arg) for one in scope.bindings.get(name, [])):
                found += [
                    _Step(read, step.path, step.is_whole, step.is_made) for read in scope.uses.get(name, [])
                ]
        return found

    def _functions_called(self, call: ast.Call) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        match call.func:
            case ast.Name():
                found = self._names.bindings_of(call.func)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                found = self._names.functions.get(name, [])
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in self._names.classes:
                found = self._names.functions.get(name, [])
            case _:
                return []
        return [one for one in found if isinstance(one, _FUNCTIONS)]

    def _into_functions(
        self,
        call: ast.Call,
        functions: Sequence[ast.FunctionDef | ast.AsyncFunctionDef],
        place: int | None,
        parent: ast.AST,
        step: _Step,
    ) -> list[_Step] | None:
        """Follows a value that is passed to functions of the file."""
        found: list[_Step] = []
        for function in functions:
            arguments = [*function.args.posonlyargs, *function.args.args]
            if isinstance(call.func, ast.Attribute) and arguments and arguments[0].arg in ("self", "cls"):
                arguments = arguments[1:]
            name, path = _parameter(call, function, arguments, place, parent, step)
            if name is None or function.args.vararg is not None:
                return None
            found += self._parameters([function], name, _Step(call, path, step.is_whole, step.is_made))
        return found

    def _assigned(
        self, parent: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr, step: _Step, flow: Flow
    ) -> list[_Step] | None:
        if parent.value is not step.node:
            return None
        targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
        if isinstance(parent, ast.AugAssign):
            step = _Step(step.node, (ANY, *step.path[1:]) if step.path else (), False, step.is_made)
        found = (
            []
            if not isinstance(parent, ast.NamedExpr)
            else [self._moved(parent, step, step.path, whole=True)]
        )
        for target in targets:
            steps = self._bound(target, step, flow)
            if steps is None:
                return None
            found += steps
        return found

    def _iterated(self, step: _Step, target: ast.expr, flow: Flow) -> list[_Step] | None:
        """Follows a value that is iterated over, into the loop's target."""
        if not step.path:
            return None if step.is_made else self._bound(target, _Step(target, (), False), flow)
        if _is_value_of_dict(step.path):
            return []
        return self._bound(target, _Step(target, step.path[1:], step.is_whole, step.is_made), flow)

    def _bound(self, target: ast.expr, step: _Step, flow: Flow | None) -> list[_Step] | None:
        """Returns the reads of the assigned target."""
        match target:
            case ast.Name(id=name):
                return self._name_bound(target, name, step, flow)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                if any(isinstance(element, ast.Starred) for element in elements):
                    return None
                path = step.path
                match path[:1]:
                    case (("at", int(place)),) | (("field", _, int(place)),):
                        elements = elements[place : place + 1]
                    case _:
                        pass
                parts = [
                    self._bound(
                        element, _Step(element, path[1:], step.is_whole and bool(path), step.is_made), flow
                    )
                    for element in elements
                ]
                return None if None in parts else [one for part in parts for one in part or ()]
            case ast.Attribute(value=value, attr=name) if (
                owner := self._names.class_meant(value)
            ) is not None:
                if not self._is_known_to_tests_only(owner):
                    return None
                reads = self._names.reads_of_attribute(owner, name)
                steps = [_Step(read, step.path, step.is_whole, step.is_made) for read in reads]
                return steps if flow is None else self._read_by(steps, flow)
            case _:
                return None

    def _name_bound(self, target: ast.Name, name: str, step: _Step, flow: Flow | None) -> list[_Step] | None:
        scope = self._names.scope_of(target)
        assert scope is not None
        if id(scope.node) in self._names.dynamic:
            return None
        reads: list[ast.expr] = [*scope.uses.get(name, [])]
        if isinstance(scope.node, ast.ClassDef):
            if not self._is_known_to_tests_only(scope.node):
                return None
            reads += self._names.reads_of_attribute(scope.node, name)
        for binding in scope.bindings[name]:
            if isinstance(self._names.parent(binding), ast.AugAssign) and flow is not None:
                flow.is_changed |= binding is not target
        steps = [_Step(read, step.path, step.is_whole, step.is_made) for read in reads]
        if flow is not None and isinstance(scope.node, ast.ClassDef | ast.Module):
            self._read_by(steps, flow)
        return steps

    def _is_known_to_tests_only(self, owner: ast.ClassDef) -> bool:
        """Whether only its methods and functions of the file can read the attributes of a class."""
        if id(owner) not in self._known_to_tests_only:
            given = [one for one in self._names.objects(owner) if not self._stays_in_file(one)]
            self._known_to_tests_only[id(owner)] = self._names.is_of_tests(owner) and not given
        return self._known_to_tests_only[id(owner)]

    def _stays_in_file(self, read: ast.Name) -> bool:
        match self._names.parent(read):
            case ast.Attribute(attr=name):
                return name != "__dict__"
            case ast.Call() as call if read in call.args and call.func is not read:
                is_known = bool(self._functions_called(call)) or name_of_call(call) in (
                    "isinstance",
                    "super",
                    "type",
                )
                return is_known or role_of(call, self._names) in ("checker", "said", "raiser")
            case _:
                return False

    def _default(self, parent: ast.arguments, step: _Step) -> list[_Step] | None:
        function = self._names.parent(parent)
        by_place = [*parent.posonlyargs, *parent.args]
        pairs = [
            *zip(reversed(by_place), reversed(parent.defaults), strict=False),
            *zip(parent.kwonlyargs, parent.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            if default is step.node and function is not None:
                return self._parameters([function], argument.arg, step)
        return None

    def _returned(self, parent: ast.Return | ast.Yield, step: _Step) -> list[_Step] | None:
        function = self._names.function_around(parent)
        if function is None or any(
            isinstance(one, ast.Lambda) for one in _between(self._names, parent, function)
        ):
            return None
        if is_fixture(function):
            functions = [
                one for some in self._names.functions.values() for one in some if one is not function
            ]
            users = [one for one in functions if not _is_parametrized_by(one, function.name)]
            return self._parameters(users, _fixture_name(function), step)
        scope = self._names.scope_of(function)
        if function.name.startswith("test") or scope is None or scope.parent is None:
            return None
        if isinstance(scope.parent.node, ast.ClassDef) and not self._names.is_of_tests(scope.parent.node):
            return None
        reads: list[ast.expr] = [
            *scope.parent.uses.get(function.name, []),
            *self._names.attributes[function.name],
        ]
        decorators = {decorator_name(one) for one in function.decorator_list}
        if decorators - {"property", "staticmethod", "classmethod", "cached_property"}:
            return None
        path = (ANY, *step.path) if isinstance(parent, ast.Yield) else step.path
        if decorators & {"property", "cached_property"}:
            return [_Step(read, path, step.is_whole, step.is_made) for read in reads]
        calls = [self._names.parent(read) for read in reads]
        if not all(
            isinstance(call, ast.Call) and call.func is read for call, read in zip(calls, reads, strict=True)
        ):
            return None
        return [_Step(call, path, step.is_whole, step.is_made) for call in calls if call is not None]


def parameter_names(call: ast.Call) -> list[str]:
    """The parameters to which a call of `parametrize` gives values; empty if they are not literal."""
    keywords = {one.arg: one.value for one in call.keywords}
    match call.args[0] if call.args else keywords.get("argnames"):
        case ast.Constant(value=str(text)):
            return [name.strip() for name in text.split(",") if name.strip()]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [str(one.value) if isinstance(one, ast.Constant) else "" for one in elements]
        case _:
            return []


def _parameter(
    call: ast.Call,
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    arguments: Sequence[ast.arg],
    place: int | None,
    parent: ast.AST,
    step: _Step,
) -> tuple[str | None, Path]:
    """The parameter of a function of the file that gets the value at `place` or by keyword, and the value's path in it."""
    path = step.path
    if isinstance(parent, ast.keyword):
        name = parent.arg
        if name is None:
            match path:
                case (("key", str(name)), *rest):
                    path = tuple(rest)
                case _:
                    return None, path
        known = {one.arg for one in all_arguments(function.args)}
        return name if name in known else None, path
    if place is None or any(isinstance(one, ast.Starred) for one in call.args[:place]):
        return None, path
    if isinstance(step.node, ast.Starred):
        match path:
            case (("at", int(number)), *rest):
                place, path = place + number, tuple(rest)
            case _:
                return None, path
    return arguments[place].arg if place < len(arguments) else None, path


def _written(key: ast.expr | None) -> object:
    """The value of a key that is a literal, or a tuple of literals; None for any other expression."""
    match key:
        case ast.Constant(value=value):
            return value
        case ast.Tuple(elts=elements) if all(isinstance(one, ast.Constant) for one in elements):
            return tuple(_written(one) for one in elements)
        case _:
            return None


def _is_value_of_dict(path: Path) -> bool:
    """Whether the value is a value of a dictionary, which iterating over the dictionary does not reach."""
    return bool(path) and path[0][0] == "key"


def _sliced(selector: Selector, part: ast.Slice) -> Selector | None:
    """The way to a part from a slice of its collection; None if the slice does not contain it."""
    match selector, part:
        case ("at", int(place)), ast.Slice(
            lower=None | ast.Constant() as lower, upper=None | ast.Constant() as upper, step=None
        ):
            start, end = (None if one is None else one.value for one in (lower, upper))
            if (isinstance(start, int) and place < start) or (isinstance(end, int) and place >= end):
                return None
            return ("at", place - start) if isinstance(start, int) else selector if start is None else ANY
        case _:
            return ANY


def _is_read(node: ast.AST) -> bool:
    """Whether an expression is a name, a part of a value, or a literal. Other expressions may compute with results of the code."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name | ast.Constant)


def _methods(owner: ast.ClassDef) -> list[ast.AST]:
    return [one for one in owner.body if isinstance(one, _FUNCTIONS)]


def _between(names: Names, node: ast.AST, end: ast.AST) -> Iterator[ast.AST]:
    for one in names.around(node):
        if one is end:
            return
        yield one


def _fixture_name(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    for decorator in function.decorator_list:
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
            if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                return str(keyword.value.value)
    return function.name


def _is_parametrized_by(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    return any(
        isinstance(one, ast.Call) and decorator_name(one) == "parametrize" and name in parameter_names(one)
        for one in function.decorator_list
    )
