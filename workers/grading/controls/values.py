"""The replacements for expected values in contradictions: values of the same type or, if there are none, values equal to nothing; and other
exceptions, warnings and types.

They are drawn by chance and look like human text, so code under test cannot recognise a control run by them. The values of an expression in
a run of the known fix are taken into account if they were observed.
"""

import ast
import builtins
import itertools
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from workers.grading.controls.literals import ALPHABETS, Literals, Value, value_of
from workers.grading.controls.scopes import Names, is_checked_elsewhere, listed, name_of_call
from workers.grading.controls.spans import Cover, Site, TestFile, changed_span, parse_expression

# Placeholder for the text of the expression.
ORIGINAL = "\0"


@dataclass(frozen=True, slots=True)
class Observed:
    """The observed values of an expression, and expressions for other values of their type.

    `near` are Python expressions for another value of the same type, the most natural first. ORIGINAL is a placeholder for the text of the
    expression in parentheses; an expression without it is a literal. Each was unequal to every value that was seen.
    """

    near: tuple[str, ...] = ()
    # The smallest and the largest value, if all values were numbers.
    low: float | None = None
    high: float | None = None
    # Names of the classes that all values are instances of, the most specific first: builtins without a module, others with theirs.
    types: tuple[str, ...] = ()
    num_values: int = 0  # number of different values, by their `repr`
    # Files in the workdir that were opened while it was evaluated, and only by such expressions.
    files: tuple[str, ...] = ()


_ERRORS = (
    "ValueError",
    "TypeError",
    "KeyError",
    "IndexError",
    "AttributeError",
    "RuntimeError",
    "OSError",
    "ZeroDivisionError",
    "NotImplementedError",
    "LookupError",
    "ArithmeticError",
    "OverflowError",
    "NameError",
    "StopIteration",
    "FileNotFoundError",
    "ImportError",
    "UnicodeDecodeError",
    "PermissionError",
    "TimeoutError",
    "RecursionError",
)
_NO_EXCEPTIONS = ("GeneratorExit", "KeyboardInterrupt", "SystemExit")  # these are not derived from Exception
# Names of exceptions, and parts of such names.
_ENDING_THE_RUN = {"BaseException", "Exit", "KeyboardInterrupt", "exit"}
_WARNINGS = (
    "UserWarning",
    "DeprecationWarning",
    "RuntimeWarning",
    "FutureWarning",
    "SyntaxWarning",
    "ImportWarning",
    "UnicodeWarning",
    "BytesWarning",
)
_TYPES = ("int", "str", "float", "list", "dict", "tuple", "set", "bytes", "complex", "range", "frozenset")
# Names of classes of which instances of many other classes count as instances.
_ABSTRACT = listed(
    """Callable Collection Container Hashable Integral Iterable Iterator Mapping MutableMapping MutableSequence MutableSet
    Number Rational Real Reversible Sequence Set Sized SupportsInt SupportsFloat Buffer ByteString object
    number floating integer inexact signedinteger complexfloating generic character flexible"""
)
_RARE_TYPES = ("memoryview", "super", "property", "staticmethod")


def other_error(node: ast.expr, chance: random.Random) -> str | None:
    """A common exception class that catches none of the exceptions that the class or classes `node` catch.

    None if every class would catch some, or if an exception that is no longer caught would end the whole run instead of the test.
    """
    names = names_in(node)
    if names & _ENDING_THE_RUN:
        return None
    if "Exception" in names:
        return chance.choice(_NO_EXCEPTIONS)
    return _unrelated(_ERRORS, names, chance)


def other_warning(node: ast.expr, chance: random.Random) -> str | None:
    names = names_in(node)
    return None if "Warning" in names else _unrelated(_WARNINGS, names, chance)


def other_type(node: ast.expr, seen: tuple[str, ...], chance: random.Random) -> str | None:
    """A type of which no instance of the type or types `node` is an instance. `seen` are names of the instance's types."""
    names = names_in(node) | {*seen}
    rare = not seen and not names.isdisjoint(_ABSTRACT)
    return _unrelated(_RARE_TYPES if rare else _TYPES, names - {"object"} if seen else names, chance)


def names_in(node: ast.expr) -> set[str]:
    """The last parts of the names in an expression: `E` of `module.E`."""
    return {
        part.id if isinstance(part, ast.Name) else part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Name | ast.Attribute)
    }


