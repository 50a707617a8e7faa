"""The names and calls of a parsed test file, before any value is followed.

It finds where names are bound and used, and the nodes around each node; what a call does with its arguments: whether it checks them, keeps
them, makes another value from them, or is unknown; and the classes whose objects are rows of a table: named tuples and data classes.
"""

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_READING_ALL = ("eval", "exec", "globals", "locals", "vars")
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(eq=False)
class Scope:
    """The names that a module, class, function or comprehension binds, and the nodes that read them."""

    node: ast.AST
    parent: "Scope | None" = None
    bindings: dict[str, list[ast.AST]] = field(default_factory=lambda: defaultdict[str, list[ast.AST]](list))
    uses: dict[str, list[ast.Name]] = field(default_factory=lambda: defaultdict[str, list[ast.Name]](list))
    outer: set[str] = field(default_factory=set[str])  # names declared global or nonlocal


class Names:
    """Bindings, uses and parents of all nodes of one file."""

    def __init__(self, tree: ast.Module) -> None:
        self.module = Scope(tree)
        # Attributes of `self`, of `cls` or of a class of the file, by name.
        self.attributes: dict[str, list[ast.Attribute]] = defaultdict(list)
        self.functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = defaultdict(list)
        self.classes: dict[str, ast.ClassDef] = {}
        # Ids of functions, or of the module, whose names may be read without occurring in the source.
        self.dynamic: set[int] = set()
        self._parents: dict[int, ast.AST] = {}
        # Scopes by the id of a name, or of the function or class whose scope it is.
        self._scopes: dict[int, Scope] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self._parents[id(child)] = node
            if isinstance(node, _FUNCTIONS):
                self.functions[node.name].append(node)
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
        self._reads: list[ast.Name] = []
        self._visit(tree.body, self.module)
        for name in self._reads:
            if name.id in _READING_ALL and not self.bindings_of(name):
                self.dynamic.add(id(tree if name.id == "globals" else self.function_around(name)))
            if (scope := self._holding(name)) is not None:
                scope.uses[name.id].append(name)
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=value, ctx=ast.Load()) if self.class_meant(value) is not None:
                    self.attributes[node.attr].append(node)
                case _:
                    pass

    def scope_of(self, node: ast.AST) -> Scope | None:
        """The scope of a function or class, or the scope in which a name is written."""
        return self._scopes.get(id(node))

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(id(node))

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around the node, innermost first."""
        while (parent := self.parent(node)) is not None:
            yield parent
            node = parent

    def function_around(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        return next((one for one in self.around(node) if isinstance(one, _FUNCTIONS)), None)

    def is_bound(self, name: str) -> bool:
        """Whether the name may mean something other than the builtin."""
        return name in self.module.bindings or "*" in self.module.bindings

    def bindings_of(self, name: ast.Name) -> list[ast.AST]:
        """The nodes that may have bound the value of a name at this read; none if it is a builtin."""
        scope = self._holding(name)
        return scope.bindings[name.id] if scope is not None else []

    def class_meant(self, value: ast.expr) -> ast.ClassDef | None:
        """The class of the file that an expression is, or of which it is an object: `self`, `cls`, or the class by its name."""
        match value:
            case ast.Name(id=name) if name in self.classes:
                return self.classes[name]
            case ast.Name(id="self" | "cls"):
                return next((one for one in self.around(value) if isinstance(one, ast.ClassDef)), None)
            case (
                ast.Call(func=ast.Name(id="type"), args=[inner])
                | ast.Attribute(value=inner, attr="__class__")
            ):
                return self.class_meant(inner)
            case _:
                return None

    def reads_of_attribute(self, owner: ast.ClassDef, name: str) -> list[ast.Attribute]:
        """The reads in the file of an attribute of a class, of its bases, or of classes derived from it."""
        found: list[ast.Attribute] = []
        for read in self.attributes.get(name, []):
            other = self.class_meant(read.value)
            if other is not None and (other in self._line(owner) or owner in self._line(other)):
                found.append(read)
        return found

    def objects(self, owner: ast.ClassDef) -> list[ast.Name]:
        """The reads of `self` or `cls` in the class, in its bases, or in classes derived from it."""
        lines = [(one, self._line(one)) for one in self.classes.values()]
        related = [one for one, line in lines if owner in line or one in self._line(owner)]
        functions = [inner for one in related for inner in one.body if isinstance(inner, _FUNCTIONS)]
        scopes = [self._scopes[id(function)] for function in functions]
        return [read for scope in scopes for name in ("self", "cls") for read in scope.uses.get(name, [])]

    def is_of_tests(self, owner: ast.ClassDef) -> bool:
        """Whether only tests use the class: it or a class derived from it contains some, or it only holds constants."""
        lines = [self._line(one) for one in self.classes.values()]
        if any(_has_tests(one) for line in lines if owner in line for one in line):
            return True
        reads = self.module.uses.get(owner.name, [])
        is_read_whole = not all(isinstance(self.parent(read), ast.Attribute) for read in reads)
        return not (is_read_whole or owner.bases or owner.decorator_list)

    def _line(self, owner: ast.ClassDef) -> list[ast.ClassDef]:
        """A class and its bases in the file."""
        line: list[ast.ClassDef] = []
        waiting = [owner]
        while waiting:
            one = waiting.pop()
            if one not in line:
                line.append(one)
                waiting += [self.classes[name] for name in map(last_name, one.bases) if name in self.classes]
        return line

    def module_of(self, node: ast.expr) -> str:
        """The module from which the first part of a dotted name is imported; empty if it is not imported."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if isinstance(node, ast.Name):
            for binding in self.bindings_of(node):
                match self.parent(binding):
                    case ast.ImportFrom(module=str(module), level=0):
                        return module
                    case ast.Import() if isinstance(binding, ast.alias):
                        return binding.name
                    case ast.Assign(value=ast.Call(args=[ast.Constant(value=str(module)), *_]) as call):
                        return module if last_name(call.func) in ("importorskip", "import_module") else ""
                    case _:
                        pass
        return ""

    def _visit(self, nodes: Iterable[ast.AST | None], scope: Scope) -> None:
        for node in nodes:
            match node:
                case None:
                    pass
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                    self._visit_function(node, scope)
                case ast.ClassDef():
                    self._bind(node.name, node, scope)
                    self._visit([*node.decorator_list, *node.bases, *node.keywords], scope)
                    self._visit(node.body, self._new(node, scope))
                case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                    first = node.generators[0]
                    self._visit([first.iter], scope)
                    inner = self._new(node, scope)
                    parts = [part for one in node.generators for part in (one.target, one.iter, *one.ifs)]
                    made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                    self._visit([part for part in (*parts, *made) if part is not first.iter], inner)
                case _:
                    self._visit_other(node, scope)

    def _visit_function(self, node: Function, scope: Scope) -> None:
        arguments = node.args
        self._visit([*arguments.defaults, *arguments.kw_defaults], scope)
        inner = self._new(node, scope)
        for argument in all_arguments(arguments):
            self._bind(argument.arg, argument, inner)
        if isinstance(node, ast.Lambda):
            self._visit([node.body], inner)
        else:
            self._bind(node.name, node, scope)
            self._visit(node.decorator_list, scope)
            self._visit(node.body, inner)

    def _visit_other(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                self._scopes[id(node)] = scope
                self._reads.append(node)
            case ast.Name(id=name):
                self._bind(name, node, scope)
            case ast.NamedExpr(target=target, value=value):
                holder = scope
                while isinstance(holder.node, _COMPREHENSIONS) and holder.parent is not None:
                    holder = holder.parent
                self._bind(target.id, target, holder)
                self._visit([value], scope)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                scope.outer.update(names)
            case ast.alias(name=name, asname=asname):
                self._bind(asname or name.split(".")[0], node, scope)
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                self._bind(name, node, scope)
                self._visit(ast.iter_child_nodes(node), scope)
            case _:
                self._visit(ast.iter_child_nodes(node), scope)

    def _new(self, node: ast.AST, parent: Scope) -> Scope:
        self._scopes[id(node)] = Scope(node, parent)
        return self._scopes[id(node)]

    def _bind(self, name: str, node: ast.AST, scope: Scope) -> None:
        while name in scope.outer and scope.parent is not None:
            scope = scope.parent
        scope.bindings[name].append(node)
        if isinstance(node, ast.Name | ast.arg):
            self._scopes[id(node)] = scope

    def _holding(self, name: ast.Name) -> Scope | None:
        """The scope that binds the name at this read."""
        start = scope = self._scopes.get(id(name))
        while scope is not None:
            if name.id in scope.bindings and (scope is start or not isinstance(scope.node, ast.ClassDef)):
                return scope
            scope = scope.parent
        return None


def _has_tests(owner: ast.ClassDef) -> bool:
    return any(
        isinstance(one, _FUNCTIONS) and (one.name.startswith("test") or one.name == "runTest")
        for one in owner.body
    )


def all_arguments(arguments: ast.arguments) -> list[ast.arg]:
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return found + [one for one in (arguments.vararg, arguments.kwarg) if one is not None]


def is_fixture(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(decorator_name(one) == "fixture" for one in definition.decorator_list)


def decorator_name(decorator: ast.expr) -> str:
    """The last part of the name of a decorator, with or without arguments."""
    return last_name(decorator.func if isinstance(decorator, ast.Call) else decorator)


def last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def listed(words: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(words.split())


Role: TypeAlias = Literal[
    "checker",  # it fails or does not
    "raiser",  # a checker of what another call raises: what it expects comes first, then inputs
    "said",  # it is only printed, or names a subtest
    "keeps",  # the result has the same parts
    "parts",  # the result has the same parts in another order
    "makes",  # the result is another value computed from it
    "object",  # the result may be an object constructed from it
    "cases",
    "case",
    "unknown",
]

_RAISERS = (
    "raises",
    "assertraises",
    "failunlessraises",
    "warns",
    "assertwarns",
    "assertlogs",
    "assertnologs",
)
_SAID = {
    "print",
    "subTest",
    "subtest",
    "fail",
    "skip",
    "skipTest",
    "skipif",
    "xfail",
    "info",
    "debug",
    "warning",
    "pprint",
}
_KEEPS = {"list", "tuple", "dict", "OrderedDict", "MappingProxyType", "copy", "deepcopy", "iter"}
_PARTS = {"sorted", "reversed", "set", "frozenset", "deque", "chain"}
_MAKES = listed(
    """abs all any ascii bin bool bytearray bytes chr complex divmod enumerate float format hash hex id int isinstance
    issubclass len max min next oct ord pow print range repr round slice str sum type zip memoryview"""
)
# Modules of the standard library whose functions and classes only make values.
_PURE = listed(
    """base64 cmath collections copy dataclasses datetime decimal enum fractions html ipaddress itertools json
    math numbers operator pathlib posixpath re string struct textwrap types typing uuid"""
)
_OF_NUMPY = listed(
    """array asarray asanyarray arange zeros ones full eye identity linspace dtype datetime64 timedelta64 float16 float32
    float64 longdouble complex64 complex128 int8 int16 int32 int64 uint8 uint16 uint32 uint64 intp bool_ str_ bytes_"""
)
_TEXT_MAKERS = {"join", "format", "format_map"}
# Methods of texts and collections that return a value made of them.
METHODS_THAT_MAKE = listed(
    """capitalize casefold center count decode difference encode endswith expandtabs hex index intersection isalpha isdigit
    join ljust lower lstrip most_common partition removeprefix removesuffix replace rjust rstrip split splitlines startswith
    strip swapcase symmetric_difference title tolist upper union zfill format total_seconds isoformat"""
)
METHODS_THAT_ADD = {"add", "append", "appendleft", "extend", "insert", "setdefault", "update"}
METHODS_THAT_CHANGE = METHODS_THAT_ADD | {
    "clear",
    "discard",
    "pop",
    "popleft",
    "remove",
    "reverse",
    "sort",
    "popitem",
}


def plain(name: str) -> str:
    """A name without case and underscores, so that `assert_equal` is `assertEqual`."""
    return name.replace("_", "").lower()


def name_of_call(node: ast.AST) -> str:
    """The last part of the name of the function that an expression calls; empty if it calls none by name."""
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
        case _:
            return ""


_CHECKS = ("check", "verify", "expect", "ensure", "compare")
# Parts of the names of modules in which tests keep their checkers.
_OF_TESTS = ("test", "check", "assert", "expect", "helper", "util", "support", "common", "base")


def is_checked_elsewhere(call: ast.Call, names: Names) -> bool:
    """Whether a statement calls a checker that tests keep in another file, such as `check(add(3, 1), 4)` or `self.verify(…)`."""
    if not plain(name_of_call(call)).startswith(_CHECKS) or not isinstance(names.parent(call), ast.Expr):
        return False
    match call.func:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return names.class_meant(call.func.value) is not None
        case ast.Name() as name:
            origins = [names.parent(binding) for binding in names.bindings_of(name)]
            is_near = any(isinstance(one, ast.ImportFrom) and one.level == 1 for one in origins)
            return is_near or any(word in names.module_of(name) for word in _OF_TESTS)
        case _:
            return any(word in names.module_of(call.func) for word in _OF_TESTS)


def role_of(call: ast.Call, names: Names) -> Role:
    """The effect of the call on its arguments. Check first whether it calls a function of the file itself."""
    name = name_of_call(call)
    match call.func:
        case ast.Name():
            is_builtin = not names.bindings_of(call.func) and hasattr(builtins, name)
        case _:
            is_builtin = False
    if plain(name).startswith(_RAISERS):
        return "raiser"
    if plain(name).startswith(("assert", "failunless", "failif", "approx")) or name in ("eq_", "ok_"):
        return "makes" if plain(name) == "approx" else "checker"
    if is_checked_elsewhere(call, names):
        return "checker"
    if name in ("parametrize", "param"):
        return "cases" if name == "parametrize" else "case"
    module = names.module_of(call.func)
    if name in _SAID and (is_builtin or isinstance(call.func, ast.Attribute)):
        return "said"
    if is_builtin or module in _PURE:
        if name in _KEEPS:
            return "keeps"
        return "parts" if name in _PARTS else "makes" if name in _MAKES or module in _PURE else "unknown"
    if module.split(".")[0] == "numpy" and name in _OF_NUMPY:
        return "keeps" if "array" in name or name.startswith(("float", "int", "uint")) else "makes"
    if name in ("isclose", "allclose", "array_equal"):
        return "makes"
    if name in _TEXT_MAKERS:
        return "makes"
    if name[:1].isupper() or name.lstrip("_")[:1].isupper() or name == "call":
        return "object"
    return "unknown"


_ROW_BASES = {"NamedTuple", "TypedDict", "Struct", "BaseModel"}
_ROW_DECORATORS = {"dataclass", "attrs", "define", "frozen", "s"}


def fields_of_rows(names: Names) -> dict[str, list[str]]:
    """The fields of each class whose objects are rows, by its name, in order."""
    found: dict[str, list[str]] = {}
    for name, definition in names.classes.items():
        bases = {decorator_name(base) for base in definition.bases}
        decorators = {decorator_name(one) for one in definition.decorator_list}
        if bases & _ROW_BASES or decorators & _ROW_DECORATORS:
            found[name] = [
                one.target.id
                for one in definition.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            ]
    for name, bindings in names.module.bindings.items():
        for binding in bindings:
            match names.parent(binding):
                case ast.Assign(value=ast.Call(args=[_, listed, *_]) as call) if (
                    name_of_call(call) == "namedtuple"
                ):
                    found[name] = _words(listed)
                case _:
                    pass
    return found


def _words(listed: ast.expr) -> list[str]:
    match listed:
        case ast.Constant(value=str(text)):
            return text.replace(",", " ").split()
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [str(one.value) for one in elements if isinstance(one, ast.Constant)]
        case _:
            return []
