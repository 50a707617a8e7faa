"""Repositories in Python: names and eval scripts."""

import pytest

from workers.making.ecosystems.python import ECOSYSTEM as PYTHON


def test_an_eval_script_names_its_tests_safely() -> None:
    assert PYTHON.eval_script(["tests/test_a.py"], ["tests/test_a.py::test_x[$(x)]"]) == (
        "#!/bin/bash\ncd /workspace || exit 1\n"
        "python3 -m pytest '--deselect=tests/test_a.py::test_x[$(x)]' tests/test_a.py\n"
    )


def test_a_test_module_is_no_option() -> None:
    assert PYTHON.eval_script(["-p_test.py"]).endswith("pytest ./-p_test.py\n")


def test_tests_whose_names_begin_like_one_that_is_left_out_still_run() -> None:
    modules, out = ["tests/test_a.py"], ["tests/test_a.py::test_x"]
    begin = "#!/bin/bash\ncd /workspace || exit 1\npython3 -m pytest "
    more = ["tests/test_a.py::test_x_more", "tests/test_a.py::test_y"]
    assert PYTHON.eval_script(modules, out, more) == f"{begin}{more[0]} {more[1]}\n"
    assert PYTHON.eval_script(modules, out, more[1:]) == f"{begin}--deselect={out[0]} {modules[0]}\n"
    elsewhere = PYTHON.eval_script(modules, ["test_a.py::test_x"], ["test_a.py::test_x_more"])
    assert elsewhere == f"{begin}--deselect=test_a.py::test_x {modules[0]}\n"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("raise ValueError('a')", "raise ValueError('b')", False),
        ("log.warning('a')", "log.warning('b')", False),
        ('"""A."""\n    return x', '"""B."""  # one\n\n    return (x)', True),
        ("return x", "return y", False),
    ],
)
def test_tests_notice_messages_and_no_docstrings(one: str, other: str, same: bool) -> None:
    meanings = [PYTHON.meaning(f"def f(x):\n    {text}\n".encode()) for text in (one, other)]
    assert None not in meanings
    assert (meanings[0] == meanings[1]) is same


def test_names_are_those_of_all_kinds_and_none_of_what_does_not_parse() -> None:
    source = b"import a.b as c\ndef f(x, *, y=1):\n    return x.z(k=y)\n"
    assert PYTHON.names(source) >= {"a", "b", "c", "f", "x", "y", "z", "k"}
    assert PYTHON.names(b"def (") == frozenset()


def test_declarations_are_those_of_a_module_and_its_classes_without_bodies_and_values() -> None:
    source = b"""
LIMIT = 3
try:
    import fast
except ImportError:
    fast = None

class Price(Base):
    currency: str = "EUR"

    def __init__(self, cents: int, *, percent=10, **more):
        self.cents = cents

    async def sum(self, other=None, /): ...

def wrap(function):
    def wrapper(): ...
    wrapper.calls = 0
    return wrapper
"""
    assert [(one.name, one.text, one.owner) for one in PYTHON.declarations(source)] == [
        ("LIMIT", "`LIMIT`", ""),
        ("fast", "`fast`", ""),
        ("Price", "`class Price(cents, *, percent=..., **more)`", ""),
        ("currency", "`currency`", "Price"),
        ("__init__", "`def __init__(self, cents, *, percent=..., **more)`", "Price"),
        ("cents", "attribute `cents`", "Price"),
        ("sum", "`async def sum(self, other=..., /)`", "Price"),
        ("wrap", "`def wrap(function)`", ""),
        ("calls", "attribute `calls`", "wrapper"),
    ]
    assert list(PYTHON.declarations(b"def (")) == []


@pytest.mark.parametrize(
    ("parameters", "called"),
    [
        ("self, a", "a"),
        ("selfish, a", "a"),
        ("self, /, a=1", "a=..."),
        ("self=None", ""),
        ("*args", "*args"),
        ("", ""),
    ],
)
def test_a_class_is_called_without_what_its_call_does_not_give(parameters: str, called: str) -> None:
    source = f"class A:\n    def __init__({parameters}): ...\n"
    assert next(PYTHON.declarations(source.encode())).text == f"`class A({called})`"