def _unrelated(choices: tuple[str, ...], names: set[str], chance: random.Random) -> str | None:
    classes = [getattr(builtins, name, None) for name in names]
    free = [
        name
        for name in choices
        if not any(
            _is_related(getattr(builtins, name), other) for other in classes if isinstance(other, type)
        )
    ]
    return chance.choice(free) if free else None


def _is_related(one: type, other: type) -> bool:
    return issubclass(one, other) or issubclass(other, one)


T = TypeVar("T")

# Calls that refuse numbers beyond a month, a day, or an hour: at the top level of a file, an error keeps all of its tests from running.
_MAKES_A_DATE = listed("date datetime time replace")
_MOST_BINDINGS = 3  # names that are followed to what they are bound to
_NARROW = 1e-2  # smaller tolerances do not include the observed near values
_CLEARLY = 0.05  # share of a number that is larger than what comparisons overlook
_HUGE = 1e200  # a number above this may overflow when multiplied
_SHARE_OF_CASE = 0.5  # share of the changes of a word's first letter that only change its case
# A text with this many letters, one of them changed, is unlikely to occur anywhere by chance.
_LONG_ENOUGH = 4

# Expressions whose value is equal only to itself, and cheap to compare and to print. None is an empty collection, because some checkers
# consider all of these equal. NUMBER and WORD are drawn.
_EQUAL_TO_NOTHING = (
    "object()",
    "iter([NUMBER])",
    "reversed([NUMBER])",
    "ValueError('WORD')",
    "KeyError('WORD')",
    "(lambda: NUMBER)",
    "type('WORD', (), {})()",
)
_WORDS = listed("""account address amber anchor answer apple author banana barrel basket blue border branch bridge button cabinet camera
    candle carbon castle cherry circle client cobalt copper corner cotton county crystal daily desert dragon eagle eleven engine
    fabric falcon farmer ferry filter finger flower folder forest garden ginger granite green guitar hammer harbour hazel honey
    island jacket jungle kettle ladder laptop lemon letter locker magnet maple marble market meadow mirror monday morning mountain
    napkin needle nickel number office olive orange orchid oyster paper parrot pencil pepper pickle pillow planet pocket potato
    purple rabbit record remote ribbon river rocket saddle salmon sample second shadow silver simple socket spider spring station
    summer sunday table temple thunder ticket tiger timber token tomato tunnel turtle valley velvet violet wallet walnut water
    weather window winter wizard yellow zebra""")
_EMPTY = {
    "set": "{NUMBER}",
    "dict": "{'WORD': NUMBER}",
    "list": "[NUMBER]",
    "tuple": "(NUMBER,)",
    "frozenset": "{NUMBER}",
}
# Text to append to a call of these functions to get another value of the type that they return.
_LONGER = {
    " + 1": listed("len sum int ord abs round count index"),
    " + 'WORD'": listed("str repr chr hex bin join format strip lower upper title replace dedent"),
    " + [NUMBER]": listed("list sorted splitlines split"),
}


