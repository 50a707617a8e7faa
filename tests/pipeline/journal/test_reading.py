"""Whoever reads a journal gets its whole rows, whatever else is in the files and whatever its trainer does meanwhile."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from pipeline.journal import reading
from pipeline.journal.reading import (
    MalformedJournal,
    NoJournal,
    RowFile,
    found_journal,
    identity,
    last_row,
    mentioning,
    read,
)
from pipeline.journal.rows import FATES, FILES, JUDGEMENT_FATES, EpisodeRow, Fate, JudgementFate, Row, StepRow
from tests.pipeline.journal_rows import made, write

HOSTILE = {
    "no JSON": b"no JSON",
    "another type": b"[7]",
    "a field of another type": b'{"step": "seven"}',
    "a missing field": b'{"step": 7}',
    "zeros that a crash left": b"\0" * 512,
    "no Unicode": msgspec.json.encode(made(EpisodeRow, request_id="r")).replace(b'"r"', b'"\xff"'),
    "a number that is none": b'{"step": 1e999}',
    "a time that is no date": msgspec.json.encode(made(StepRow, at=9.0)).replace(b"9.0", b"1e300"),
    "lists without an end": b'{"nested": ' + b"[" * 100_000,
    "two rows that a crash made one": msgspec.json.encode(made(StepRow)) * 2,
}


def torn(tmp_path: Path, kind: type[Row], line: bytes) -> None:
    """A file of two rows with this line between them."""
    write(tmp_path, made(kind))
    with (tmp_path / "journal" / FILES[kind]).open("ab") as file:
        file.write(line + b"\n")
    write(tmp_path, made(kind))


@pytest.mark.parametrize("kind", [EpisodeRow, StepRow])
@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_a_line_that_is_no_row_is_passed_over_or_named(tmp_path: Path, kind: type[Row], line: bytes) -> None:
    torn(tmp_path, kind, line)
    directory = tmp_path / "journal"
    file = RowFile(directory / FILES[kind], kind)
    file.read(10**9)
    if not _is_row(line, kind):
        assert len(file.rows) == len(list(mentioning(directory, kind, ""))) == 2
        with pytest.raises(MalformedJournal, match=f"{FILES[kind]}, line 2: "):
            list(read(directory, kind))
    assert last_row(directory, kind) == made(kind)


def _is_row(line: bytes, kind: type[Row]) -> bool:
    """Some of the lines are whole rows of the other kind."""
    try:
        msgspec.json.decode(line, type=kind)
    except (ValueError, RecursionError):
        return False
    return True


def test_a_line_that_is_too_long_is_passed_over_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MAX_LINE_BYTES", 4000)
    torn(tmp_path, StepRow, b'{"step": ' + b"7" * 10_000)
    file = RowFile(tmp_path / "journal" / FILES[StepRow], StepRow)
    file.read(10**9)
    assert file.rows == [made(StepRow), made(StepRow)]


def test_only_what_was_appended_is_read_again_and_half_a_row_waits(tmp_path: Path) -> None:
    write(tmp_path, made(StepRow, step=1))
    file = RowFile(tmp_path / "journal" / FILES[StepRow], StepRow)
    first = file.read(10**9)
    assert file.read(10**9) == 0
    line = msgspec.json.encode(made(StepRow, step=2)) + b"\n"
    with (tmp_path / "journal" / FILES[StepRow]).open("ab", buffering=0) as trainer:
        trainer.write(line[:9])
        assert file.read(10**9) == 0
        trainer.write(line[9:])
        assert file.read(10**9) == len(line)
    assert [row.step for row in file.rows] == [1, 2]
    assert file.progress == (first + len(line), first + len(line))
    assert file.generation == 0


def test_a_file_that_a_resume_cut_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "journal" / FILES[StepRow]
    write(tmp_path, made(StepRow, step=1), made(StepRow, step=2))
    file = RowFile(path, StepRow)
    file.read(10**9)
    first, second = path.read_bytes().splitlines(keepends=True)
    reading.discarded(path).write_bytes(second)
    path.write_bytes(first)
    write(tmp_path, made(StepRow, step=3))
    file.read(10**9)
    assert ([row.step for row in file.rows], file.generation) == ([1, 3], 1)


def test_rows_are_found_by_what_they_mention(tmp_path: Path) -> None:
    write(tmp_path, *(made(EpisodeRow, request_id=name) for name in ("a1", "b1", "a2")))
    found: Iterator[EpisodeRow] = mentioning(tmp_path / "journal", EpisodeRow, "a")
    assert [row.request_id for row in found if row.request_id.startswith("a")] == ["a1", "a2"]


def test_a_run_without_a_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoJournal, match=r"holds no journal with episodes\.jsonl"):
        found_journal(tmp_path, EpisodeRow)
    assert list(read(tmp_path, EpisodeRow)) == list(mentioning(tmp_path, EpisodeRow, "")) == []


@pytest.mark.parametrize("text", ["", "[]", '{"run_id": 7}', "\udc80"])
def test_a_directory_without_an_identity_of_its_own_is_called_by_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.json").write_text(text, errors="surrogateescape")
    assert identity(tmp_path / "mine").run_id == "mine"
    (tmp_path / "mine" / "run.json").write_text('{"run_id": "theirs"}')
    assert identity(tmp_path / "mine").run_id == "theirs"


def test_every_fate_has_a_sentence() -> None:
    assert set(FATES) == set(get_args(Fate))
    assert set(JUDGEMENT_FATES) == set(get_args(JudgementFate))
