"""The journal survives crashes, goes back to checkpoints and loses no line on the way."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.journal.reading import MalformedJournal, read
from pipeline.journal.rows import EndRow, EpisodeRow, EvaluationRow, Row, StepRow
from tests.trainer.small_disk import fill, small_disk
from trainer.learner.directories import DiskFull
from trainer.records.journal_writer import Journal
from trainer.records.points import Board


def episode(number: int) -> EpisodeRow:
    return EpisodeRow(
        request_id=f"request-{number}",
        group_id="group",
        task_id="task",
        purpose="train",
        member=number,
        group_size=8,
        fate="trained",
        reward=1.0,
        at=1.0,
    )


def step(number: int, *, loss: float = 0.5) -> StepRow:
    return StepRow(
        step=number,
        version=number - 1,
        loss=loss,
        grad_norm=1.0,
        lr=1e-5,
        reward_mean=0.5,
        num_trajectories=2,
        request_ids=("a", "b"),
        num_trained_tokens=10,
        num_unique_sampled_tokens=10,
        at=1.0,
    )


def write(directory: Path, *rows: Row) -> dict[str, int]:
    with Journal(directory) as journal:
        for row in rows:
            journal.append(row)
        return journal.checkpoint()


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    write(tmp_path, episode(0), step(1), episode(1))
    assert list(read(tmp_path, EpisodeRow)) == [episode(0), episode(1)]
    assert list(read(tmp_path, StepRow)) == [step(1)]


def test_a_row_without_a_time_gets_one(tmp_path: Path) -> None:
    row = EvaluationRow(name="x", version=0, greedy=True, success=1.0, num_episodes=1, num_failed=0)
    write(tmp_path, row)
    (found,) = read(tmp_path, EvaluationRow)
    assert found.at > 0


def test_a_resumed_run_goes_back_to_its_checkpoint_and_keeps_what_it_cut(tmp_path: Path) -> None:
    offsets = write(tmp_path, episode(0), step(1))
    write(tmp_path, episode(1), step(2))
    cut = [
        line
        for name in ("episodes", "steps")
        for line in (tmp_path / f"{name}.jsonl").read_bytes().splitlines()[1:]
    ]
    with Journal(tmp_path) as journal:
        moved = journal.truncate_to(offsets)
        journal.append(episode(2))
    assert list(read(tmp_path, EpisodeRow)) == [episode(0), episode(2)]
    assert list(read(tmp_path, StepRow)) == [step(1)]
    discarded = [
        (tmp_path / f"{name}.jsonl.discarded").read_bytes().rstrip(b"\n") for name in ("episodes", "steps")
    ]
    assert discarded == cut
    assert moved == sum(len(line) + 1 for line in cut)


def test_without_a_checkpoint_everything_is_cut(tmp_path: Path) -> None:
    write(tmp_path, episode(0))
    with Journal(tmp_path) as journal:
        journal.truncate_to({})
    assert list(read(tmp_path, EpisodeRow)) == []


def test_a_journal_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    offsets = write(tmp_path, episode(0))
    with (
        Journal(tmp_path / "another") as journal,
        pytest.raises(ValueError, match=r"episodes\.jsonl has 0 bytes"),
    ):
        journal.truncate_to(offsets)


def test_a_line_cut_short_by_a_crash_is_no_row(tmp_path: Path) -> None:
    write(tmp_path, episode(0))
    with (tmp_path / "episodes.jsonl").open("ab") as file:
        file.write(b'{"request_id": "requ')
    assert list(read(tmp_path, EpisodeRow)) == [episode(0)]
    write(tmp_path, episode(1))
    assert list(read(tmp_path, EpisodeRow)) == [episode(0), episode(1)]


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    write(tmp_path, episode(0))
    with (tmp_path / "episodes.jsonl").open("ab") as file:
        file.write(b'{"request_id": 7}\n')
    with pytest.raises(MalformedJournal, match=r"episodes\.jsonl, line 2: .*request_id"):
        list(read(tmp_path, EpisodeRow))


def test_a_row_of_a_later_release_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, episode(0))
    line = (tmp_path / "episodes.jsonl").read_bytes()
    (tmp_path / "episodes.jsonl").write_bytes(b'{"colour":"blue",' + line[1:])
    assert list(read(tmp_path, EpisodeRow)) == [episode(0)]


def test_the_board_shows_the_steps_and_forgets_those_taken_again(tmp_path: Path) -> None:
    board = Board(tmp_path)
    for number in (1, 2, 3):
        board.show(step(number, loss=number))
    board.close()
    resumed = Board(tmp_path, resumed_at=3)
    resumed.show(step(3, loss=30.0))
    resumed.close()
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert [(point.step, point.value) for point in shown.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]


def test_a_row_that_fills_the_disk_is_not_in_the_journal_and_the_next_one_is_whole(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 128 * 1024) as disk, Journal(disk / "journal") as journal:
        row = EndRow(step=1, version=1, reason="error", at=1.0, detail="x" * 5000)
        first = journal.append(row)
        fill(disk)
        with pytest.raises(
            DiskFull, match=f"the disk at {disk} is full, so {disk}/journal/endings.jsonl could"
        ):
            journal.append(row)
        (disk / "filler").unlink()
        assert journal.append(row) == first
        assert list(read(disk / "journal", EndRow)) == [row, row]
