"""The book of candidates: what a kill leaves, who may have it, and the funnel."""

import resource
from pathlib import Path

import pytest

from workers.making.candidates import CandidateBook, Settings, TaskCandidate, funnel
from workers.making.from_git import LABELS

SETTINGS = Settings(repository="/calc", options={"--min-words": "8"})
ONE = TaskCandidate(sha="a" * 40, stage="seen", outcome="fallen", reason="changes no tests")
TWO = TaskCandidate(sha="b" * 40, stage="problem", outcome="open")


def test_what_a_killed_process_left_is_read_and_an_incomplete_line_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "candidates.jsonl"
    book = CandidateBook.open(path, SETTINGS)
    book.enter(ONE)
    book.enter(TWO)
    book.close()
    whole = path.read_bytes()
    for cut in range(1, len(whole), 9):
        path.write_bytes(whole[:cut])
        book = CandidateBook.open(path, SETTINGS)
        for one in (ONE, TWO):
            if one.sha not in book.candidates:
                book.enter(one)
        book.close()
        assert path.read_bytes() == whole


def test_a_line_for_which_the_disk_has_no_room_leaves_nothing_of_itself(tmp_path: Path) -> None:
    book = CandidateBook.open(tmp_path / "candidates.jsonl", SETTINGS)
    book.enter(ONE)
    whole = book.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            book.enter(TWO)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert book.path.read_bytes() == whole
    assert TWO.sha not in book.candidates
    book.enter(TWO)  # by another job, once there is room
    book.close()
    assert [*CandidateBook.read(book.path).candidates] == [ONE.sha, TWO.sha]


def test_the_last_line_of_a_commit_counts_and_the_order_is_that_of_the_first(tmp_path: Path) -> None:
    book = CandidateBook.open(tmp_path / "candidates.jsonl", SETTINGS)
    for one in (ONE, TWO, TaskCandidate(sha=ONE.sha, stage="strong", outcome="kept")):
        book.enter(one)
    book.close()
    again = CandidateBook.read(book.path)
    assert [(one.sha[0], one.outcome) for one in again.candidates.values()] == [("a", "kept"), ("b", "open")]


def test_a_book_is_for_one_process_and_for_the_same_options(tmp_path: Path) -> None:
    path = tmp_path / "candidates.jsonl"
    book = CandidateBook.open(path, SETTINGS)
    with pytest.raises(ValueError, match="another command works on"):
        CandidateBook.open(path, SETTINGS)
    book.close()
    with pytest.raises(ValueError, match=r"--min-words: .* was made with 8: give the same"):
        CandidateBook.open(path, Settings(repository="/calc", options={"--min-words": "9"}))
    with pytest.raises(ValueError, match="is of /calc: choose another directory"):
        CandidateBook.open(path, Settings(repository="/other", options=SETTINGS.options))
    path.write_bytes(path.read_bytes() + b"{}\n")
    with pytest.raises(ValueError, match=r"candidates.jsonl:2: .*`sha`"):
        CandidateBook.open(path, SETTINGS)


def test_the_funnel_counts_each_step_with_reasons_and_an_example(tmp_path: Path) -> None:
    book = CandidateBook.open(tmp_path / "candidates.jsonl", SETTINGS)
    for one in (
        ONE,
        TWO,
        TaskCandidate(sha="c" * 40, stage="built", outcome="fallen", reason="is not ok", detail="a\nb"),
        TaskCandidate(sha="d" * 40, stage="problem", outcome="failed", reason="could not be built or run"),
        TaskCandidate(sha="e" * 40, stage="strong", outcome="kept"),
    ):
        book.enter(one)
    book.close()
    assert list(funnel(book, LABELS)) == [
        "      5  commits seen",
        "         -1  changes no tests (such as aaaaaaaaaaaa)",
        "      4  change code and tests",
        "      4  have a problem",
        "         -1  not tried yet (such as bbbbbbbbbbbb)",
        "         -1  to be tried again: could not be built or run (such as dddddddddddd)",
        "      2  built and run",
        "         -1  is not ok (such as cccccccccccc: a␊b)",
        "      1  verified",
        "      1  controls say enough",
        "      1  do not leak",
        "      1  strong enough",
        "      1  kept",
    ]
