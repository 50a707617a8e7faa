"""Finds which functions of a test file are tests, and which functions of the file each of them reaches.

Calls are followed by name only. Too many results are better than too few, because a trial run shows whether a test depends on an
expectation.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign

# Methods and functions that runners call around each test.
_AROUND = {
    "asyncSetUp",
    "asyncTearDown",
    "setUp",
    "setUpClass",
    "setUpTestData",
    "setup",
    "setup_class",
    "setup_method",
    "tearDown",
    "tearDownClass",
    "teardown",
    "teardown_class",
    "teardown_method",
}
_AROUND_MODULE = {
    "setUpModule",
    "setup_function",
    "setup_module",
    "tearDownModule",
    "teardown_function",
    "teardown_module",
}


@dataclass
class _Class:
    bases: list[str]
    members: dict[str, list[Definition]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class _References:
    """The names that a definition uses, and the attributes that it uses: of its own object, through `super()`, and of anything."""

    names: frozenset[str]
    own: frozenset[str]
    inherited: frozenset[str]
    attributes: frozenset[str]


def functions_of_tests(tree: ast.Module) -> list[tuple[Definition, tuple[str, ...]]]:
    """Each function that is a test of the file or that one reaches, with the qualified names of those tests."""
    definitions = _Definitions()
    definitions.visit_body(tree.body, None)
    tests: dict[int, set[str]] = defaultdict(set)
    found: dict[int, Definition] = {}
    for test, owner, start in definitions.tests():
        for definition in definitions.reached(owner, start):
            found[id(definition)] = definition
            tests[id(definition)].add(test)
    order = sorted(found.values(), key=lambda definition: definition.lineno)
    return [(definition, tuple(sorted(tests[id(definition)]))) for definition in order]


class _Definitions:
    """The functions, classes and assignments of a file by name, and the names that each uses."""

    def __init__(self) -> None:
        self._functions: dict[str, list[Definition]] = defaultdict(list)
        self._classes: dict[str, _Class] = {}
        self._references: dict[int, _References] = {}

    def visit_body(self, body: list[ast.stmt], owner: str | None) -> None:
        members = self._functions if owner is None else self._classes[owner].members
        for statement in body:
            match statement:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    members[statement.name].append(statement)
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    members[name].append(statement)
                case ast.ClassDef():
                    name = statement.name if owner is None else f"{owner}::{statement.name}"
                    bases = [base.id if isinstance(base, ast.Name) else "" for base in statement.bases]
                    self._classes[name] = _Class(bases)
                    self.visit_body(statement.body, name)
                case _:
                    for block in blocks(statement):
                        self.visit_body(block, owner)

    def tests(self) -> Iterator[tuple[str, str | None, list[tuple[str | None, Definition]]]]:
        """The name of each test, its class and the definitions with which its run starts."""
        around_all = [
            (None, definition) for name in _AROUND_MODULE for definition in self._functions.get(name, [])
        ]
        around_all += self._automatic(None)
        for name, definitions in self._functions.items():
            if name.startswith("test"):
                yield name, None, around_all + [(None, definition) for definition in definitions]
        for owner in self._classes:
            around = around_all + self._automatic(owner)
            for name in _AROUND:
                around += self._members(owner, name)
            names = dict.fromkeys(name for base in self._line(owner) for name in self._classes[base].members)
            for name in names:
                if name.startswith("test") or name == "runTest":
                    yield f"{owner}::{name}", owner, around + self._members(owner, name)

    def reached(self, owner: str | None, start: list[tuple[str | None, Definition]]) -> list[Definition]:
        """The definitions that a test of the class `owner` reaches from the definitions `start`, which are included."""
        seen: dict[tuple[str | None, int], Definition] = {}
        waiting = list(start)
        while waiting:
            place, definition = waiting.pop()
            if (place, id(definition)) in seen:
                continue
            seen[place, id(definition)] = definition
            waiting += self._used(place or owner, definition)
        return list(seen.values())

    def _used(self, owner: str | None, definition: Definition) -> Iterator[tuple[str | None, Definition]]:
        used = self._referenced(definition)
        for name in sorted(used.names):
            yield from ((None, function) for function in self._functions.get(name, []))
            for kind in self._classes:
                if kind.rpartition("::")[2] == name:
                    yield from self._of_object(kind, used)
        if owner is not None:
            for name in sorted(used.own | used.names):
                yield from self._members(owner, name)
            for base in self._line(owner):
                for name in used.inherited:
                    yield from (
                        (owner, definition) for definition in self._classes[base].members.get(name, [])
                    )

    def _of_object(self, kind: str, used: _References) -> Iterator[tuple[str | None, Definition]]:
        """The members of a class that may run when an object of it is made."""
        for base in self._line(kind):
            for name, definitions in self._classes[base].members.items():
                if name in used.attributes or (name.startswith("__") and name.endswith("__")):
                    yield from ((kind, definition) for definition in definitions)

    def _members(self, owner: str, name: str) -> list[tuple[str | None, Definition]]:
        """The definitions of `name` for an object of the class `owner`: its own, else those that it inherits."""
        for base in self._line(owner):
            if name in self._classes[base].members:
                return [(owner, definition) for definition in self._classes[base].members[name]]
        return []

    def _line(self, owner: str) -> list[str]:
        """The class and its bases in the file, approximately in the order in which members are looked up."""
        line: dict[str, None] = {}
        waiting = [owner]
        while waiting:
            name = waiting.pop(0)
            if name in line:
                continue
            line[name] = None
            scope = name.rpartition("::")[0]
            known = [
                base if base in self._classes else f"{scope}::{base}" for base in self._classes[name].bases
            ]
            waiting = [base for base in known if base in self._classes] + waiting
        return list(line)

    def _automatic(self, owner: str | None) -> list[tuple[str | None, Definition]]:
        """Fixtures that are used without being named."""
        members = self._functions if owner is None else self._classes[owner].members
        return [
            (owner, definition)
            for definitions in members.values()
            for definition in definitions
            if not isinstance(definition, ast.Assign | ast.AnnAssign)
            and any("autouse" in ast.unparse(decorator) for decorator in definition.decorator_list)
        ]

    def _referenced(self, definition: Definition) -> _References:
        if id(definition) not in self._references:
            self._references[id(definition)] = _references(definition)
        return self._references[id(definition)]


def blocks(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks of statements inside a statement."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list):
            yield block
    for name in ("handlers", "cases"):
        for part in getattr(statement, name, []):
            yield from blocks(part)


def _references(definition: Definition) -> _References:
    names: set[str] = set()
    own: set[str] = set()
    inherited: set[str] = set()
    attributes: set[str] = set()
    for node in ast.walk(definition):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.arg(arg=name):
                names.add(name)
            case ast.Attribute(value=value, attr=attribute):
                attributes.add(attribute)
                match value:
                    case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="type")):
                        own.add(attribute)
                    case ast.Call(func=ast.Name(id="super")):
                        inherited.add(attribute)
                    case _:
                        pass
            case ast.Call(func=ast.Attribute(attr="usefixtures"), args=arguments):
                names |= {
                    text.value
                    for text in arguments
                    if isinstance(text, ast.Constant) and isinstance(text.value, str)
                }
            case _:
                pass
    return _References(frozenset(names), frozenset(own), frozenset(inherited), frozenset(attributes))
