"""Every row is in the journal before a sink sees it, and TensorBoard shows steps and evaluations as curves."""

from pathlib import Path

from msgspec.structs import replace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.journal.reading import read
from pipeline.journal.rows import EvaluationRow, PublicationRow, Row, StepRow
from tests.trainer.records.test_console import JUDGED, TAUGHT, row
from trainer.recipe import AlarmsRecipe
from trainer.records.alarms import Alarms
from trainer.records.journal_writer import Journal
from trainer.records.points import Board
from trainer.records.sinks import Records


class Seen:
    """A sink that keeps what it is shown, and what the journal held at that moment."""

    def __init__(self, journal: Path) -> None:
        self.rows: list[Row] = []
        self.in_journal: list[int] = []
        self._journal = journal

    def show(self, row: Row) -> None:
        self.rows.append(row)
        self.in_journal.append(len(list(read(self._journal, StepRow))))


def evaluation(name: str, success: float, *, greedy: bool, step: int) -> EvaluationRow:
    return EvaluationRow(
        name=name,
        version=step,
        greedy=greedy,
        success=success,
        num_episodes=8,
        num_failed=0,
        step=step,
    )


def test_every_sink_sees_a_row_as_it_was_written_after_it_was_written(tmp_path: Path) -> None:
    first, second = Seen(tmp_path), Seen(tmp_path)
    with Journal(tmp_path) as journal:
        records = Records(journal, [first, second], Alarms(AlarmsRecipe(), max_lag_versions=4))
        records.append(row(1, 0.5))
        records.append(PublicationRow(version=1, step=1, num_bytes=1))
    assert first.rows == second.rows == [*read(tmp_path, StepRow), *read(tmp_path, PublicationRow)]
    assert all(row.at > 0 for row in read(tmp_path, StepRow)), "the time was filled in once, for all"
    assert first.in_journal == [1, 1]


def test_held_out_success_is_one_curve_from_before_to_after_sampled_and_greedy_apart(tmp_path: Path) -> None:
    with Board(tmp_path) as board:
        for step, name in ((0, "heldout_before"), (5, "heldout_step_5"), (9, "heldout_after")):
            board.show(evaluation(name, 0.1 * step, greedy=False, step=step))
            board.show(evaluation(name, 0.05 * step, greedy=True, step=step))
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    curves = {
        kind: [(point.step, round(point.value, 3)) for point in shown.Scalars(f"heldout/{kind}/success")]
        for kind in ("sampled", "greedy")
    }
    assert curves == {
        "sampled": [(0, 0.0), (5, 0.5), (9, 0.9)],
        "greedy": [(0, 0.0), (5, 0.25), (9, 0.45)],
    }
    assert "heldout/sampled/greedy" not in shown.Tags()["scalars"], "what the tag says is no curve"


def test_tensorboard_shows_no_log_prob_gap_where_it_was_not_measured(tmp_path: Path) -> None:
    with Board(tmp_path) as board:
        board.show(row(1, 0.5))
        board.show(replace(row(2, 0.5), logprob_gap_max=0.0, logprob_gap_mean=0.0, num_gap_tokens=0))
        board.show(replace(row(3, 0.5), logprob_gap_max=None, logprob_gap_mean=None, num_gap_tokens=0))
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert [point.step for point in shown.Scalars("train/logprob_gap_max")] == [1]
    assert [point.step for point in shown.Scalars("train/loss")] == [1, 2, 3]


def test_tensorboard_shows_outcome_and_process_apart_where_somebody_judges(tmp_path: Path) -> None:
    with Board(tmp_path) as board:
        board.show(row(1, 0.5))
        board.show(replace(row(2, 0.5), judging=JUDGED))
        board.show(replace(row(3, 0.5), judging=replace(JUDGED, score_mean=None)))
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert [point.step for point in shown.Scalars("train/reward_mean")] == [1, 2, 3]
    assert [point.step for point in shown.Scalars("judge/process_size")] == [2, 3]
    assert [point.step for point in shown.Scalars("judge/score_mean")] == [2], "no score is not a score of 0"


def test_tensorboard_shows_the_distance_from_a_teacher_where_there_is_one(tmp_path: Path) -> None:
    with Board(tmp_path) as board:
        board.show(row(1, 0.5))
        board.show(replace(row(2, 0.5), distillation=TAUGHT))
        board.show(replace(row(3, 0.5), distillation=replace(TAUGHT, reverse_kl=None)))
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert [point.step for point in shown.Scalars("distill/num_left_out")] == [2, 3]
    assert [point.step for point in shown.Scalars("distill/reverse_kl")] == [2], "nothing taught is not a distance of 0"
