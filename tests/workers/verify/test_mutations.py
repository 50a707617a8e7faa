"""How code is changed so that it is probably wrong: of everything that a test could notice, and on the lines of a fix alone."""

import ast

import pytest

from workers.verify.mutations import Mutated, Mutation, mutations

CASES: dict[Mutated, dict[str, set[str]]] = {
    "operator": {
        "x = a + b": {"x = a - b", "x = a * b", "x = a", "x = b"},
        "x = (a) % (b)": {"x = a // b", "x = a * b", "x = a", "x = b"},
        "x = a ** 2": {"x = a * 2", "x = a + 2", "x = a", "x = 2"},
        "x = a << b": {"x = a >> b", "x = a", "x = b"},
        "x = a & b": {"x = a | b", "x = a ^ b", "x = a", "x = b"},
        "x = (a\n     # the rest\n     - b) @ c": {
            *("x = (a + b) @ c", "x = a * b @ c", "x = a @ c", "x = b @ c"),
            *("x = (a - b) * c", "x = a - b", "x = c"),
        },
        "x = 'a' + b": {"x = 'a'", "x = b"},
        "x += b": {"x -= b", "x *= b", "x = b"},
        "x //= b": {"x /= b", "x *= b", "x = b"},
        "x += [b]": {"x = [b]"},
        "x = -a": {"x = a"},
        "x = not(a)": {"x = a"},
        "x = ~a": {"x = a"},
        "x = +a": {"x = -a"},
    },
    "comparison": {
        "x = a < b": {"x = a <= b", "x = a >= b"},
        "x = a == b != c": {"x = a != b != c", "x = a == b == c"},
        "x = a is not b": {"x = a is b"},
        "x = a in b or c": {"x = a not in b or c", "x = a in b and c"},
    },
    "condition": {
        "if a: b": {"if True:\n    b", "if False:\n    b", "if not a:\n    b"},
        "if a == b: c": {"if True:\n    c", "if False:\n    c"},
        "x = b if (a) else c": {"x = b if True else c", "x = b if False else c", "x = b if not a else c"},
        "while a: b": {"while False:\n    b", "while not a:\n    b"},
        "x = [a for a in b if c]": {f"x = [a for a in b if {one}]" for one in ("True", "False", "not c")},
        "x = a and (b or c) and d": {
            *("x = (b or c) and d", "x = a and d", "x = a and (b or c)", "x = a and b and d"),
            "x = a and c and d",
        },
    },
    "constant": {
        "x = 0": {"x = 1", "x = -1"},
        "x = 1.5": {"x = 2.5", "x = 0.5"},
        "x = True": {"x = False"},
        "x = None": {"x = True"},
        "x = ''": {"x = 'x'"},
        "x = b'ab'": {"x = b'abx'", "x = b''"},
        'x = """a"""': {"x = 'ax'", "x = ''"},
    },
    "argument": {
        "f(a, b)": {"f(b, a)"},
        "f((a), *b, c, d)": {"f(a, *b, d, c)"},
        "f(a, key=(b),)": {"f(a)"},
        "f(key=b,)": {"f()"},
        "f(k=a, *b, m=c, **d)": {"f(*b, m=c, **d)", "f(*b, k=a, **d)", "f(*b, k=a, m=c)"},
        "min(a, b)": set(),
    },
    "return": {
        "def f(): return g(a, b)": {"def f():\n    return None", "def f():\n    return a"},
        "def f(): return a.b()": {"def f():\n    return None", "def f():\n    return a"},
        "def f(): return a, b": {"def f():\n    return None"},
        "def f(): yield a": {"def f():\n    yield None"},
        "def f(): return": set(),
    },
    "subscript": {
        "x = a[b:c:d]": {"x = a[:c:d]", "x = a[b::d]", "x = a[b:c]"},
        "x = a[b]": {"x = a[b - 1]"},
        "x: List[b] = a[B]": set(),
    },
    "line": {"a = 1\nb = 2": {"a = 1", "b = 2"}, "if a:\n    b": {"if a:\n    pass", "pass"}},
}  # fmt: skip


def mutated(source: str, mutation: Mutation) -> str:
    text = source.encode()
    return (text[: mutation.start] + mutation.becomes + text[mutation.end :]).decode()


def made(source: str) -> list[Mutation]:
    """Mutations of code of which all lines are new."""
    lines = range(1, source.count("\n") + 2)
    return mutations(source.encode(), lines, lines)


@pytest.mark.parametrize(
    ("kind", "source"), [(kind, source) for kind, cases in CASES.items() for source in cases]
)
def test_each_part_of_the_code_is_changed(kind: Mutated, source: str) -> None:
    found = [mutated(source, one) for one in made(source) if one.kind == kind]
    assert {ast.unparse(ast.parse(one)) for one in found} == CASES[kind][source]
    assert len(found) == len(CASES[kind][source]), "none comes twice"


@pytest.mark.parametrize(
    "source",
    [
        'def f(x):\n    """Adds 1 + 1."""',
        "raise ValueError('below', 0 if a < b else 1 + 1)",
        "log.warning('%s of %s', a + b, 3)",
        "warnings.warn('old' + 'er')",
        "def f(a: int | None, *, b: 'B' = c) -> list[int] | None: ...",
        "f'{a + 1} of {b[0]}'",
        "__version__ = '1.12.0'",
    ],
)
def test_what_no_test_reads_is_left_alone(source: str) -> None:
    assert {one.kind for one in made(source)} <= {"line"}


def test_the_message_of_an_assertion_is_left_alone() -> None:
    assert [one.what for one in made("assert a, 'b' + str(1)")] == ["line left out: assert a, 'b' + str(1)"]


def test_only_what_stands_on_changed_lines_alone_is_changed() -> None:
    source = "x = (\n    a + 1\n    + b * 2\n)\ny = c - 3\n"
    assert {one.what for one in mutations(source.encode(), {3}, ())} == {
        "+ becomes -", "+ becomes *", "+ b * 2 left out", "* becomes +", "* becomes /", "b * left out",
        "* 2 left out", "2 becomes 3", "2 becomes 1",
    }  # fmt: skip
