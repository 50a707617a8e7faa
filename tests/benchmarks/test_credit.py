"""The judge that knows the bug, and how many episodes a run needs with it."""

from pathlib import Path

import pytest

from benchmarks import credit
from benchmarks.simulation.cell import Cell, CellRow, CellRun, Evaluated, Settings, Steps, workbench
from benchmarks.simulation.credit_tables import episodes_to, smoothed, table
from benchmarks.simulation.oracle import true_scores
from trainer.demo import lessons
from trainer.demo.family import make_task

TASK = make_task(11, "train", 0)
FIND, READ = lessons.find(TASK.function), lessons.read(TASK.path)
RIGHT = lessons.edit(TASK.path, TASK.line, TASK.good)
WRONG = lessons.edit(TASK.path, TASK.line + 1, TASK.good)
CHECK = lessons.check(TASK.module, TASK.function, TASK.example)
RESET = lessons.read(TASK.path, reset=True)


def test_every_turn_of_a_good_repair_is_scored_1_but_the_submission() -> None:
    commands = [FIND, READ, RIGHT, CHECK, lessons.SUBMIT]
    assert true_scores(TASK, commands, [False, False, True, True, True]) == {0: 1, 1: 1, 2: 1, 3: 1}


def test_repeated_wrong_and_foreign_turns_are_scored_minus_1_and_format_errors_not_at_all() -> None:
    commands = [FIND, FIND, None, CHECK, WRONG, CHECK, CHECK, RESET, "ls"]
    found = true_scores(TASK, commands, [False] * 9)
    assert found == {0: 1, 1: -1, 3: -1, 4: -1, 5: 1, 6: -1, 7: 1, 8: -1}


def row(*successes: float, method: str = "outcome", accuracy: float = 1.0, seed: int = 0) -> CellRow:
    """Evaluated after every second step, of 16 episodes each."""
    points = [
        Evaluated(step=2 * number, success=one, num_episodes=100) for number, one in enumerate(successes)
    ]
    steps = 2 * (len(successes) - 1)
    judge = {"credit": method, "accuracy": accuracy}
    return CellRow(
        cell=Cell(objective="stream_grpo", lag=1, seed=seed, **judge),  # pyright: ignore[reportArgumentType]
        settings=Settings(num_steps=steps, evaluate_every=2),
        evaluations=points,
        steps=Steps(),
        num_failed=0,
        unknown_share=0.0,
        format_error_share=0.0,
        cpu_s=1.0,
    )


def test_a_curve_is_the_mean_of_neighbouring_evaluations() -> None:
    assert [round(success, 6) for _, success in smoothed(row(0.0, 0.3, 0.6, 0.9))] == [0.15, 0.3, 0.6, 0.75]


def test_episodes_are_counted_to_where_the_smoothed_curve_crosses_the_target() -> None:
    rising = row(0.0, 0.3, 0.6, 0.9)
    assert episodes_to(rising, 0.45) == pytest.approx(16 * 3)
    assert episodes_to(rising, 0.1) == 0
    assert episodes_to(rising, 0.95) == 16 * 6, "all of them, because it is never reached"


def test_the_table_compares_each_judge_with_the_outcome_alone_of_its_seed() -> None:
    slow = [row(0.3, 0.4, 0.5, 0.6, seed=0), row(0.1, 0.2, 0.3, 0.4, seed=1)]
    fast = [
        row(0.3, 0.6, 0.7, 0.7, method="outcome_then_steps", accuracy=0.8, seed=0),
        row(0.1, 0.4, 0.5, 0.5, method="outcome_then_steps", accuracy=0.8, seed=1),
        row(0.9, 0.9, 0.9, 0.9, method="outcome_then_steps", accuracy=0.8, seed=2),
    ]
    lines = table([*slow, *fast]).splitlines()
    assert "96 episodes, 45.0 %" in lines[0]
    assert lines[5].startswith("| `outcome` |  |  | 2 | 96 (96 to 96) | 0 of 2 |")
    assert lines[6].startswith("| `outcome_then_steps` | 0.1 | 80 % | 2 | 36 (36 to 36) | 2 of 2 |")
    assert lines[6].endswith("| +12.5 (+12.5 to +12.5) |")


@pytest.mark.slow
def test_a_random_judge_trains_and_a_coefficient_of_0_changes_nothing() -> None:
    tiny = Settings(num_steps=2, groups_per_step=2, group_size=6, num_heldout=8, evaluate_every=2)
    with workbench() as bench:
        alone, unweighted, judged = (
            CellRun(cell, tiny, bench).run()
            for cell in (
                Cell(objective="stream_grpo", lag=0, seed=0),
                Cell(objective="stream_grpo", lag=0, seed=0, credit="outcome_then_steps", coefficient=0.0),
                Cell(objective="stream_grpo", lag=0, seed=0, credit="outcome_then_steps", accuracy=0.5),
            )
        )
    assert (alone.steps, alone.evaluations) == (unweighted.steps, unweighted.evaluations)
    assert judged.steps.grad_norm != alone.steps.grad_norm


def test_without_the_outcome_alone_there_is_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        credit.main(["--table", "--results", str(tmp_path / "none.jsonl")])
    assert "holds no run with the outcome alone" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_runs_each_judge_and_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    cells = ["--short", "--seeds", "0", "--accuracies", "0.5", "--results", str(path)]
    assert credit.main(cells) == 0
    assert capsys.readouterr().out.count("seed 0: success") == 2
    assert credit.main(["--table", *cells]) == 0
    assert "| `outcome_then_steps` | 0.1 | 50 % | 1 |" in capsys.readouterr().out
    assert path.with_suffix(".png").is_file()
