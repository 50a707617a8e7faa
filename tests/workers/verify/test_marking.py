"""Marks that leave a test file what it is."""

import ast
from pathlib import Path

import pytest

from workers.grading.controls.spans import read
from workers.verify.observing import mark
from workers.verify.recorder.recording import SEE


def marked(text: str, *expressions: str) -> str:
    """The text with these expressions marked, or all."""
    file = read(text.encode())
    assert file is not None
    nodes = [node for node in ast.walk(file.tree) if isinstance(node, ast.expr)]
    wanted = [node for node in nodes if not expressions or file.text(node) in expressions]
    content = text.encode()
    found = mark(content, [(file.start(node), file.end(node)) for node in wanted], 5)
    for edit in reversed(found.edits):
        content = content[: edit.start] + edit.becomes.encode() + content[edit.end :]
    return content.decode().replace(SEE, "see")


def test_an_expression_becomes_the_argument_of_a_call() -> None:
    assert marked("assert f(x) == 4\n", "f(x)") == "assert see(5)((f(x))) == 4\n"
    assert marked("assert f(x) == 4\n", "x", "f(x)", "f(x) == 4") == (
        "assert see(6)((see(5)((f(see(7)((x))))) == 4))\n"
    )
    assert marked("return_ = 1, 2\n", "1, 2") == "return_ = see(5)((1, 2))\n"
    assert marked("x = 1 in(1, 2)\n", "(1, 2)") == "x = 1 in see(5)(((1, 2)))\n"
    assert marked("x = f(\n    1,\n)\n", "f(\n    1,\n)") == "x = see(5)((f(\n    1,\n)))\n"


@pytest.mark.parametrize(
    "text",
    [
        '"""Doc."""\n',
        "def f(a: int) -> str:\n    'Doc.'\n",
        "for a, b.c in ():\n    pass\n".replace("()", "(yield)"),
        "a: int\n",
        "del a\n",
    ],
)
def test_documentation_annotations_and_targets_stay(text: str) -> None:
    marked_text = marked(text)
    assert marked_text.replace("see(5)((b))", "b") == text


@pytest.mark.parametrize(
    "path", [path for path in Path(__file__).parent.glob("test_*.py")], ids=lambda path: path.name
)
def test_all_expressions_of_a_file_can_be_marked(path: Path) -> None:
    text = path.read_text()
    result = marked(text)
    assert "see(" in result
    assert result.count("\n") == text.count("\n")


def test_what_is_no_python_is_left_alone() -> None:
    assert mark(b"assert (", [(0, 8)], 0).edits == []
    assert mark(b"\xff", [(0, 1)], 0).edits == []
    assert mark(b"assert x\n", [(0, 6), (2, 99)], 0).edits == []
