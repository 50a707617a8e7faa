"""The report says what the journal holds, how the run ended, and whether every request is accounted for."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline.intervals import Estimate, wilson_interval
from pipeline.journal.rows import AuditRow, Drift, EndRow, EpisodeRow, QuarantineRow, SkippedRow
from tests.trainer.journals import Run, reported
from tests.trainer.judge.journals import judged_run
from tests.trainer.records.test_console import JUDGED
from trainer import curve
from trainer.curve import rolling
from trainer.report import __main__ as report
from trainer.report.summary import rate

EXPECTED_KEYS = {
    *(
        "episodes",
        "success_first_quarter",
        "success_last_quarter",
        "heldout_before",
        "heldout_after",
        "steps",
    ),
    *("lag_mean", "lag_max", "logprob_gap_max", "logprob_gap_mean", "trained_over_sampled"),
    *("lost", "trained_twice", "dead"),
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_quarters_follow_the_order_of_finish(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    ids = (
        run.group(0, [0.0, 0.0])
        + run.group(1, [1.0, 0.0])
        + run.group(2, [0.0, 1.0])
        + run.group(3, [1.0, 1.0])
    )
    run.rows.reverse()
    run.step(1, ids)
    status, found = reported(run, capsys)
    assert found.keys() >= EXPECTED_KEYS
    assert (found["episodes"], found["success_first_quarter"], found["success_last_quarter"]) == (8, 0.0, 1.0)
    assert (status, found["steps"], found["trained_over_sampled"]) == (0, 1, 1.0)


def test_what_agent_programs_had_of_the_policy_that_no_step_trains_is_a_line_of_its_own(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step(1, run.group(0, [0.0, 1.0]), num_aside_tokens=1200, num_not_taken=1)
    run.step(2, run.group(1, [0.0, 1.0]), num_aside_tokens=34)
    _, found = reported(run, capsys)
    assert (found["num_aside_tokens"], found["num_not_taken"]) == (1234, 1)
    assert found["trained_over_sampled"] == 1.0, "neither counts in it"
    lines = report.table(report.summarize(run.directory), run.directory).splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("tokens"))
    assert lines[place].endswith("1.0000")
    assert lines[place + 1] == (
        "agent programs        1,234 more tokens in asides, which are not trained; replies that no program took, which are not turns: 1"
    )


def test_a_run_without_agent_programs_has_no_such_line(run: Run) -> None:
    run.step(1, run.group(0, [0.0, 1.0]))
    run.write()
    assert "agent programs" not in report.table(report.summarize(run.directory), run.directory)


def test_the_share_of_groups_without_a_signal_is_told_by_size_where_sizes_differ(run: Run) -> None:
    for cursor in range(3):
        run.group(cursor, [1.0, 0.0])
    run.group(3, [1.0, 1.0], fate="zero_variance")
    run.group(4, [1.0, None], fate="too_few_valid")
    run.write()
    assert "without a signal" not in report.table(report.summarize(run.directory), run.directory)
    run.rows.clear()
    run.group(5, [0.0, 0.0, 1.0])
    run.group(6, [0.0, 0.0, 0.0])  # trained all the same, as under batch.train_without_signal
    run.group(7, [1.0, 0.0, 1.0, 1.0, 1.0], fate="late")  # it closed with a signal, and was trained too late
    run.write()
    low, high = (100 * bound for bound in wilson_interval(0.25, 4))
    few_low, few_high = (100 * bound for bound in wilson_interval(0.5, 2))
    one_low, one_high = (100 * bound for bound in wilson_interval(0.0, 1))
    assert (
        f"without a signal      25.0 % ({low:.1f} to {high:.1f}, 95 %) of 4 groups of 2; "
        f"50.0 % ({few_low:.1f} to {few_high:.1f}, 95 %) of 2 groups of 3; "
        f"0.0 % ({one_low:.1f} to {one_high:.1f}, 95 %) of 1 groups of 5"
    ) in report.table(report.summarize(run.directory), run.directory).splitlines()


def test_members_of_one_group_do_not_count_as_independent(run: Run) -> None:
    run.group(0, [1.0] * 4)
    run.group(1, [0.0] * 4)
    rows = [row for row in run.rows if isinstance(row, EpisodeRow)]
    related, alone = rate(rows), rate([replace(row, group_id=row.request_id) for row in rows])
    assert related == Estimate(0.5, *wilson_interval(0.5, 2), 2), "two draws of 0 and 1, not eight"
    assert alone == Estimate(0.5, *wilson_interval(0.5, 8), 8)


def test_a_failed_episode_is_no_zero(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.step(1, run.group(0, [1.0, 1.0, 1.0, None]))
    _, found = reported(run, capsys)
    assert (found["episodes"], found["success_last_quarter"], found["dead"]) == (3, 1.0, 1)


def test_sampled_evaluations_are_reported_and_greedy_ones_beside_them(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.evaluation("heldout_before", 0.1, greedy=False)
    run.evaluation("heldout_before", 0.2, greedy=True)
    run.evaluation("heldout_after", 0.9, greedy=True)
    run.group(0, [1.0])
    _, found = reported(run, capsys)
    assert (found["heldout_before"], found["heldout_before_greedy"]) == (0.1, 0.2)
    assert (found["heldout_after"], found["heldout_after_greedy"]) == (0.9, 0.9)


def test_lags_and_gaps_are_weighted_by_what_they_are_means_of(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step(1, run.group(0, [1.0]), lag_mean=4.0, lag_max=4, logprob_gap_mean=0.4, logprob_gap_max=0.5)
    run.step(2, run.group(1, [1.0, 0.0, 1.0]), lag_mean=0.0, logprob_gap_mean=0.0, logprob_gap_max=0.1)
    _, found = reported(run, capsys)
    assert (found["lag_mean"], found["lag_max"]) == (1.0, 4)
    assert (found["logprob_gap_mean"], found["logprob_gap_max"]) == (pytest.approx(0.1), 0.5)


@pytest.mark.parametrize("ended", [False, True])
def test_what_is_missing_is_open_until_the_run_ends_and_lost_afterwards(
    run: Run, capsys: pytest.CaptureFixture[str], ended: bool
) -> None:
    run.step(1, run.group(0, [1.0, 0.0]) + run.group(1, [1.0], missing=1))
    run.group(3, [1.0, 1.0])
    if ended:
        run.end(1)
    status, found = reported(run, capsys)
    missing = 1 + 2  # a member of group 1, and group 2
    assert (found["lost"], found["open"]) == ((missing, 0) if ended else (0, missing))
    assert status == int(ended)


@pytest.mark.parametrize("reason", ["stopped", "failing", "error"])
def test_what_is_missing_stays_open_in_a_run_that_can_be_resumed(
    run: Run, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    run.step(1, run.group(0, [1.0, 0.0], missing=2))
    run.end(1, reason)
    status, found = reported(run, capsys)
    assert (status, found["open"], found["lost"], found["ended"]) == (0, 2, 0, False)


def test_a_run_that_was_stopped_has_as_many_open_requests_as_its_end_counted(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step(1, run.group(0, [1.0, 0.0]))
    run.rows.append(EndRow(step=1, version=1, reason="stopped", num_open=48))
    _, found = reported(run, capsys)
    assert (found["open"], found["lost"]) == (48, 0)


def test_the_open_requests_of_a_run_that_goes_on_are_a_lower_bound(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step(1, run.group(0, [1.0, 0.0], missing=2))
    run.write()
    report.main([str(run.directory)])
    assert "0 dead, at least 2 open" in capsys.readouterr().out


def test_what_was_withdrawn_is_not_lost(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.step(1, run.group(0, [1.0, 0.0]))
    run.rows += [
        EpisodeRow(
            request_id=f"late-{member}",
            group_id="group-1",
            task_id="task",
            purpose="train",
            member=member,
            group_size=2,
            fate="withdrawn",
            cursor=1,
        )
        for member in range(2)
    ]
    run.end(1)
    status, found = reported(run, capsys)
    assert (status, found["lost"], found["fates"]) == (0, 0, {"trained": 2, "withdrawn": 2})


def test_places_passed_over_for_a_quarantine_are_not_lost_and_the_table_says_why(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step(1, run.group(0, [1.0, 0.0]) + run.group(2, [1.0, 0.0]))
    run.rows += [
        QuarantineRow(task_id="t1", reason="flaky", request_id="0-1"),
        SkippedRow(cursor=1, task_id="t1"),
        SkippedRow(cursor=3, task_id="t1"),
    ]
    run.end(1)
    status, found = reported(run, capsys)
    assert (status, found["lost"], found["quarantined"]) == (0, 0, {"t1": "flaky"})
    report.main([str(run.directory)])
    assert "quarantine            t1: flaky" in capsys.readouterr().out


def test_training_one_trajectory_twice_is_unhealthy(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    ids = run.group(0, [1.0, 0.0])
    run.step(1, ids)
    run.step(2, ids[:1])
    status, found = reported(run, capsys)
    assert (status, found["trained_twice"]) == (1, 1)


def test_a_run_resumed_after_its_end_has_not_ended(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.step(1, run.group(0, [1.0, 0.0]))
    run.end(1)
    run.step(2, run.group(1, [1.0], missing=1))
    status, found = reported(run, capsys)
    assert (status, found["ended"], found["open"]) == (0, False, 1)


def test_a_run_that_has_just_begun_can_be_reported(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.write()
    assert report.main([str(run.directory)]) == 0
    assert "0 with a reward; none yet" in capsys.readouterr().out


def test_each_weight_version_has_a_line_for_each_held_out_set(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.evaluation("heldout_before", 0.25, greedy=False)
    run.evaluation("heldout_before", 0.5, greedy=True, tasks="hard", version=3, outcomes={"submitted": 7})
    run.step(1, run.group(0, [1.0, 0.0]))
    run.write()
    report.main([str(run.directory)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("evaluation")]
    assert [" ".join(line[1 : line.index("of")]) for line in lines] == [
        "v0 held out: 25.0 % (0.0 to 100.0, 95 %)",
        "v3 hard, greedy: 50.0 % (0.0 to 100.0, 95 %)",
    ]
    assert lines[1][-2:] == ["7", "submitted"]


def test_episodes_whose_tree_was_graded_are_counted(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.step(1, [*run.group(0, [1.0, 0.0], outcome="submitted:tree"), *run.group(1, [1.0])])
    run.write()
    report.main([str(run.directory)])
    line = "from the tree         2 of 3 episodes, because what the agent printed was not a complete patch"
    assert line in capsys.readouterr().out.splitlines()


def test_the_table_gives_percent_with_intervals_and_pairs_held_out_tasks(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, num_solved, ends in (("before", 5, (0.112, 0.469)), ("after", 15, (0.531, 0.888))):
        rewards = {str(task): (float(task < num_solved),) for task in range(20)}
        interval = {"success_low": ends[0], "success_high": ends[1]}
        run.evaluation(f"heldout_{name}", num_solved / 20, greedy=False, rewards=rewards, **interval)
    run.step(1, run.group(0, [1.0, 0.0]))
    run.write()
    report.main([str(run.directory)])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("held out  ")]
    # Paired by task: the low end of an unpaired interval is 19.0.
    assert " ".join(line.split()) == "held out 25.0 (11.2 to 46.9) 75.0 (53.1 to 88.8) +50.0 (+21.3 to +69.6)"


def test_what_controls_said_of_passed_episodes_is_counted(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step(1, run.group(0, [1.0, 1.0], control="confirmed") + run.group(1, [0.0], control="refuted"))
    assert reported(run, capsys)[1]["controls"] == {"confirmed": 2, "refuted": 1}
    report.main([str(run.directory)])
    assert "of passed episodes: 2 confirmed, 1 refuted" in capsys.readouterr().out


def test_a_directory_without_a_journal_is_misuse(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        report.main([str(tmp_path)])
    assert stopped.value.code == 2


@pytest.mark.slow
def test_the_curve_is_drawn(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for cursor in range(10):
        run.step(cursor + 1, run.group(cursor, [float(cursor > 4), 1.0]), entropy=1.0, lag_max=1)
    run.evaluation("heldout_before", 0.2, greedy=False)
    run.write()
    assert curve.main([str(run.directory)]) == 0
    assert (run.directory / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_rewards_beyond_all_sums_stop_no_report_and_no_curve(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for cursor in range(6):
        run.step(cursor + 1, run.group(cursor, [1e308, -1e308, 1e308, 1e308]))
    run.evaluation("heldout_after", 1e308, greedy=False)
    run.write()
    for words in ([], ["--json"]):
        report.main([str(run.directory), *words])
        assert capsys.readouterr().out
    assert curve.main([str(run.directory)]) == 0


def test_rolling_means_cover_their_window_only(run: Run) -> None:
    run.group(0, [0.0, 0.0, 1.0, 1.0])
    rows = [row for row in run.rows if isinstance(row, EpisodeRow)]
    centres, means, lows, highs = rolling(rows, 2)
    assert (list(centres), list(means)) == ([1.0, 2.0, 3.0], [0.0, 0.5, 1.0])
    assert (lows <= means).all()
    assert (means <= highs).all()


def test_a_curve_of_nothing_is_refused(run: Run) -> None:
    run.write()
    with pytest.raises(SystemExit) as stopped:
        curve.main([str(run.directory)])
    assert stopped.value.code == 2


def test_a_gap_that_was_not_measured_is_said_to_be_so(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.step(1, run.group(0, [1.0, 0.0]))
    run.step(2, run.group(1, [1.0, 0.0]), logprob_gap_max=0.0, logprob_gap_mean=0.0, num_gap_tokens=0)
    _, found = reported(run, capsys)
    assert (found["logprob_gap_max"], found["logprob_gap_mean"]) == (None, None)
    report.main([str(run.directory)])
    assert "log-prob gap          not measured" in capsys.readouterr().out


def test_the_mean_gap_is_over_the_tokens_it_was_measured_on(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step(1, run.group(0, [1.0]), logprob_gap_mean=0.4, logprob_gap_max=0.5, num_gap_tokens=10)
    run.step(2, run.group(1, [1.0] * 9))
    _, found = reported(run, capsys)
    assert found["logprob_gap_mean"] == pytest.approx(0.4)


def test_the_drift_report_takes_the_place_of_the_table(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.step(1, run.group(0, [1.0, 0.0]))
    half = Drift(num_tokens=2, mean=0.5, max=0.75, bias=-0.5)
    run.rows.append(
        AuditRow(
            step=1,
            num_tokens=2,
            num_batch_tokens=100,
            num_unmeasured=0,
            num_samples=1,
            num_positions=9,
            gap_max=0.75,
            gap_mean=0.5,
            audit_s=1.0,
            by_version={"0": half},
            by_kind={"call": half},
        )
    )
    _, found = reported(run, capsys)
    assert (found["drift"]["num_tokens"], found["drift"]["by_kind"]["call"]["max"]) == (2, 0.75)
    assert report.main([str(run.directory), "--drift"]) == 0
    shown = capsys.readouterr().out
    assert "kind call" in shown
    assert "2 of 100 trained tokens were measured" in shown
    assert "requests" not in shown


def test_replies_that_were_proved_and_trajectories_that_were_altered_are_counted(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step(1, run.group(0, [1.0, 0.0]), num_proved_replies=7)
    run.group(1, [1.0, 0.0], fate="altered")
    _, found = reported(run, capsys)
    assert found["provenance"] == {"num_replies": 7, "num_altered": 2}
    report.main([str(run.directory)])
    assert (
        "7 replies trained exactly as the engine sampled them; 2 trajectories rejected"
        in capsys.readouterr().out
    )


def test_a_judged_run_says_what_was_judged_and_warns(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    judgements, episodes = judged_run([(-0.5, 1.0), (0.5, 0.0)] * 30, versions=3)
    run.rows += [*judgements, *episodes]
    run.step(1, [row.request_id for row in episodes], judging=JUDGED)
    run.write()
    assert report.main([str(run.directory)]) == 0
    printed = capsys.readouterr().out
    assert "credit                7 of 8 trajectories trained with a judgement" in printed
    assert "judge requests        60 joined" in printed
    assert "WARNING               the AUC of the judge's mean score is 0.000" in printed


def test_a_run_without_a_judge_says_nothing_of_one(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.step(1, run.group(0, [1.0, 0.0]))
    run.write()
    assert report.main([str(run.directory)]) == 0
    printed = capsys.readouterr().out
    assert [
        line for line in printed.splitlines() if line.startswith(("judge", "credit", "AUC", "votes"))
    ] == []
