"""The source of a test file in Java: its classes and methods, which of them are tests, and which names the code under test may get."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import tree_sitter_java
from tree_sitter import Language as Grammar
from tree_sitter import Node, Parser

from workers.grading.languages.language import nodes, text_of

_GRAMMAR = Grammar(tree_sitter_java.language())
_TEST = re.compile(r"(?:\w*Test|TestFactory|TestTemplate|Theory|Property)")
_TYPES = ("class_declaration", "interface_declaration", "enum_declaration", "record_declaration")
_MEMBERS = ("method_declaration", "constructor_declaration", "field_declaration", "static_initializer")
NUMBERS = (
    *("decimal_integer_literal", "octal_integer_literal", "hex_integer_literal"),
    "decimal_floating_point_literal",
)
LITERALS = (*NUMBERS, "string_literal", "character_literal", "true", "false")
_NODES = (
    *(*LITERALS, "variable_declarator", "assignment_expression", "enhanced_for_statement"),
    *("try_statement", "try_with_resources_statement", "assert_statement", "if_statement"),
    *("method_invocation", "annotation", "object_creation_expression", "array_initializer"),
)
_CLASSES = re.compile(
    r"(?:[\w.]+\.)?(?:Assert|Assertions|TestCase|Truth|MatcherAssert|Assume|BDDAssertions|this)"
)
_ASSERTS = re.compile(
    r"assert(?:\w*Equals\w*|(?:Not)?(?:Same|Null)|True|False|All|InstanceOf|LinesMatch|DoesNotThrow|(?:Throws|That|Timeout)\w*)|expect\w*"
)
# The first argument may be a message in these.
_MESSAGE_FIRST = re.compile(r"org\.junit\.Assert\b|junit\.framework\.")
FLUENT_ROOTS = re.compile(r"assert(?:That\w*|WithMessage\w*)|then(?:ThrownBy)?")
MATCHERS = re.compile(
    r"is|equal\w*|same\w*|contain\w*|starts?With\w*|ends?With\w*|has[A-Z]\w*|arrayContaining\w*|arrayWithSize|closeTo|matches\w*|both|and"
    r"|or|allOf|anyOf|either|every\w*|describedAs"
)
NO_MATCHERS = re.compile(
    r"not\w*|null\w*|any|anything|instanceOf|isA|typeCompatibleWith|greaterThan\w*|lessThan\w*|empty\w*"
)
COMPARES = re.compile(r"equals(?:IgnoreCase)?|contentEquals|contains|startsWith|endsWith|matches|deepEquals")
# Methods whose result consists of their arguments, and methods whose result is made of their object alone.
_MADE_OF_ARGUMENTS = re.compile(
    r"(?:(?:java|com)\.[\w.]+\.)?(?:(?:String|Integer|Long|Double|Float|Short|Byte|Boolean|Character|Big(?:Decimal|Integer)|Arrays|Collections"
    r"|(?:Immutable)?(?:List|Set|Map)s?|Optional\w*|\w*Stream|Duration|Period|Instant|\w+Date(?:Time)?|LocalTime|Year\w*|Paths?|URI|UUID"
    r"|Arguments|EnumSet|Objects|Charset)\.)(?:\w*[oO]f\w*|asList|singleton\w*|parse\w*|format|join|new\w+|unmodifiable\w*|get|create|fromString)"
    r"|asList|singleton(?:List)?|arguments|entry"
)
MADE_OF_OBJECT = re.compile(
    r"getBytes|toCharArray|toString|trim|stream|iterator|intValue|longValue|doubleValue|replace|concat|repeat|toLowerCase|toUpperCase"
)
COLLECTS = re.compile(r"add(?:All|Last|First)?|put|append|offer|push")


@dataclass(eq=False, slots=True)
class JavaMethod:
    """A member of a class: a method, a constructor, which is named `<init>`, a block, or the declaration of fields."""

    name: str
    owner: "JavaClass"
    node: Node
    parameters: list[str]
    is_variadic: bool  # its last parameter gets all further arguments
    found: list[Node]  # the nodes in it of the types in `_NODES`
    annotations: dict[str, Node]

    def place(self, argument: int) -> int:
        """The place of the parameter that gets an argument of a call."""
        return min(argument, len(self.parameters) - 1)

    def takes(self, number: int) -> bool:
        """Whether a call with this number of arguments may call it."""
        return number == len(self.parameters) or (self.is_variadic and number >= len(self.parameters) - 1)

    def of(self, *types: str) -> list[Node]:
        """The nodes of these types in it, in the order of the source."""
        return [node for node in self.found if node.type in types]


@dataclass(eq=False, slots=True)
class JavaClass:
    """A class, with the names of those around it and its own."""

    names: tuple[str, ...]
    shown: tuple[str, ...]  # the names that runners display
    supers: list[str]
    is_abstract: bool
    is_test_case: bool  # of JUnit 3
    methods: list[JavaMethod] = field(default_factory=list[JavaMethod])


@dataclass(frozen=True, slots=True)
class JavaTest:
    """A method that the runner calls, as a test of a class that has or inherits it."""

    name: str
    keys: list[str]
    method: JavaMethod


@dataclass(slots=True)
class JavaFile:
    """A parsed file: its classes with their methods, its fields, and what it imports."""

    source: bytes
    classes: list[JavaClass] = field(default_factory=list[JavaClass])
    by_name: dict[str, list[JavaMethod]] = field(default_factory=dict[str, list[JavaMethod]])
    fields: list[tuple[JavaMethod, Node]] = field(default_factory=list[tuple[JavaMethod, Node]])
    imports: list[str] = field(default_factory=list[str])
    _inputs: dict[JavaMethod, set[str]] = field(default_factory=dict[JavaMethod, set[str]])

    def __post_init__(self) -> None:
        root = Parser(_GRAMMAR).parse(self.source).root_node
        for node in root.children:
            if node.type == "import_declaration":
                self.imports.append(text_of(node).removesuffix(";").split()[-1])
            elif node.type in _TYPES:
                self._enter(node, (), ())
        for one in self.classes:
            for method in one.methods:
                self.by_name.setdefault(method.name, []).append(method)

    def _enter(self, node: Node, names: tuple[str, ...], shown: tuple[str, ...]) -> None:
        name, annotations, body = name_of(node), _annotations(node), node.child_by_field_name("body")
        kinds = (node.child_by_field_name("superclass"), node.child_by_field_name("interfaces"))
        supers = [text_of(one) for kind in kinds if kind for one in nodes(kind, "type_identifier")]
        is_abstract = node.type == "interface_declaration" or "abstract" in _modifiers(node).split()
        is_test_case = any(one.endswith("TestCase") for one in supers)
        display = _display_name(annotations) or name
        one = JavaClass((*names, name), (*shown, display), supers, is_abstract, is_test_case)
        self.classes.append(one)
        for child in body.children if body else ():
            for member in child.children if child.type == "enum_body_declarations" else [child]:
                if member.type in _TYPES:
                    self._enter(member, one.names, one.shown)
                elif member.type in _MEMBERS:
                    of_member = "<init>" if member.type == "constructor_declaration" else name_of(member)
                    found = list(nodes(member, *_NODES))
                    parameters, annotated = _parameters(member), _annotations(member)
                    is_variadic = any(nodes(member, "spread_parameter"))
                    method = JavaMethod(of_member, one, member, parameters, is_variadic, found, annotated)
                    one.methods.append(method)
                    if member.type == "field_declaration":
                        self.fields += ((method, n) for n in member.children_by_field_name("declarator"))

    def tests(self) -> list[JavaTest]:
        found: list[JavaTest] = []
        for one in self.classes:
            for method in self._inherited(one):
                if is_test(method):
                    display = _display_name(method.annotations)
                    keys = [
                        " > ".join((*one.names, method.name)),
                        " > ".join((*one.shown, display or method.name)),
                    ]
                    keys += [f" > {method.name}"] if one.is_abstract else []
                    found.append(JavaTest(".".join((*one.names, method.name)), keys, method))
        return found

    def _inherited(self, one: JavaClass) -> list[JavaMethod]:
        classes = [one]
        for each in classes:
            classes += [
                other for other in self.classes if other.names[-1] in each.supers and other not in classes
            ]
        found = {
            (method.name, len(method.parameters)): method
            for each in reversed(classes)
            for method in each.methods
        }
        return list(found.values())

    def called(self, call: Node) -> list[JavaMethod]:
        """The methods of this file that a call may call."""
        name = "<init>" if call.type == "object_creation_expression" else name_of(call)
        number = len(arguments_of(call))
        found = [one for one in self.by_name.get(name, ()) if one.takes(number) and not is_test(one)]
        if name == "<init>":
            return [one for one in found if one.owner.names[-1] == text_of(call.child_by_field_name("type"))]
        kind = text_of(call.child_by_field_name("object"))
        return [one for one in found if kind in ("", "this", "super", one.owner.names[-1])]

    def reached(self, test: JavaMethod) -> list[JavaMethod]:
        """The methods of this file that a test calls, and those that they call, itself included."""
        found = [test]
        for method in found:
            for call in method.of("method_invocation", "object_creation_expression"):
                found += [one for one in self.called(call) if one not in found]
        return found

    def says_message_first(self, call: Node) -> bool:
        """Whether the assertion that is called takes a message as its first argument, by what the file imports."""
        kind, name = text_of(call.child_by_field_name("object")), name_of(call)
        if kind:
            known = [one for one in self.imports if one.endswith(f".{kind}")]
        else:
            known = [one for one in self.imports if one.endswith(f".{name}")]
            known = known or [one for one in self.imports if one.endswith((".Assert.*", ".Assertions.*"))]
        return any(_MESSAGE_FIRST.match(one) for one in known) if known else kind != "Assertions"

    def inputs(self, method: JavaMethod) -> set[str]:
        """The names that a method uses outside of its assertions: the code under test may get them."""
        if method not in self._inputs:
            self._inputs[method] = found = set[str]()  # for a method that calls itself
            # A field that another field is made of is no input yet.
            is_field = method.node.type == "field_declaration"
            waiting = [] if is_field else [method.node.child_by_field_name("body") or method.node]
            while waiting:
                node = waiting.pop()
                if node.type in ("identifier", "field_access"):
                    found.add(text_of(node).removeprefix("this."))
                waiting += self._used_parts(node)
            for loop in method.of("enhanced_for_statement"):
                if name_of(loop) in found:
                    found.add(text_of(loop.child_by_field_name("value")))
        return self._inputs[method]

    def _used_parts(self, node: Node) -> list[Node]:
        """The parts of a node in which names are used, but for assertions, declarations, and collections that are filled."""
        match node.type:
            case "variable_declarator":
                return some(node.child_by_field_name("value"))
            case "assignment_expression":
                return some(node.child_by_field_name("right"))
            case "enhanced_for_statement":
                value = node.child_by_field_name("value")
                is_name = value is not None and value.type == "identifier"
                return some(None if is_name else value, node.child_by_field_name("body"))
            case "field_access":
                kind = node.child_by_field_name("object")
                return [] if kind is None or kind.type in ("identifier", "this") else [kind]
            case "formal_parameters" | "modifiers" | "type_arguments":
                return []
            case "method_invocation" | "object_creation_expression":
                return self._used_by_call(node)
            case "if_statement" if makes_fail(node.child_by_field_name("consequence")):
                parts = some(node.child_by_field_name("consequence"), node.child_by_field_name("alternative"))
                return [*parts, *self._calls_in(some(node.child_by_field_name("condition")))]
            case _:
                return node.named_children

    def _used_by_call(self, call: Node) -> list[Node]:
        kind, arguments = call.child_by_field_name("object"), arguments_of(call)
        name = name_of(call)
        if called := self.called(call):
            used = [
                one
                for place, one in enumerate(arguments)
                if any(method.parameters[method.place(place)] in self.inputs(method) for method in called)
            ]
            return [*used, *self._calls_in(one for one in arguments if one not in used)]
        if is_assertion(call):
            return self._calls_in([*some(kind), *arguments])
        if kind is not None and kind.type == "identifier" and COLLECTS.fullmatch(name):
            return arguments if not all(one.type in (*LITERALS, "identifier") for one in arguments) else []
        return [*some(kind), *arguments]

    def _calls_in(self, parts: Iterable[Node]) -> list[Node]:
        """The outermost calls and functions within these, through comparisons and what makes a value of its arguments."""
        found, waiting = list[Node](), [*parts]
        while waiting:
            part = waiting.pop()
            name = name_of(part)
            passed_on = (COMPARES, MADE_OF_OBJECT, MATCHERS, NO_MATCHERS)
            passes_on = (
                is_assertion(part)
                or is_made_of_arguments(part)
                or any(one.fullmatch(name) for one in passed_on)
            )
            if part.type in ("lambda_expression", "method_reference") or (
                part.type == "method_invocation" and not passes_on
            ):
                found.append(part)
            elif part.type == "method_invocation":
                waiting += (*some(part.child_by_field_name("object")), *arguments_of(part))
            else:
                waiting += part.named_children
        return found


def name_of(node: Node) -> str:
    """The name of what is declared, or of the method that is called; "" if it has none."""
    return text_of(node.child_by_field_name("name"))


def some(*parts: Node | None) -> list[Node]:
    """The parts of a node that it has."""
    return [one for one in parts if one is not None]


def _modifiers(node: Node) -> str:
    return text_of(next((one for one in node.children if one.type == "modifiers"), None))


def _annotations(node: Node) -> dict[str, Node]:
    """The annotations of a declaration by the last part of their names."""
    modifiers = next((one for one in node.children if one.type == "modifiers"), None)
    found = [one for one in (modifiers.children if modifiers else ()) if one.type.endswith("annotation")]
    return {name_of(one).rpartition(".")[2]: one for one in found}


def _display_name(annotations: dict[str, Node]) -> str:
    shown = (
        next(nodes(annotations["DisplayName"], "string_literal"), None)
        if "DisplayName" in annotations
        else None
    )
    return text_of(shown)[1:-1].replace('\\"', '"')


def is_test(method: JavaMethod) -> bool:
    """Whether the runner calls a method as a test."""
    is_old = method.owner.is_test_case and method.name.startswith("test") and not method.parameters
    return method.node.type == "method_declaration" and (
        is_old or any(_TEST.fullmatch(one) for one in method.annotations)
    )


def _parameters(method: Node) -> list[str]:
    parameters = method.child_by_field_name("parameters")
    declared = [one for one in parameters.named_children if "parameter" in one.type] if parameters else []
    return [
        text_of(next(nodes(one, "identifier"), None)) if one.type == "spread_parameter" else name_of(one)
        for one in declared
    ]


def arguments_of(call: Node) -> list[Node]:
    """The arguments of a call."""
    arguments = call.child_by_field_name("arguments")
    return [one for one in arguments.named_children if "comment" not in one.type] if arguments else []


def root_of(call: Node) -> Node:
    """The first call of a chain of calls."""
    while (before := call.child_by_field_name("object")) is not None and before.type == "method_invocation":
        call = before
    return call


def is_assertion(call: Node) -> bool:
    """Whether a call asserts something, or is a part of a chain that does."""
    if call.type != "method_invocation":
        return False
    name, root = name_of(call), root_of(call)
    kind = text_of(call.child_by_field_name("object"))
    if _ASSERTS.fullmatch(name) and (not kind or _CLASSES.fullmatch(kind)):
        return True
    of_root = name_of(root)
    return of_root != name and FLUENT_ROOTS.fullmatch(of_root) is not None


def is_made_of_arguments(call: Node) -> bool:
    """Whether a call makes a value of its arguments without code under test."""
    kind = text_of(call.child_by_field_name("object"))
    return _MADE_OF_ARGUMENTS.fullmatch(f"{kind}.{name_of(call)}" if kind else name_of(call)) is not None


def makes_fail(branch: Node | None) -> bool:
    """Whether a branch of a condition makes the test fail."""
    if branch is None:
        return False
    for one in [branch, *branch.named_children]:
        if one.type == "expression_statement" and re.match(r"(?:\w+\.)?fail\(", text_of(one)):
            return True
        if one.type == "throw_statement" and re.match(r"throw new Assertion\w*Error", text_of(one)):
            return True
    return False
