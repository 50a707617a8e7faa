"""What the report says of cut contexts, and of what cuts and samples of single turns cost."""

from pathlib import Path

import pytest

from pipeline.journal.rows import StepRow
from tests.trainer.trajectories import head
from trainer.records.journal_writer import Journal, episode_row
from trainer.report import __main__ as report
from trainer.report.summary import ContextCosts, summarize


def write(directory: Path, *, tells: bool) -> None:
    """Two episodes, of which the first was cut before three turns, and the step that trained them as five samples."""
    costs = {"num_samples": 5, "num_sample_tokens": 2500, "num_unique_tokens": 1000}
    step = StepRow(
        step=1,
        version=0,
        loss=0.0,
        grad_norm=1.0,
        lr=1e-5,
        reward_mean=0.5,
        num_trajectories=2,
        request_ids=("r0.0", "r0.1"),
        num_trained_tokens=4,
        num_unique_sampled_tokens=4,
        **(costs if tells else {}),
    )
    with Journal(directory / "journal") as journal:
        for number, cuts in enumerate(({"num_cuts": 3, "repeated_tokens": 90}, {})):
            counts = cuts | {"num_tokens": 500} if tells else {}
            journal.append(episode_row(head(0, number, group_size=2, **counts), "trained", cursor=0))
        journal.append(step)


def lines(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    report.main([str(directory)])
    printed = capsys.readouterr().out.splitlines()
    return [line.partition("context")[2].strip() for line in printed if line.startswith("context ")]


def test_what_was_cut_and_what_it_cost_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, tells=True)
    assert summarize(tmp_path).context == ContextCosts(
        num_cut_episodes=1,
        num_cuts=3,
        repeated_tokens=90,
        num_episode_tokens=1000,
        num_samples=5,
        num_sample_tokens=2500,
        num_unique_tokens=1000,
    )
    assert lines(tmp_path, capsys) == [
        "1 of 2 episodes were cut, before 3 turns; engines computed 90 tokens again (9.0%)",
        "5 samples; the learner computed 2,500 tokens for 1,000: 2.50 times as many",
    ]


def test_a_journal_that_does_not_tell_of_contexts_has_no_such_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, tells=False)
    assert lines(tmp_path, capsys) == []
