"""Repositories in Python: names and eval scripts."""

from workers.making.ecosystems.python import ECOSYSTEM as PYTHON


def test_an_eval_script_names_its_tests_safely() -> None:
    assert PYTHON.eval_script(["tests/test_a.py"], ["tests/test_a.py::test_x[$(x)]"]) == (
        "#!/bin/bash\ncd /workspace || exit 1\n"
        "python3 -m pytest '--deselect=tests/test_a.py::test_x[$(x)]' tests/test_a.py\n"
    )


def test_names_are_those_of_all_kinds_and_none_of_what_does_not_parse() -> None:
    source = b"import a.b as c\ndef f(x, *, y=1):\n    return x.z(k=y)\n"
    assert PYTHON.names(source) >= {"a", "b", "c", "f", "x", "y", "z", "k"}
    assert PYTHON.names(b"def (") == frozenset()
