"""What a person sees: never silence, one row per step."""

import io
import os
import pty
from pathlib import Path
from typing import TextIO, cast

import pytest
from msgspec.structs import replace

from pipeline.journal.rows import EvaluationRow, StepDistillation, StepJudging, StepRow
from trainer.records.console import (
    COLUMNS,
    HEARTBEAT_S,
    LineConsole,
    LogFile,
    LoggedConsole,
    TableConsole,
    evaluation_sentence,
    open_console,
)


def row(step: int, reward: float) -> StepRow:
    return StepRow(
        step=step,
        version=step - 1,
        loss=0.25,
        grad_norm=1.5,
        lr=1e-6,
        reward_mean=reward,
        num_trajectories=8,
        request_ids=(),
        num_trained_tokens=1234,
        num_unique_sampled_tokens=1234,
        groups_dropped_zero_variance=3,
        groups_dropped_invalid=1,
        lag_max=2,
        lag_mean=0.5,
        logprob_gap_max=1e-3,
        logprob_gap_mean=1e-5,
        num_gap_tokens=1234,
        wait_s=12.5,
        train_s=3.5,
        num_groups=2,
    )


def test_a_file_gets_one_line_per_step_with_the_smoothed_reward() -> None:
    out = io.StringIO()
    progress = open_console(out)
    progress.show(row(1, 0.0))
    progress.show(row(2, 1.0))
    assert isinstance(progress, LineConsole)
    first, second = out.getvalue().splitlines()
    assert "reward 0.000  mean10 0.000" in first
    for text in ("step 2", "mean10 0.500", "groups 2/4", "lag 0.5/2", "gap 1e-05/1e-03", "tokens 1234"):
        assert text in second


JUDGED = StepJudging(
    num_judged=7,
    num_scored=6,
    num_unjudged=1,
    num_scored_replies=30,
    num_replies=40,
    num_tokens=400,
    score_mean=0.25,
    outcome_size=0.5,
    process_size=0.03,
)


def test_a_judged_step_says_how_much_was_judged_and_how_far_scores_moved_credit() -> None:
    out = io.StringIO()
    progress = open_console(out)
    progress.show(row(1, 0.0))
    progress.show(replace(row(2, 1.0), judging=JUDGED))
    _, second, judged = out.getvalue().splitlines()
    assert "step 2" in second
    assert judged.partition(" ")[2] == (
        "judge: 7 of 8 trajectories trained with a judgement, 75% of their replies with a score, mean score +0.250; "
        "advantages of 0.500 by rewards, moved by 0.030"
    )


TAUGHT = StepDistillation(
    num_taught=7,
    num_left_out=1,
    num_tokens=1400,
    reverse_kl=0.25,
    reverse_kl_low=0.2,
    reverse_kl_high=0.3,
)


def test_a_taught_step_says_how_far_the_policy_is_from_its_teacher() -> None:
    out = io.StringIO()
    progress = open_console(out)
    progress.show(replace(row(1, 0.0), distillation=TAUGHT))
    progress.show(
        replace(row(2, 0.0), distillation=replace(TAUGHT, reverse_kl_low=None, reverse_kl_high=None))
    )
    _, first, _, second = (line.partition(" ")[2] for line in out.getvalue().splitlines())
    rest = "; 7 of 8 trajectories have its log-probs, of 1,400 tokens"
    assert first == f"teacher: reverse KL to the teacher 0.2500 nats a token (0.2000 to 0.3000, 95 %){rest}"
    assert second == f"teacher: reverse KL to the teacher 0.2500 nats a token{rest}"


def test_a_heartbeat_is_written_only_after_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("trainer.records.console.time.monotonic", lambda: now[0])
    out = io.StringIO()
    lines = LineConsole(out)
    lines.say("started")
    lines.beat("step 1 waits for 3 more trajectories")
    assert "waits" not in out.getvalue()
    now[0] += HEARTBEAT_S
    lines.beat("step 1 waits for 3 more trajectories")
    assert "... step 1 waits for 3 more trajectories" in out.getvalue()


def test_a_terminal_keeps_the_steps_and_the_present_in_view() -> None:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb", buffering=0) as screen:
        progress = open_console(terminal)
        assert isinstance(progress, TableConsole)
        with progress:
            progress.beat("step 2 waits for 3 more trajectories")
            progress.show(replace(row(1, 0.5), judging=JUDGED))
            progress.say("engine e1 came back")
        terminal.flush()
        # A terminal gives a line or so at a time; None says that nothing is left.
        shown = b"".join(iter(lambda: screen.read(100_000), None)).decode()
    for text in (
        "step 2 waits for 3 more trajectories",
        *COLUMNS,
        "1e-05/1e-03",
        "7 of 8 traj",
        "engine e1 came back",
    ):
        assert text in shown, "nothing is cut off at 80 characters"


def test_an_evaluation_reads_as_a_sentence_with_its_error_and_its_losses() -> None:
    made = EvaluationRow(
        name="heldout_after",
        version=4,
        greedy=True,
        success=0.5,
        success_low=0.314,
        success_high=0.686,
        num_episodes=25,
        num_failed=2,
    )
    assert evaluation_sentence(made) == (
        "heldout_after (greedy): weights v4 solve 50.0 % (31.4 to 68.6, 95 %) of 25 episodes, 2 without a verdict left out"
    )


def test_a_log_on_a_full_disk_loses_its_lines_and_nothing_else() -> None:
    screen = io.StringIO()
    with LogFile(Path("/dev/full")) as log:
        console = LoggedConsole(LineConsole(screen), LineConsole(cast("TextIO", log)))
        console.say("step 1 was taken")
        console.beat("waiting")
    assert "step 1 was taken" in screen.getvalue()
