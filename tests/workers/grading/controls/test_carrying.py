"""What says an expected value beside the code says the other value in a control run."""

import random

import pytest

from workers.grading.controls.carrying import saying
from workers.grading.controls.spans import Candidate, read
from workers.grading.controls.writing import candidates


def edited(text: str, candidate: Candidate) -> str:
    file = read(text.encode())
    assert file is not None
    return file.apply(candidate.edits).decode()


def contradicted(text: str, literal: str) -> list[tuple[str, Candidate, str]]:
    """What the literal becomes, the candidate and the file under it."""
    place = len(text[: text.index(literal)].encode())
    found = [one for seed in range(5) for one in candidates(text.encode(), random.Random(seed))]
    return [(one.edits[0].becomes, one, edited(text, one)) for one in found if one.edits[0].start == place]


TEXT = '''
def test_returns_hello():
    """Expect hello, not hellos."""
    given = "hello 4"  # hello comes back
    assert code(given) == "hello", f"no hello but {given}"


class Test:
    def test_other(self):
        """Is hello here."""
        self.assertEqual(code(), ["hello"], msg="hello is missing")
'''


def test_a_text_is_said_otherwise_in_name_docstring_comment_and_message_but_never_in_an_input() -> None:
    found = contradicted(TEXT, '"hello", f')
    assert found
    for becomes, one, text in found:
        word = becomes.strip('"')
        assert one.tests == ("test_returns_hello",)
        assert one.renamed == {"test_returns_hello": f"test_returns_{word}"}
        assert text == (
            TEXT.replace("test_returns_hello", f"test_returns_{word}")
            .replace("Expect hello,", f"Expect {word},")
            .replace("# hello", f"# {word}")
            .replace('== "hello", f"no hello but', f'== "{word}", f"no {word} but')
        )


def test_what_other_tests_say_stays() -> None:
    for becomes, _, text in contradicted(TEXT, '"hello"], msg'):
        word = becomes.strip('"')
        assert f'["{word}"], msg="{word} is missing"' in text
        assert f"Is {word} here." in text
        assert text.split("class Test")[0] == TEXT.split("class Test")[0]


def test_a_number_is_said_in_digits_and_in_words() -> None:
    text = (
        "def test_four_of_14():\n    # Four or FOUR, not fourteen, 44, 4.5 or x4\n"
        "    assert code(14, 'four') == 4, 'not 4.'\n"
    )
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    for becomes, one, other in contradicted(text, "4, 'not"):
        number = int(becomes)
        word = words[number] if number < len(words) else becomes
        assert one.renamed == {"test_four_of_14": f"test_{word}_of_14"}
        assert other == (
            f"def test_{word}_of_14():\n    # {word.capitalize()} or {word.upper()}, not fourteen, 44, 4.5 or x4\n"
            f"    assert code(14, 'four') == {becomes}, 'not {becomes}.'\n"
        )


@pytest.mark.parametrize(
    "use",
    ["NAMES = ['test_4']", "def test_5_to_99(): pass\n# test_4", "PATH = 'file.py::test_4'"],
)
def test_a_test_that_a_text_names_keeps_its_name(use: str) -> None:
    text = f"{use}\n\ndef test_4():\n    assert code() == 4  # 4\n"
    found = contradicted(text, "4  # 4")
    assert found
    for becomes, one, other in found:
        assert not one.renamed
        assert f"def test_4():\n    assert code() == {becomes}  # {becomes}" in other


def test_calls_of_a_renamed_test_are_renamed_and_so_is_what_inherits_it() -> None:
    text = (
        "class A(TestCase):\n    def test_4(self):\n        assert code() == 4 \n\nclass B(A):\n"
        "    def test_more(self):\n        self.test_4()\n"
    )
    for becomes, one, other in contradicted(text, "4 \n"):
        assert one.renamed == {"A::test_4": f"A::test_{becomes}", "B::test_4": f"B::test_{becomes}"}
        assert f"self.test_{becomes}()" in other
        assert "test_4" not in other


def test_comments_beside_a_row_say_its_value() -> None:
    text = (
        "ROWS = [\n    ('a', 31),  # 31\n    ('b', 32),  # 32, not 31\n]\n\n"
        "def test_it():\n    for a, b in ROWS:\n        assert code(a) == b\n"
    )
    for becomes, _, other in contradicted(text, "31),"):
        assert other == text.replace("31),  # 31", f"{becomes}),  # {becomes}")


@pytest.mark.parametrize(
    ("was", "becomes", "text", "said"),
    [
        (4, 5, "x4 4x 4.5 14 -4 4. (4)", "x4 4x 4.5 14 -5 5. (5)"),
        (20, 21, "twenty Twenty", "21 21"),
        (1.5, 1.7, "1.5 11.5 1.55", "1.7 11.5 1.55"),
        ("a", "b", "a b", "a b"),
        ("it's", "it'z", "it's", "it's"),
        (True, False, "True", "True"),
        (None, 0, "None", "None"),
    ],
)
def test_only_whole_words_are_said_otherwise(was: object, becomes: object, text: str, said: str) -> None:
    assert saying(was, becomes).in_text(text) == said