class Values:
    """Draws values for one test file, without names that the file binds. In a text, letters that are not `met` are changed first."""

    def __init__(self, file: TestFile, names: Names, chance: random.Random, met: Cover) -> None:
        self._file = file
        self._met = met
        self._names = names
        self._chance = chance
        self._literals = Literals(file.tree)
        self._words = _words_by_form(file.tree)
        self._bound = _bound_names(file.tree)
        self._parts_of_dates = {
            id(part)
            for node in ast.walk(file.tree)
            if isinstance(node, ast.Call) and name_of_call(node) in _MAKES_A_DATE
            for part in (*node.args, *(keyword.value for keyword in node.keywords))
        }
        self._defined: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = defaultdict(list)
        for node in ast.walk(file.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._defined[node.name].append(node)

    def changed(self, leaf: ast.expr, site: Site, seen: Observed) -> str | None:
        """A replacement for the text at `leaf` that contradicts the comparison at `site`; None if there is none.

        `seen` are the observed values of the other operand.
        """
        match site.mode:
            case "error":
                return other_error(leaf, self._chance)
            case "warning":
                return other_warning(leaf, self._chance)
            case "type":
                return other_type(leaf, seen.types, self._chance)
            case "pattern":
                return self._other_pattern(leaf)
            case "under" | "over":
                return self._unreached(leaf, site, seen)
            case "close" if (number := number_of(leaf)) is not None and site.tolerance != math.inf:
                return self._far_from(leaf, number, site.tolerance, site.uncounted)
            case "close" if number_of(leaf) is not None:
                return None
            case "item":
                return self._other_item(leaf)
            case "container":
                return None  # the membership test may succeed through another element
            case "identical" if isinstance(leaf, ast.Constant) and leaf.value is None:
                return self.pick(["False", "True"])
            case _:
                return self._near(leaf)

    def observed_otherwise(
        self, node: ast.expr, site: Site, seen: Observed, compared: Observed
    ) -> str | None:
        """A replacement for an expression whose value was observed in a run, or whose type its last call determines."""
        text = self._file.text(node)
        if site.mode in ("under", "over"):
            return self._beyond(None, site.mode, compared)
        if site.mode in ("error", "warning", "type", "pattern", "item", "container"):
            return None
        if site.mode == "close" and (site.tolerance is None or site.tolerance > _NARROW):
            return None
        if seen.near:
            return self.pick(seen.near).replace(ORIGINAL, text)
        name = name_of_call(node)
        if site.mode == "equal" and name not in self._bound:
            for appended, makers in _LONGER.items():
                if name in makers:
                    return f"{text}{self._filled(appended)}"
        return None

    def equal_to_nothing(self) -> str:
        free = [form for form in _EQUAL_TO_NOTHING if not (_bound_in(form) & self._bound)]
        return self._filled(
            self._chance.choice(free if free and "*" not in self._bound else ["(lambda: NUMBER)"])
        )

    def word(self) -> str:
        """Two random words, joined; hardly any text contains them by coincidence."""
        one = self._chance.choice(_WORDS)
        return f"{one}{self._chance.choice(['_', '-', ' ', ''])}{self._chance.choice(_WORDS)}"

    def quoted(self, node: ast.expr) -> str:
        """A text, or bytes if the literal `node` is bytes, that occurs in no text by chance."""
        is_bytes = isinstance(node, ast.Constant) and isinstance(node.value, bytes)
        quote = self._file.text(node)[-1] if isinstance(node, ast.Constant) else "'"
        return f"{'b' if is_bytes else ''}{quote}{self.word()}{quote}"

    def small(self) -> str:
        return str(self._chance.randrange(2, 100))

    def unlike(self, node: ast.expr) -> str:
        """A value that occurs nowhere by chance, of the type of `node` if that is a number or a text."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            return self.quoted(node)
        return self.equal_to_nothing() if number_of(node) is None else str(self._chance.randrange(311, 9973))

    def pick(self, choices: Sequence[T]) -> T:
        return self._chance.choice(choices)

    def defines(self, name: str) -> bool:
        """Whether the file defines a function or method of this name, whose own expectations are contradicted."""
        return name in self._defined

    def returned(self, call: ast.Call) -> Iterator[ast.expr]:
        """What the function of the file that `call` calls returns, if only one has its name."""
        match self._defined.get(name_of_call(call), []):
            case [ast.FunctionDef() as function]:
                for node in ast.walk(function):
                    if isinstance(node, ast.Return) and node.value is not None:
                        yield node.value
            case _:
                return

    def is_result(self, node: ast.AST) -> bool:
        """Whether a value is computed by an imported function, or by a method of an object that imported code made."""
        return any(self._is_of_code(part, _MOST_BINDINGS) for part in ast.walk(node))

    def _is_of_code(self, node: ast.AST, depth: int) -> bool:
        """Whether a call is one of imported code, or a name is bound to the result of such a call, through at most `depth` names."""
        match node:
            case ast.Call(func=ast.Name(id=name) as function):
                return not name[:1].isupper() and self._is_imported(function)
            case ast.Call(func=ast.Attribute() as function):
                root = _root_of(function)
                return isinstance(root, ast.Name) and (self._is_imported(root) or self._is_made(root, depth))
            case ast.Name(ctx=ast.Load()) if depth:
                return any(
                    self._is_of_code(part, depth - 1)
                    for value in self._bound_to(node)
                    for part in ast.walk(value)
                )
            case _:
                return False

    def _is_made(self, name: ast.Name, depth: int) -> bool:
        """Whether a name is bound to an object of an imported class, or to a result of imported code."""
        return any(
            (
                isinstance(part, ast.Call)
                and isinstance(root := _root_of(part.func), ast.Name)
                and self._is_imported(root)
            )
            or (depth > 0 and self._is_of_code(part, depth - 1))
            for value in self._bound_to(name)
            for part in ast.walk(value)
        )

    def _bound_to(self, name: ast.Name) -> Iterator[ast.expr]:
        for binding in self._names.bindings_of(name):
            match self._names.parent(binding):
                case ast.Assign(value=value) | ast.NamedExpr(value=value) | ast.withitem(context_expr=value):
                    yield value
                case _:
                    pass

    def _is_imported(self, name: ast.Name) -> bool:
        return any(isinstance(one, ast.alias) for one in self._names.bindings_of(name))

    def is_checked_elsewhere(self, call: ast.Call) -> bool:
        """Whether a checker that tests keep in another file is called."""
        return is_checked_elsewhere(call, self._names)

    def _near(self, leaf: ast.expr) -> str | None:
        match leaf:
            case ast.List(elts=[]) | ast.Tuple(elts=[]) | ast.Dict(keys=[]):
                return self._filled(_EMPTY[type(leaf).__name__.lower()])
            case ast.Call(args=[], keywords=[], func=ast.Name(id=name)) if name in _EMPTY:
                return f"{name}({self._filled(_EMPTY[name])})"
            case ast.List() | ast.Set() | ast.Tuple():
                return self._shorter(leaf)
            case ast.Constant(value=bool()):
                return str(not leaf.value)
            case ast.Constant(value=None):
                return self.pick(["False", "0", "''", "[]"])
            case ast.Constant(value=str() | bytes()):
                return self._other_text(leaf, is_case_told=True) or self._longer_text(leaf)
            case ast.Constant(value=int() | float() | complex()):
                return self._other_text(leaf)
            case ast.JoinedStr():
                return self._other_f_string(leaf)
            case _:
                return None

    def _shorter(self, leaf: ast.List | ast.Set | ast.Tuple) -> str | None:
        """A collection without its last element; with that element twice if it has no other."""
        raw, start, last = self._file.text(leaf).encode(), self._file.start(leaf), leaf.elts[-1]
        at, end = self._file.start(last) - start, self._file.end(last) - start
        if len(leaf.elts) == 1 or isinstance(last, ast.Starred):
            element = raw[at:end].decode()
            is_plain = isinstance(last, ast.Name | ast.Attribute) and not isinstance(leaf, ast.Set)
            return f"{raw[:at].decode()}{element}, {element}{raw[end:].decode()}" if is_plain else None
        at = self._file.end(leaf.elts[-2]) - start
        if raw[at:end].count(b"(") != raw[at:end].count(b")") or b"#" in raw[at:end]:
            return None
        kept = re.sub(r"[^\r\n]", "", raw[at:end].decode())
        needs_comma = isinstance(leaf, ast.Tuple) and len(leaf.elts) == 2 and b"," not in raw[end:]
        return f"{raw[:at].decode()}{',' if needs_comma else ''}{kept}{raw[end:].decode()}"

    def _other_text(
        self, leaf: ast.Constant, *, is_case_told: bool = False, tolerance: float | None = None
    ) -> str | None:
        """Another literal of the same type that does not occur in its function and, for a number, is outside of the tolerance, if one is
        given. The one that keeps most of the relations to other literals is chosen.
        """
        others: dict[str, Value] = {}
        for becomes in self._spelled_otherwise(leaf, is_case_told=is_case_told):
            value = value_of(parse_expression(becomes))
            is_other = _differ(value, leaf.value, is_case_told=is_case_told)
            if value is None or not is_other or not self._literals.is_new(leaf, value):
                continue
            if id(leaf) in self._parts_of_dates and not _is_within(value, leaf.value):
                continue
            if tolerance is None or _is_outside(value, leaf.value, tolerance):
                others[becomes] = value
        start, text = self._file.start(leaf), self._file.text(leaf)
        unmet = {one: others[one] for one in others if not self._met.has(changed_span(start, text, one))}
        return self._most_plausible(leaf, unmet or others)

    def _most_plausible(self, leaf: ast.Constant, others: Mapping[str, Value]) -> str | None:
        """The first of other literals, given with their values, that keeps most of the relations to the literals around `leaf`."""
        num_lost = {one: self._literals.num_relations_lost(leaf, value) for one, value in others.items()}
        return min(num_lost, key=lambda one: num_lost[one], default=None)

    def _spelled_otherwise(self, leaf: ast.Constant, *, is_case_told: bool) -> Iterator[str]:
        """The literal with another letter or digit; a number also with one more digit, a text also with its letters rearranged."""
        text, is_number = self._file.text(leaf), not isinstance(leaf.value, str | bytes)
        if is_case_told and isinstance(leaf.value, str):
            yield from self._with_words_of_others(text, leaf.value)
        # A letter after a backslash is not changed: an unknown escape causes a warning, which may count as an error. Nor is one after
        # a percent sign: `%i` makes the same text as `%d`.
        places = [
            n
            for n, character in enumerate(text)
            if character in ALPHABETS and text[:n][-1:] not in ("\\", "%")
        ]
        start = self._file.start(leaf)
        spans = {n: (start + len(text[:n].encode()), start + len(text[: n + 1].encode())) for n in places}
        places = [n for n in places if not self._met.has(spans[n])] or places
        for place in self._chance.sample(places, min(len(places), 12)):
            others = ALPHABETS[text[place]].replace(text[place], "")
            if _is_first_letter(text, place) and is_case_told and self._chance.random() < _SHARE_OF_CASE:
                others = text[place].swapcase()
            for other in self._chance.sample(others, len(others) if is_number else 1):
                yield f"{text[:place]}{other}{text[place + 1 :]}"
        if isinstance(leaf.value, int) and text.isdigit():
            near = [leaf.value + step for step in range(-30, 31)]
            yield from (str(one) for one in sorted(near, key=lambda _: self._chance.random()) if one >= 0)
        if is_number:
            yield from (f"{digit}{text}" for digit in self._chance.sample("123456789", 9))
        elif is_case_told:
            yield from self._of_the_same_letters(text)

    def _with_words_of_others(self, text: str, value: str) -> Iterator[str]:
        """Yields a one-word text with the words of other texts of the same form: `11nd` for `11th`, if the file also contains `2nd`.

        Without them, code could try the few possible answers until its caller accepts one, and never meet a contradiction.
        """
        found = _ONE_WORD.fullmatch(value)
        words = sorted(self._words[_form(found)] - {found[2]}) if found is not None else []
        for word in self._chance.sample(words, min(len(words), 8)):
            assert found is not None
            before, _, after = text.rpartition(found[2])
            yield f"{before}{word}{after}"

    def _of_the_same_letters(self, text: str) -> Iterator[str]:
        """The literal with a word in another case, or with two words or two letters swapped."""
        words = [match.span() for match in re.finditer(r"(?<![\\%\w])[A-Za-z]{2,}(?!\w)", text)]
        for start, end in self._chance.sample(words, min(len(words), 4)):
            word = text[start:end]
            cases = dict.fromkeys((word.lower(), word.capitalize(), word.upper()))
            yield from (f"{text[:start]}{other}{text[end:]}" for other in cases if other != word)
        pairs = list(itertools.pairwise(words))
        for (start, end), (next_start, next_end) in self._chance.sample(pairs, min(len(pairs), 4)):
            between = text[end:next_start]
            yield f"{text[:start]}{text[next_start:next_end]}{between}{text[start:end]}{text[next_end:]}"
        places = [place for start, end in words for place in range(start, end - 1)]
        for place in self._chance.sample(places, min(len(places), 4)):
            yield f"{text[:place]}{text[place + 1]}{text[place]}{text[place + 2 :]}"

    def _longer_text(self, leaf: ast.Constant) -> str | None:
        """A text without letters, extended by one character."""
        text = self._file.text(leaf)
        quote = '"""' if text.endswith('"""') else "'''" if text.endswith("'''") else text[-1:]
        inside = text[: -len(quote)]
        if quote[:1] not in ("'", '"') or (len(inside) - len(inside.rstrip("\\"))) % 2:
            return None
        last = inside[-1:] if leaf.value and inside[-1:] in " -_.,:;/+*=#!?()[]<>" else ""
        for more in (last, *self._chance.sample("abcdeinorstx", 12)):
            value = value_of(parse_expression(f"{inside}{more}{quote}")) if more else None
            if value is not None and _differ(value, leaf.value) and self._literals.is_new(leaf, value):
                return f"{inside}{more}{quote}"
        return None

    def _other_f_string(self, leaf: ast.JoinedStr) -> str | None:
        text = self._file.text(leaf)
        places = [
            place for place in outside_braces(text) if text[place] in ALPHABETS and text[place - 1] != "\\"
        ]
        for place in self._chance.sample(places, min(len(places), 4)):
            other = self._chance.choice(ALPHABETS[text[place]].replace(text[place], ""))
            becomes = f"{text[:place]}{other}{text[place + 1 :]}"
            if parse_expression(becomes) is not None:
                return becomes
        return None if "\n" in text else f"{text} '{self._chance.choice('abcdeinorstx')}'"

    def _other_pattern(self, leaf: ast.expr) -> str | None:
        """A pattern with another letter or digit where it is literal; another word if it has none."""
        if not (isinstance(leaf, ast.Constant) and isinstance(leaf.value, str | bytes)):
            return None
        text = self._file.text(leaf)
        places = [] if "|" in text or "(?" in text else list(_plain_letters(text))
        # The first of equally plausible patterns is taken. Digits come first: the code under test computes numbers more often than words.
        letters = [place for place in places if not text[place].isdigit()]
        digits = [place for place in places if text[place].isdigit()]
        chosen = [
            place for some in (digits, letters) for place in self._chance.sample(some, min(len(some), 12))
        ]
        others: dict[str, Value] = {}
        for place in chosen:
            other = self._chance.choice(ALPHABETS[text[place]].replace(text[place], ""))
            becomes = f"{text[:place]}{other}{text[place + 1 :]}"
            value = value_of(parse_expression(becomes))
            if isinstance(value, str | bytes) and _differ(value, leaf.value):
                others[becomes] = value
        found = self._most_plausible(leaf, others)
        if found is not None:
            return found
        return None if "\n" in text else self.quoted(leaf)

    def _other_item(self, leaf: ast.expr) -> str | None:
        """An item with another letter if it is a text of several letters, otherwise another value that is unlikely to occur anywhere."""
        if not isinstance(leaf, ast.Constant) or leaf.value is None or isinstance(leaf.value, bool):
            return self._near(leaf) if isinstance(leaf, ast.JoinedStr) else None
        if isinstance(leaf.value, str | bytes):
            letters = [one for one in self._file.text(leaf) if one in ALPHABETS]
            near = self._other_text(leaf) if len(letters) >= _LONG_ENOUGH else None
            return near or (None if "\n" in self._file.text(leaf) else self.quoted(leaf))
        return str(self._chance.randrange(311, 9973)) + (".5" if isinstance(leaf.value, float) else "")

    def _far_from(
        self, leaf: ast.expr, number: float, tolerance: float | None, uncounted: float
    ) -> str | None:
        """A number outside any tolerance around the literal number, and of its magnitude if the tolerance is known."""
        value = abs(number)
        if value > _HUGE:
            return f"{self.small()}.0"
        if isinstance(leaf, ast.Constant) and tolerance is not None:
            near = self._other_text(leaf, tolerance=tolerance + uncounted)
            if near is not None:
                return near
        if tolerance is None:
            far = (value + 1) * self._chance.randrange(10**6, 10**7)
            return f"{far:.6e}" if isinstance(number, float) else str(int(far))
        offset = self._chance.randrange(1, 10) * max(1, 2 * tolerance)
        if isinstance(number, int):
            return str(int(value * self._chance.randrange(2, 10) + offset + 1))
        digits = len(self._file.text(leaf).partition(".")[2])
        return str(round(value * self._chance.randrange(3, 19) / 2 + offset, max(1, min(digits, 12))))

    def _unreached(self, leaf: ast.expr, site: Site, seen: Observed) -> str | None:
        number = number_of(leaf)
        is_positive = name_of_call(site.actual) in ("abs", "len") if site.actual is not None else False
        if site.mode == "under" and number and number > 0 and is_positive:
            return f"-{self._file.text(leaf)}"
        return None if number is None or abs(number) > _HUGE else self._beyond(number, site.mode, seen)

    def _beyond(self, bound: float | None, mode: str, seen: Observed) -> str | None:
        """A bound beyond all observed values: below them if values must be under the bound."""
        extreme = seen.low if mode == "under" else seen.high
        if extreme is None:
            extreme = bound
        if extreme is None or abs(extreme) > _HUGE:
            return None
        distance = 10 * max(1.0, abs((bound if bound is not None else extreme) - extreme), abs(extreme))
        distance *= self._chance.randrange(1, 10)
        far = extreme - distance if mode == "under" else extreme + distance
        return repr(int(far)) if isinstance(bound, int) or far == int(far) else f"{far:.6g}"

    def _filled(self, form: str) -> str:
        return form.replace("NUMBER", self.small()).replace("WORD", self._chance.choice(_WORDS))


def _root_of(node: ast.expr) -> ast.expr:
    """The expression of which `node` is an attribute, an element, or so on."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node


_ONE_WORD = re.compile(r"([^A-Za-z]*)([A-Za-z]+)([^A-Za-z]*)")


def _form(found: re.Match[str]) -> tuple[str, str]:
    """The text around the word in a match of _ONE_WORD, with 0 for each number."""
    return re.sub(r"\d+", "0", found[1]), re.sub(r"\d+", "0", found[3])


def _words_by_form(tree: ast.Module) -> dict[tuple[str, str], set[str]]:
    """The words of the file's one-word texts, by the text around them."""
    words: dict[tuple[str, str], set[str]] = defaultdict(set[str])
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = _ONE_WORD.fullmatch(node.value)
            if found is not None:
                words[_form(found)].add(found[2])
    return words


def outside_braces(text: str) -> Iterator[int]:
    """Offsets in the source of an f-string that are neither inside braces nor before its first quote."""
    opening = re.match(r"\w*['\"]+", text)
    depth, at = 0, opening.end() if opening else len(text)
    while at < len(text):
        if text[at : at + 2] in ("{{", "}}") and not depth:
            at += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth and text[at] not in "{}'\"":
            yield at
        at += 1


def _plain_letters(text: str) -> Iterator[int]:
    """Offsets of literal, required letters and digits in the source of a regular expression."""
    at, in_set = len(text) - len(text.lstrip("rRbBuU")), False
    while at < len(text):
        if text[at] == "\\":
            while text[at : at + 1] == "\\":
                at += 1
        elif text[at] in "[]":
            in_set = text[at] == "["
        elif text[at] == "{":
            at = text.find("}", at) if "}" in text[at:] else len(text)
        elif text[at] in ALPHABETS and not in_set and text[at + 1 : at + 2] not in ("?", "*", "{"):
            yield at
        at += 1


def number_of(node: ast.expr) -> float | int | None:
    """The value of a literal number with or without a sign."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = number_of(operand)
            return None if value is None else -value
        case _:
            return None


def has_literal(node: ast.expr) -> bool:
    """Whether the value is a literal, or a collection of literals."""
    match node:
        case ast.Constant(value=value):
            return value is not Ellipsis
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return has_literal(operand)
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return not elements or any(has_literal(element) for element in elements)
        case ast.Dict(keys=keys, values=values):
            return not keys or any(key is not None and has_literal(key) for key in (*keys, *values))
        case ast.JoinedStr():
            return True
        case _:
            return False


def _is_first_letter(text: str, place: int) -> bool:
    """Whether a word that is not all capitals starts at `place`."""
    is_start = text[place].isalpha() and not text[:place][-1:].isalnum()
    return is_start and not text[place + 1 : place + 2].isupper()


def _differ(one: object, other: object, *, is_case_told: bool = False) -> bool:
    if type(one) is not type(other) or one == other or one in (float("inf"), complex("inf")):
        return False
    return is_case_told or not isinstance(one, str) or str(one).casefold() != str(other).casefold()


def _is_within(value: Value, was: object) -> bool:
    """Whether `value` is certainly valid as a part of a date or time if `was` is valid. True if they are not numbers."""
    if not (isinstance(value, int | float) and isinstance(was, int | float)):
        return True
    return 1 <= value < was if was > 1 else value == was + 1


def _is_outside(one: object, other: object, tolerance: float) -> bool:
    """Whether a number is clearly not within the tolerance, absolute or relative, around another one."""
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return False
    size = max(abs(one), abs(other))
    return abs(one - other) > 3 * tolerance * max(1.0, size) + _CLEARLY * size


def _bound_in(form: str) -> set[str]:
    parsed = parse_expression(form)
    assert parsed is not None
    return {part.id for part in ast.walk(parsed) if isinstance(part, ast.Name)} - {"object"}


def _bound_names(tree: ast.Module) -> set[str]:
    """Names that the file binds anywhere; `*` if it imports all names of a module."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name.split(".")[0])
            case _:
                pass
    return names
