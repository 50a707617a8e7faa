"""What a JavaScript or TypeScript file declares: its tests, its functions with the tests that reach them, and its variables.

The file is walked once. A function is found by its name alone, wherever in the file it is declared.
"""

import bisect
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import tree_sitter_javascript
import tree_sitter_typescript
from tree_sitter import Language, Node, Parser

from workers.grading.controls.scopes import listed
from workers.grading.languages.language import DeclaredTest, nodes, text_of

_GRAMMARS = tuple(
    Language(grammar())
    for grammar in (
        tree_sitter_typescript.language_tsx,
        tree_sitter_typescript.language_typescript,
        tree_sitter_javascript.language,
    )
)
_SUITES = {"describe", "suite", "context", "fdescribe", "xdescribe"}
_TESTS = {"test", "it", "specify", "fit", "xit", "xtest", "xspecify"}
_HOOKS = {"beforeEach", "afterEach", "setup", "teardown"}  # run for each test of their suite
_TABLES = {"each", "for"}
_MODIFIERS = _TABLES | set(
    listed("only skip concurrent sequential serial failing fails todo cb shuffle if skipIf runIf todoIf")
)
FUNCTIONS = listed(
    """arrow_function function_expression generator_function function_declaration
    generator_function_declaration method_definition"""
)
# Syntax around an expression that has its value.
TRANSPARENT = listed("parenthesized_expression as_expression satisfies_expression non_null_expression")
_DECLARED = FUNCTIONS[-3:]  # have names by which other functions call them
# Parts of an assertion that consist of a word alone, as in `expect(x).to.be.true`.
WORDS = listed(
    """true false null undefined ok exist empty NaN called notCalled calledOnce calledTwice calledThrice
    fulfilled rejected frozen sealed extensible finite"""
)
_LEAVES = {"string", "number", "identifier", "property_identifier", "type_annotation", "comment", "regex"}
_ESCAPE = re.compile(r"\\(?:u\{([\da-fA-F]{1,6})\}|u([\da-fA-F]{4})|x([\da-fA-F]{2})|(\r?\n|.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "\n": "", "\r\n": "", "0": ""}
_PLACEHOLDER = re.compile(r"%[sdifjoOpc#$]|\$[A-Za-z_#][\w.]*")
_ANY = "\0"  # the place of computed text in a title


@dataclass(frozen=True, slots=True)
class Binding:
    """A variable. It has the value at `path` in the expression `value`, in each element of it, or in each call of a function."""

    declared_at: int
    scope: "Block"
    value: Node | None = None
    path: tuple[str, ...] = ()
    is_element: bool = False
    called: str = ""  # the name of the function whose argument it is
    shown: frozenset[str] = frozenset()  # parts of the elements that the titles of tests contain


@dataclass(eq=False, slots=True)
class Block:
    """A block of code with its own variables."""

    start: int
    end: int
    above: "Block | None" = None
    bindings: dict[str, Binding] = field(default_factory=dict[str, Binding])

    def find(self, name: str) -> "tuple[Binding, Block] | None":
        """Returns the variable of this name and the block that declares it."""
        scope: Block | None = self
        while scope is not None:
            if name in scope.bindings:
                return scope.bindings[name], scope
            scope = scope.above
        return None

    def constant(self, node: Node) -> Node:
        """Returns the initial value of a variable; for any other expression the expression itself."""
        found = self.find(text_of(node)) if node.type == "identifier" else None
        if found is None or found[0].value is None or found[0].path or found[0].is_element:
            return node
        return found[0].value


@dataclass(eq=False, slots=True)
class Region:
    """A test, a suite, a function, a hook, or the code of the file outside of these."""

    kind: str
    above: "Region | None" = None
    title: tuple[str, str] = ("", "")  # as it is written, and with `_ANY` for what is computed
    test: DeclaredTest | None = None
    names: set[str] = field(default_factory=set[str])  # identifiers
    literals: set[str] = field(default_factory=set[str])
    parameters: set[str] = field(default_factory=set[str])
    tests: tuple[str, ...] = ()  # the tests that run it

    def around(self) -> "Iterator[Region]":
        place: Region | None = self
        while place is not None:
            yield place
            place = place.above


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call, or a word of an assertion, with where it is."""

    node: Node
    place: Region
    scope: Block


def parsed(source: bytes) -> Node | None:
    """The syntax tree by the grammar with the fewest errors; None if the source is not UTF-8."""
    try:
        source.decode()
    except UnicodeDecodeError:
        return None
    roots: list[Node] = []
    for grammar in _GRAMMARS:
        roots.append(Parser(grammar).parse(source).root_node)
        if not roots[-1].has_error:
            return roots[-1]
    return min(roots, key=lambda root: sum(1 for _ in nodes(root, "ERROR")))


def items(node: Node | None) -> list[Node]:
    """The named children of a node, for instance arguments, without comments."""
    return [] if node is None else [child for child in node.named_children if child.type != "comment"]


def part(node: Node, name: str) -> Node:
    """The child of a node that its grammar always has under this name; the node itself where the source has an error."""
    return node.child_by_field_name(name) or node


def unwrapped(node: Node) -> Node:
    """The expression inside parentheses and assertions of its type."""
    while node.type in TRANSPARENT and items(node):
        node = items(node)[0]
    return node


class Source:
    """The declarations, calls and variables of a file."""

    def __init__(self, root: Node) -> None:
        self.tests: list[Region] = []
        self.calls: list[CallSite] = []
        self.called: dict[str, list[CallSite]] = defaultdict(list)  # by the last name of the function
        # Where a name is read, and which member of it.
        self.uses: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.functions: dict[str, list[Region]] = defaultdict(list)
        self.is_typed = False
        self._hooks: list[Region] = []
        self._members: dict[int, str] = {}
        self._names: dict[int, str] = {}  # names of functions, by the id of their node
        # The rows that a function gets, by the id of its node: the expression with them, whether a row is spread, and the title.
        self._rows: dict[int, tuple[Node, bool, str]] = {}
        readers = {
            "identifier": self._identifier,
            "shorthand_property_identifier": self._identifier,
            "member_expression": self._member,
            "subscript_expression": self._member,
            "call_expression": self._call,
            "variable_declarator": self._variable,
            "pair": self._named,
            "assignment_expression": self._named,
            "for_in_statement": self._loop,
            "statement_block": self._block,
            "type_annotation": self._type,
            "as_expression": self._type,
            **dict.fromkeys(("string", "number", "template_string"), self._literal),
            **dict.fromkeys(FUNCTIONS, self._function),
        }
        waiting = [(root, Region("file"), Block(0, root.end_byte))]
        while waiting:
            node, place, scope = waiting.pop()
            reader = readers.get(node.type)
            if reader is not None:
                place, scope = reader(node, place, scope)
            if node.type not in _LEAVES:
                waiting += [(child, place, scope) for child in reversed(node.named_children)]

    def find_tests_of_places(self) -> None:
        """Sets `tests` of each place that is run by tests. What contains a function may call it in ways that are not seen."""
        readers: dict[str, list[Region]] = defaultdict(list)
        for place in [*self.tests, *self._hooks, *(one for some in self.functions.values() for one in some)]:
            for name in place.names & self.functions.keys():
                readers[name].append(place)
            if place.kind == "function" and place.above is not None:
                readers[place.title[0]].append(place.above)
        inside: dict[Region | None, dict[str, None]] = defaultdict(dict)
        for test in self.tests:
            around = list(test.around())
            names = dict.fromkeys(one.test.name for one in around if one.test is not None)
            test.tests = tuple(names)
            for one in around:
                inside[one].update(names)
        for hook in self._hooks:
            hook.tests = tuple(inside[hook.above])
        for name, places in self.functions.items():
            seen = {name: None}
            found: dict[str, None] = {}
            for called in (waiting := [name]):
                for reader in readers[called]:
                    found.update(dict.fromkeys(reader.tests if reader.kind != "function" else ()))
                    known = reader.title[0]
                    if reader.kind == "function" and known not in seen:
                        seen[known] = None
                        waiting.append(known)
            for place in places:
                place.tests = tuple(found)

    def uses_in(self, name: str, scope: Block) -> list[tuple[int, str]]:
        """Returns where a name is read in a block, and which member of it."""
        uses = self.uses[name]
        first = bisect.bisect_left(uses, (scope.start, ""))
        return uses[first : bisect.bisect_left(uses, (scope.end, ""))]

    def _identifier(self, node: Node, place: Region, scope: Block) -> tuple[Region, Block]:
        name = text_of(node)
        place.names.add(name)
        self.uses[name].append((node.start_byte, self._members.pop(node.start_byte, "")))
        return place, scope

    def _literal(self, node: Node, place: Region, scope: Block) -> tuple[Region, Block]:
        place.literals.add(text_of(node))
        return place, scope

    def _type(self, node: Node, place: Region, scope: Block) -> tuple[Region, Block]:
        self.is_typed = True
        return place, scope

    def _block(self, node: Node, place: Region, scope: Block) -> tuple[Region, Block]:
        return place, Block(node.start_byte, node.end_byte, scope)

    def _member(self, node: Node, place: Region, scope: Block) -> tuple[Region, Block]:
        owner, key = member(node)
        if owner.type == "identifier" and key:
            self._members[owner.start_byte] = key
        if key in WORDS and node.type == "member_expression":
            self.calls.append(CallSite(node, place, scope))
        place.names.add(key)
        return place, scope

    def _named(self, node: Node, place: Region, scope: Block) -> tuple[Region, Block]:
        key = node.child_by_field_name("key") or part(node, "left")
        value = node.child_by_field_name("value") or part(node, "right")
        if value.type in FUNCTIONS:
            self._names[value.id] = _last_name(key)
        return place, scope

    def _variable(self, node: Node, place: Region, scope: Block) -> tuple[Region, Block]:
        name, value = part(node, "name"), node.child_by_field_name("value")
        if value is not None and value.type in FUNCTIONS:
            self._names[value.id] = text_of(name)
        else:
            _bind(name, Binding(0, scope, value), scope)
        return place, scope

    def _loop(self, node: Node, place: Region, scope: Block) -> tuple[Region, Block]:
        inner = Block(node.start_byte, node.end_byte, scope)
        is_of = text_of(node.child_by_field_name("operator")) == "of"
        rows = part(node, "right") if is_of else None
        _bind(part(node, "left"), Binding(0, scope, rows, is_element=True), inner)
        return place, inner

    def _function(self, node: Node, place: Region, scope: Block) -> tuple[Region, Block]:
        name = self._names.pop(node.id, "")
        if node.type in _DECLARED:
            name = _last_name(part(node, "name"))
        parameters = items(node.child_by_field_name("parameters")) or [
            one for one in [node.child_by_field_name("parameter")] if one is not None
        ]
        inner = Block(node.start_byte, node.end_byte, scope)
        if name:
            place = Region("function", place, (name, name))
            self.functions[name].append(place)
        place.parameters |= {_last_name(one) for one in parameters}
        value, is_spread, title = self._rows.pop(node.id, (None, False, ""))
        shown = _PLACEHOLDER.findall(title.replace("%%", ""))
        num_printed = sum(one[0] == "%" and one[1] not in "#$" for one in shown)
        names_shown = frozenset(one[1:].split(".")[0] for one in shown if one[0] == "$")
        for number, parameter in enumerate(parameters):
            path = (str(number),) if is_spread or name else ()
            binding = Binding(0, scope, value, path, value is not None, name, names_shown)
            if value is not None and (num_printed > number or (number > 0 and not is_spread)):
                binding = Binding(0, scope)
            _bind(parameter, binding, inner)
        return place, inner

    def _call(self, node: Node, place: Region, scope: Block) -> tuple[Region, Block]:
        function, arguments = part(node, "function"), items(node.child_by_field_name("arguments"))
        name = _last_name(function)
        self.calls.append(CallSite(node, place, scope))
        self.called[name].append(self.calls[-1])
        if name in ("forEach", "map") and arguments and arguments[0].type in FUNCTIONS:
            self._rows[arguments[0].id] = (member(function)[0], False, "")
        names, table = _chain(function)
        is_for = "for" in names
        while names and names[-1] in _MODIFIERS:
            names.pop()
        if not names or len(names) > 2 or names[-1] not in _SUITES | _TESTS | _HOOKS:
            return place, scope
        callback = next((one for one in arguments if one.type in FUNCTIONS), None)
        if names[-1] in _HOOKS:
            hook = Region("hook", place)
            self._hooks += [hook] if callback is not None else []
            return (place if callback is None else hook), scope
        first = arguments[0].type if arguments else ""
        is_titled = first in ("string", "template_string") and len(names) == 1
        if not is_titled and (callback is None or first in FUNCTIONS or len(arguments) < 2):
            return place, scope
        title = _title(arguments[0], scope, table is not None)
        if table is not None and callback is not None:
            is_spread = not is_for and table.type == "arguments" and _has_arrays(table, scope)
            rows = table if table.type != "arguments" else next(iter(items(table)), table)
            self._rows[callback.id] = (rows, is_spread, title[0])
        return self._declared(names[-1], place, title), scope

    def _declared(self, name: str, above: Region, title: tuple[str, str]) -> Region:
        if name in _SUITES:
            return Region("suite", above, title)
        place = Region("test", above, title)
        chain = [one for one in place.around() if one.kind in ("test", "suite")][::-1]
        shown = [one.title[0] for one in chain]
        forms = [one.title[1] for one in chain]
        # Tests that a function declares are in the suites of its callers, too.
        is_elsewhere = any(one.kind == "function" for one in place.around())
        keys = tuple(dict.fromkeys((" > ".join(shown), " ".join(shown), shown[-1])))
        place.test = DeclaredTest(keys[0], keys, _pattern(forms, is_elsewhere))
        self.tests.append(place)
        return place


def member(node: Node) -> tuple[Node, str]:
    """The object of `a.b` or `a[0]`, and the name or number of its member; "" if that is computed."""
    owner = part(node, "object")
    if node.type == "member_expression":
        return owner, text_of(part(node, "property"))
    index = part(node, "index")
    return owner, key_of(index) if index.type in ("number", "string") else ""


def key_of(node: Node) -> str:
    """The name of a key of an object, without quotes."""
    return unquoted(node) if node.type == "string" else text_of(node)


def unquoted(node: Node) -> str:
    """The value of a string literal."""

    def value(found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        return _ESCAPED.get(found[4], found[4]) if not code else chr(min(int(code, 16), 0x10FFFF))

    return _ESCAPE.sub(value, text_of(node)[1:-1])


def _last_name(node: Node) -> str:
    """The last name of `a.b.c`, or of the parameter `c: T`; "" if there is none."""
    if node.type == "member_expression":
        node = part(node, "property")
    elif node.type in ("required_parameter", "optional_parameter"):
        node = part(node, "pattern")
    return text_of(node) if node.type.endswith("identifier") else ""


def _chain(node: Node) -> tuple[list[str], Node | None]:
    """The names of `a.b.each(rows)` and its table; none if it has another form."""
    names: list[str] = []
    table: Node | None = None
    for _ in range(8):
        if node.type == "call_expression":
            called = part(node, "function")
            is_table = called.type == "member_expression" and _last_name(called) in _TABLES
            table = node.child_by_field_name("arguments") if is_table else table
            node = called
        elif node.type == "member_expression":
            names.append(_last_name(node))
            node = part(node, "object")
        else:
            return ([*names, text_of(node)][::-1] if node.type == "identifier" else []), table
    return [], None


def _has_arrays(table: Node, scope: Block) -> bool:
    """Whether the rows of a table are arrays, so that each of their elements is an argument."""
    rows = unwrapped(scope.constant(next(iter(items(table)), table)))
    return any(one.type == "array" for one in items(rows)[:1])


def _title(node: Node, scope: Block, is_formatted: bool) -> tuple[str, str]:
    """A title as it is written, and with `_ANY` for what is computed."""
    shown = form = ""
    node = scope.constant(node)
    if node.type == "string":
        shown = form = unquoted(node)
    elif node.type == "template_string":
        for child in node.children:
            if child.type in ("string_fragment", "escape_sequence"):
                form += text_of(child)
            elif child.type == "template_substitution":
                form += _ANY
        shown = text_of(node)[1:-1]
    elif node.type == "binary_expression" and text_of(node.child_by_field_name("operator")) == "+":
        sides = [_title(part(node, side), scope, False) for side in ("left", "right")]
        shown, form = "".join(side[0] for side in sides), "".join(side[1] for side in sides)
    else:
        shown, form = text_of(node), _ANY
    if is_formatted:
        form = "%".join(_PLACEHOLDER.sub(_ANY, piece) for piece in form.split("%%"))
    return " ".join(shown.split()), " ".join(form.split())


def _pattern(forms: list[str], is_elsewhere: bool) -> re.Pattern[str] | None:
    """Matches the titles joined by " > " or a space, and the last title alone. It takes linear time."""
    if not is_elsewhere and _ANY not in "".join(forms):
        return None
    either: list[str] = []
    for form in ("\1".join(forms), (_ANY if is_elsewhere else "") + forms[-1]):
        first, *others = [re.escape(one).replace("\1", "(?: > | )") for one in re.split(f"{_ANY}+", form)]
        middle = "".join(f"(?>.*?{one})" for one in others[:-1])
        either.append(first + middle + (f".*{others[-1]}" if others else ""))
    return re.compile("|".join(dict.fromkeys(either)), re.DOTALL)


def _bind(pattern: Node, binding: Binding, scope: Block) -> None:
    """Adds the variables of a pattern to a scope."""
    waiting = [(pattern, binding.path)]
    while waiting:
        node, path = waiting.pop()
        if node.type in ("required_parameter", "optional_parameter"):
            waiting.append((part(node, "pattern"), path))
        elif node.type in ("identifier", "shorthand_property_identifier_pattern"):
            path = path if node.type == "identifier" else (*path, text_of(node))
            of = binding
            scope.bindings[text_of(node)] = Binding(
                node.start_byte, of.scope, of.value, path, of.is_element, of.called, of.shown
            )
        elif node.type == "object_pattern":
            for child in items(node):
                is_pair = child.type == "pair_pattern"
                own = (*path, key_of(part(child, "key"))) if is_pair else path
                waiting.append((part(child, "value") if is_pair else child, own))
        elif node.type == "array_pattern":
            number = 0
            for child in node.children:
                number += child.type == ","
                if child.is_named:
                    waiting.append((child, (*path, str(number))))
