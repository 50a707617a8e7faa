"""What a person sees of fine-tuning, on a terminal and in a file, and the report of a run that measured nothing or goes on."""

import io
from pathlib import Path

import pytest

from pipeline.journal.rows import HeldoutLossRow, ImitationStepRow
from tests.pipeline.journal_rows import made, write
from trainer.records.console import LineConsole, TableConsole
from trainer.report.imitation import imitation_table, summarize_imitation

STEP = made(
    ImitationStepRow,
    step=3,
    num_steps=40,
    epoch=1,
    loss=1.25,
    grad_norm=0.5,
    lr=2e-5,
    rows=(4, 0),
    num_trained_tokens=77,
)
MEASURED = made(
    HeldoutLossRow,
    name="step_3",
    step=3,
    loss=2.0,
    likeliest_share=0.5,
    num_tokens=8,
    row_losses=(4.0, 12.0),
    row_likeliest=(4, 0),
    row_tokens=(4, 4),
)


def test_a_file_gets_one_line_for_each_step_and_measurement() -> None:
    out = io.StringIO()
    console = LineConsole(out)
    console.recall(STEP)
    console.show(STEP)
    console.show(MEASURED)
    step, measured = out.getvalue().splitlines()
    assert "step 3/40  epoch 2  loss 1.2500  grad 0.50  lr 2.0e-05  rows 2  tokens 77" in step
    assert "held out, step 3: 2.000 (" in measured
    assert "nats per token, greedy decoding gives 50.0 % (" in measured
    assert "of 8 tokens in 2 rows" in measured


def test_a_terminal_gets_a_table_of_the_numbers_of_fine_tuning() -> None:
    out = io.StringIO()
    with TableConsole(out) as console:
        console.recall(STEP)
        console.show(MEASURED)
    shown = out.getvalue()
    assert "tokens/s" in shown
    assert "3/40" in shown
    assert "reward" not in shown


def test_a_report_without_held_out_rows_says_so(tmp_path: Path) -> None:
    write(tmp_path, STEP)
    table = imitation_table(summarize_imitation(tmp_path), tmp_path)
    assert "nothing was measured" in table
    assert "crashed after step 3" in table
    assert "resume with `python -m trainer.run" in table


def test_one_measurement_is_no_change(tmp_path: Path) -> None:
    write(tmp_path, STEP, MEASURED)
    summary = summarize_imitation(tmp_path)
    assert summary.loss is not None
    assert (summary.loss.before.value, summary.loss.after, summary.loss.change) == (2.0, None, None)
    heading, line, *_ = imitation_table(summary, tmp_path).splitlines()[2:]
    assert heading.split()[:4] == ["held", "out", "step", "3"]
    assert "change" not in heading
    assert line.count(" to ") == 1


@pytest.mark.parametrize("is_same", [True, False])
def test_the_change_of_the_held_out_loss_is_paired_where_the_rows_are_the_same(
    tmp_path: Path, is_same: bool
) -> None:
    before = made(
        HeldoutLossRow,
        name="before",
        loss=3.0,
        num_tokens=8,
        row_losses=(8.0, 16.0),
        row_likeliest=(2, 0),
        row_tokens=(4, 4) if is_same else (3, 5),
    )
    write(tmp_path, before, MEASURED)
    loss = summarize_imitation(tmp_path).loss
    assert loss is not None
    assert loss.after is not None
    assert (loss.before.value, loss.after.value) == (3.0, 2.0)
    if is_same:  # each row lost 1 nat a token, so the paired difference is certain, though the rows differ
        assert loss.change is not None
        assert (loss.change.value, loss.change.low, loss.change.high) == (-1.0, -1.0, -1.0)
        assert loss.after.low < loss.after.value < loss.after.high
        table = imitation_table(summarize_imitation(tmp_path), tmp_path)
        assert ")  -1.0000 (-1.0000 to -1.0000)" in table, "cells do not touch"
    else:
        assert loss.change is None
