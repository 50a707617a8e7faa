"""Examples in a text file: right code fails each contradiction of their output, and their input stays."""

import doctest
import random

from workers.grading.controls.text_files import doctest_candidates, in_other_examples

TEXT = """
Größe
=====

>>> add(1, 2)
3
>>> for word in words():
...     print(word)
first 0
  zweites ä
>>> add(1, "a")
Traceback (most recent call last):
  File "x", line 4
TypeError: bad types
>>> add(1, 3)  # doctest: +SKIP
5
>>> add(object(), None)  # doctest: +ELLIPSIS
<object ...>
>>> add(10, 1.0)
11.0
>>> add(1, 2) == 3
True
"""


def add(one: object, other: object) -> object:
    if isinstance(one, int) and isinstance(other, int | float):
        return one + other
    if other is None:
        return one
    raise TypeError("bad types")


def num_failures(text: str) -> int:
    names = {"add": add, "words": lambda: ["first 0", "  zweites ä"]}
    test = doctest.DocTestParser().get_doctest(text, names, "doc.rst", None, 0)
    return doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed


def test_right_code_fails_one_example_of_each_contradiction() -> None:
    assert num_failures(TEXT) == 0
    found = [
        one for seed in range(20) for one in doctest_candidates(TEXT.encode(), "doc.rst", random.Random(seed))
    ]
    lines: set[int] = set()
    for candidate in found:
        (edit,) = candidate.edits
        source = TEXT.encode()
        text = (source[: edit.start] + edit.becomes.encode() + source[edit.end :]).decode()
        lines.add(source[: edit.start].count(b"\n"))
        assert (candidate.tests, candidate.kind) == (("doc.rst",), "value")
        assert num_failures(text) == 1, text
        assert "11.00" not in text
        assert text.splitlines()[21] in ("True", "False")
    assert lines == {5, 8, 9, 13, 19, 21}


def test_a_file_without_examples_has_no_contradictions() -> None:
    for text in (b"", b"no example", b"\xff", b">>> f()\n", b">>>f()\n3\n"):
        assert doctest_candidates(text, "doc.rst", random.Random(0)) == []


def test_the_places_of_other_examples_than_the_one_that_failed_are_known() -> None:
    text = TEXT.encode()
    offsets = [text.index(want) for want in (b"3\n", b"first 0", b"TypeError", b"11.0", b"True")]
    assert in_other_examples(text, [7], offsets) == [True, False, True, True, True]
    assert in_other_examples(text, [7, 19], offsets) == [True, False, True, False, True]
    assert in_other_examples(text, [], offsets) == in_other_examples(text, [6], offsets) == [False] * 5
