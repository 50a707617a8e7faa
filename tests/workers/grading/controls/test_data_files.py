"""Data files that hold what tests expect, and what is changed in them."""

from workers.grading.controls.text_files import data_edits, data_files
from workers.grading.controls.values import Observed

GOLDEN = Observed(files=("golden.txt",))


def changed(text: str) -> list[str]:
    found = data_edits(text.encode())
    return [f"{text[: one.start]}{one.becomes}{text[one.end :]}" for one in found]


def test_one_digit_or_letter_becomes_another() -> None:
    assert changed('{"sum": 41, "is": true}') == ['{"sum": 42, "is": true}', '{"sun": 41, "is": true}']
    assert changed("9") == ["8"]


def test_what_the_tests_say_themselves_stays_where_there_is_anything_else() -> None:
    sums = b"3 + 1 = 4\n10 + 5 = 15\n"
    found = data_edits(sums, b"assert f'{a} + {b} = {add(a, b)}' for a, b in ((3, 1), (10, 5))")
    assert [(sums[one.start : one.end], one.becomes) for one in found] == [(b"4", "5"), (b"5", "6")]
    assert [one.becomes for one in data_edits(b"9", b"[9]")] == ["8"]


def test_escapes_words_of_formats_and_short_words_stay() -> None:
    assert changed(r'["\u0041\n", true, null, a]') == []


def test_what_is_no_text_stays() -> None:
    assert data_edits(b"word\0word") == []
    assert data_edits(b"word \xff") == []
    assert data_edits(b"word " * 300_000) == []


def test_a_file_that_an_expectation_alone_opens_is_found() -> None:
    observed = {"test.py": {(0, 40): GOLDEN, (10, 20): GOLDEN, (12, 15): GOLDEN, (22, 30): Observed()}}
    assert data_files(observed, {"test.py": [(10, 20)]}) == ["golden.txt"]


def test_a_file_that_anything_else_opens_is_none() -> None:
    observed = {"test.py": {(10, 20): GOLDEN, (22, 30): GOLDEN}, "other.py": {}}
    assert data_files(observed, {"test.py": [(10, 20)]}) == []
    assert data_files(observed, {"test.py": [(10, 20), (22, 30)]}) == ["golden.txt"]
    assert data_files(observed | {"other.py": {(10, 20): GOLDEN}}, {"test.py": [(10, 20), (22, 30)]}) == []
    assert data_files(observed, {"gone.py": [(10, 20)], "test.py": [(1, 2)]}) == []
