"""The simulation of the demo: its sandbox says what bash says, its samples are what the learner would have sampled."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import curriculum, staleness
from benchmarks.habits import HABITS
from benchmarks.simulation.cell import Cell, CellRow, CellRun, Settings, Workbench, workbench
from benchmarks.simulation.failures import failed
from benchmarks.simulation.interpreter import Interpreter, interpreter
from benchmarks.simulation.results import missing, over_groups, over_seeds, read, run
from benchmarks.simulation.sandbox import Repository, solves
from benchmarks.simulation.tables import tables
from tests.trainer.demo.test_rehearsal import bash, checked_out
from trainer.demo import lessons
from trainer.demo.family import make_task

TINY = Settings(
    num_steps=3, groups_per_step=2, group_size=6, num_heldout=8, evaluate_every=2, final_episodes=1
)
TASK = make_task(11, "train", 0)


@pytest.fixture(scope="module")
def python() -> Iterator[Interpreter]:
    with interpreter() as child:
        yield child


@pytest.fixture(scope="module")
def bench() -> Iterator[Workbench]:
    with workbench() as made:
        yield made


@pytest.mark.parametrize(
    "command",
    [
        lessons.find(TASK.function),
        lessons.find("no_such"),
        lessons.read(TASK.path),
        lessons.read(f"./{TASK.path}"),
        lessons.read("no/such.py"),
        lessons.read(TASK.path.split("/")[0]),
        lessons.edit("no/such.py", 3, "    pass"),
        lessons.edit(TASK.path.split("/")[0], 3, "    pass"),
        lessons.edit(TASK.path, 0, "    pass"),
        lessons.edit(TASK.path, 99, "    pass"),
        lessons.check(TASK.module, TASK.function, TASK.example),
        lessons.check(TASK.module, "no_such", "no_such(1) == 1"),
        lessons.check(TASK.module, TASK.function, f"{TASK.function}() =="),
        lessons.check("no.such", "such", "such(1) == 1"),
        lessons.check(f"{TASK.module.split('.')[0]}.nothing", "such", "such(1) == 1"),
        "teztit it",
        "cat -n 'unclosed",
    ],
)
def test_bash_says_what_the_simulated_sandbox_says(command: str, python: Interpreter, tmp_path: Path) -> None:
    root = checked_out(TASK.files, tmp_path)
    returncode, output = bash(command, root)
    shown = output.replace(str(root), "/workspace")
    assert Repository(TASK.files, python).run(command) == (returncode, shown)


def test_an_edit_is_seen_by_the_tests_and_undone_by_a_checkout(python: Interpreter) -> None:
    repository = Repository(TASK.files, python)
    assert not solves(TASK, repository.files, python)
    repository.run(lessons.edit(TASK.path, TASK.line, TASK.good))
    assert repository.run(lessons.check(TASK.module, TASK.function, TASK.example)).output == "True\n"
    assert solves(TASK, repository.files, python)
    repository.run(lessons.read(TASK.path, reset=True))
    assert repository.files == TASK.files


@pytest.mark.slow_but_for("x = [0] * 10**10", "import o*")
@pytest.mark.parametrize(
    "source", ["while True: pass", "x = [0] * 10**10", "import os\nos.abort()", "raise SystemExit(0)"]
)
def test_what_the_policy_wrote_cannot_hold_or_end_the_simulation(source: str, python: Interpreter) -> None:
    assert python.evaluate(source, ("1",))[0].value is None
    assert python.evaluate("x = 2", ("x", "y")) == (
        ("", "2", ""),
        ("", None, "NameError: name 'y' is not defined"),
    )


@pytest.mark.slow
def test_a_command_that_never_ends_is_stopped(python: Interpreter) -> None:
    repository = Repository({"a/b.py": "def f():\n    while True: pass\n"}, python)
    assert repository.run(lessons.check("a.b", "f", "f() == 1")).returncode is None


def test_a_policy_that_is_forced_to_check_checks_after_every_edit(bench: Workbench) -> None:
    tasks = [make_task(11, "heldout", number) for number in range(4)]
    forced = HABITS["runs a check after each edit"]
    for episode in bench.play(tasks, bench.start, version=-1, draw=("forced",), forced=forced):
        texts = [turn.text for turn in episode.turns]
        after_edits = [
            text
            for command, text in zip(episode.commands, texts[1:], strict=False)
            if command is not None and "sed -i" in command
        ]
        assert after_edits
        assert all(text.startswith("THOUGHT: test it.") for text in after_edits)


@pytest.mark.slow
def test_at_lag_0_the_learner_finds_the_log_probs_that_were_sampled(bench: Workbench) -> None:
    row = CellRun(Cell(objective="reinforce", lag=0, seed=0), TINY, bench).run()
    trained = [number for number, groups in enumerate(row.steps.num_groups) if groups]
    assert trained
    assert all(row.steps.behaviour_kl[number] < 1e-7 for number in trained)
    assert row.unknown_share < 0.05
    assert [one.step for one in row.evaluations] == [0, 2, 3]


@pytest.mark.slow
def test_a_lag_of_two_samples_the_first_three_steps_from_the_start(bench: Workbench) -> None:
    fresh = CellRun(Cell(objective="stream_grpo", lag=0, seed=1), TINY, bench).run()
    stale = CellRun(Cell(objective="stream_grpo", lag=2, seed=1), TINY, bench).run()
    assert stale.steps.behaviour_kl[0] == pytest.approx(fresh.steps.behaviour_kl[0], abs=1e-8)
    assert stale.steps.behaviour_kl[2] > 100 * max(fresh.steps.behaviour_kl[2], 1e-9)


@pytest.mark.slow
def test_failed_episodes_are_no_members_and_as_zero_they_are_trained(bench: Workbench) -> None:
    settings = msgspec.structs.replace(TINY, failure_share=0.9, num_steps=1)
    left_out = CellRun(Cell(objective="cispo", lag=0, seed=0, failures="random"), settings, bench).run()
    as_zero = CellRun(Cell(objective="cispo", lag=0, seed=0, failures="as_zero"), settings, bench).run()
    assert left_out.num_failed == as_zero.num_failed > 6
    assert sum(left_out.steps.num_groups) <= sum(as_zero.steps.num_groups)


def test_failures_by_length_prefer_the_long_and_have_the_same_share() -> None:
    rng, turns = random.Random(0), [2, 6] * 5_000
    found = failed("by_length", 0.1, turns, rng)
    assert sum(found) / len(found) == pytest.approx(0.1, abs=0.01)
    assert sum(found[1::2]) / sum(found[::2]) == pytest.approx(3, rel=0.2)
    assert not any(failed("none", 0.1, turns, rng))


def test_values_of_one_seed_are_one_draw_and_a_single_seed_has_no_interval() -> None:
    assert over_seeds([]) == ""
    assert over_seeds([50.0]) == "50.0"
    # With one degree of freedom, the interval is 12.7 standard errors on each side.
    assert over_seeds([40.0, 60.0]) == "50.0 (-77.1 to 177.1)"
    assert over_groups([[40.0, 40.0], [60.0, 60.0]]) == over_seeds([40.0, 60.0])


@pytest.mark.slow
def test_finished_cells_are_not_run_again(bench: Workbench, tmp_path: Path) -> None:
    cells = [Cell(objective="reinforce", lag=lag, seed=0) for lag in (0, 1)]
    path = tmp_path / "rows.jsonl"
    row = CellRun(cells[0], TINY, bench).run()
    path.write_bytes(msgspec.json.encode(row) + b"\n")
    assert missing(cells, TINY, read(path)) == cells[1:]
    assert missing(cells, Settings(), read(path)) == cells
    assert list(run(missing(cells[:1], TINY, read(path)), TINY, path, jobs=1)) == []
    assert "| `reinforce` |" in tables(read(path))


@pytest.mark.slow
def test_failures_are_compared_with_the_same_runs_without_them(bench: Workbench) -> None:
    row = CellRun(Cell(objective="cispo", lag=1, seed=0), TINY, bench).run()

    def ending(at: float, **varied: Any) -> CellRow:
        end = msgspec.structs.replace(row.final, success=at)
        cell = msgspec.structs.replace(row.cell, **varied)
        return msgspec.structs.replace(row, cell=cell, evaluations=[end])

    rows = [
        *(ending(0.7, seed=0), ending(0.5, seed=0, failures="as_zero")),
        *(ending(0.9, seed=1), ending(0.8, seed=1, failures="as_zero")),
        *(ending(0.9, seed=2), ending(0.1, seed=3, failures="as_zero")),  # these two have no counterpart
    ]
    assert "against the same runs without failures: -15.0 (-78.5 to +48.5), 2 pairs, in points" in tables(
        rows
    )
    assert "against" not in tables([one for one in rows if one.cell.seed == 2])


@pytest.mark.slow
def test_a_lag_that_only_slows_a_run_down_is_seen_although_its_end_is_the_same(bench: Workbench) -> None:
    row = CellRun(Cell(objective="cispo", lag=0, seed=0), TINY, bench).run()

    def run_of(lag: int, seed: int, failures: Any, between: float) -> CellRow:
        first, *_ = row.evaluations
        points = [msgspec.structs.replace(first, success=success) for success in (0.4, between, between, 0.8)]
        cell = Cell(objective="cispo", lag=lag, seed=seed, failures=failures)
        return msgspec.structs.replace(row, cell=cell, evaluations=points)

    rows = [
        *(run_of(0, seed, failures, 0.7) for seed in (0, 1) for failures in ("none", "random")),
        *(run_of(4, 0, failures, between) for failures, between in (("none", 0.5), ("random", 0.6))),
        *(run_of(4, 1, failures, between) for failures, between in (("none", 0.6), ("random", 0.5))),
    ]
    # Four pairs lose 20, 10, 10 and 20 points; both seeds lose 15 on average.
    assert "| `cispo` | -15.0 (-15.0 to -15.0), 4 |" in tables(rows)
    assert "Success during the run" not in tables([one for one in rows if one.cell.lag])


@pytest.mark.slow
def test_a_step_that_masks_nothing_counts_in_the_masked_share(bench: Workbench) -> None:
    row = CellRun(
        Cell(objective="cispo", lag=0, seed=0), msgspec.structs.replace(TINY, num_steps=1), bench
    ).run()
    steps = msgspec.structs.replace(
        row.steps,
        num_groups=[1, 1, 0],
        masked_share=[0.0, 0.04, 0.0],
        ess_share=[1.0, 0.5, 0.0],
        behaviour_kl=[0.01, 0.03, 0.0],
    )
    assert "| `cispo` | 0 | 0.75 | 2 | 0.02 |" in tables([msgspec.structs.replace(row, steps=steps)])


def test_the_table_of_no_cells_is_a_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        staleness.main(["--table", "--results", str(tmp_path / "none.jsonl")])
    assert "run the command without --table first" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_adds_the_missing_cells_and_prints_them_as_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    cells = [
        "--short",
        "--objectives",
        "cispo",
        "--lags",
        "1",
        "--seeds",
        "0",
        "--failures",
        "none",
        "by_length",
    ]
    for num_new in (2, 0):
        assert staleness.main([*cells, "--jobs", "2", "--results", str(path)]) == 0
        assert capsys.readouterr().out.count("cispo lag 1 seed 0") == num_new
    assert staleness.main(["--table", "--short", "--results", str(path)]) == 0
    assert capsys.readouterr().out.count("| `cispo` |") == 3
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_groups_sized_by_success_rate_play_more_episodes_and_all_of_them_are_counted(
    bench: Workbench,
) -> None:
    settings = msgspec.structs.replace(TINY, group_size=3, num_tasks=2)
    cell = Cell(objective="stream_grpo", lag=0, seed=0)
    fixed = CellRun(cell, settings, bench).run()
    sized = CellRun(msgspec.structs.replace(cell, max_group_size=9), settings, bench).run()
    assert fixed.steps.num_episodes == [6, 6, 6]
    # A task that was not played counts as one that is solved every other time, for which five members are enough.
    assert sized.steps.num_episodes[0] == 10
    assert sized.episodes_until(3) == sum(sized.steps.num_episodes) > 18
    unknown = msgspec.structs.replace(fixed, steps=msgspec.structs.replace(fixed.steps, num_episodes=[]))
    assert unknown.episodes_until(2) == fixed.episodes_until(2) == 12


@pytest.mark.slow
def test_orders_of_tasks_and_numbers_of_passes_are_compared_on_the_same_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ["--results", str(tmp_path / "rows.jsonl")]
    words = ["--short", "--tasks", "12", "--seeds", "0", "--passes", "1", "2", "--sizes", "0", "9", *results]
    with pytest.raises(SystemExit):
        curriculum.main(["--table", *words])
    assert curriculum.main(words) == 0
    assert curriculum.main(["--table", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:5] for line in lines[-6:]] == [
        [f" {num_passes} ", f" {order} ", f" {members} ", " 1 "]
        for num_passes in (1, 2)
        for order, members in (("plain", "4"), ("plain", "4 to 9"), ("signal", "4"))
    ]
