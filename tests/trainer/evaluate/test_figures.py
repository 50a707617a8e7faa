"""TaskSelection, statistics, the record of results, and comparisons."""

import io
import json
import random
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from statistics import fmean

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.scripted_fleet import played, request, task
from pipeline.frames import EpisodeReport
from pipeline.intervals import pass_at, pass_at_k
from pipeline.request import Claim
from pipeline.taskfile import fingerprint
from pipeline.trajectory import Submitted, Trajectory
from trainer.evaluate.__main__ import compare
from trainer.evaluate.endpoint import ProgressLines, TaskSelection
from trainer.evaluate.results import (
    EpisodeResult,
    EvaluationDirectory,
    digest_of,
    graded_runs,
    summary_of,
    table,
)

TASKS = [task(f"bench:{name}") for name in ("b-2", "a-1", "c-3", "a-10")]


def ids(selection: TaskSelection) -> list[str]:
    return [one.id.removeprefix("bench:") for one in selection.of(TASKS)]


def test_tasks_are_filtered_then_sliced() -> None:
    assert ids(TaskSelection(pattern="a-")) == ["a-1", "a-10"]
    assert ids(TaskSelection(pattern="bench:c")) == ["c-3"]
    assert ids(TaskSelection(pattern=".*-[12]", part="1:")) == ["a-1", "a-10"]
    assert ids(TaskSelection(part="0:2")) == ["b-2", "a-1"]
    assert ids(TaskSelection(part="::2", max_instances=1)) == ["b-2"]


def test_shuffling_is_the_same_each_time_whatever_the_file_s_order() -> None:
    assert ids(TaskSelection(shuffle=True)) == [
        one.id.removeprefix("bench:") for one in TaskSelection(shuffle=True).of(TASKS[::-1])
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        TaskSelection(part="1"),
        TaskSelection(part="a:b"),
        TaskSelection(pattern="("),
        TaskSelection(pattern="zzz"),
    ],
)
def test_a_selection_that_cannot_be_made_is_refused(wrong: TaskSelection) -> None:
    with pytest.raises(ValueError, match=r"--slice|--filter"):
        wrong.of(TASKS)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_success(runs: list[bool], k: int) -> None:
    if k > len(runs):
        with pytest.raises(ValueError, match="k must be between"):
            pass_at_k(len(runs), sum(runs), k)
    else:
        share = fmean(any(some) for some in combinations(runs, k))
        assert pass_at_k(len(runs), sum(runs), k) == pytest.approx(share)


def test_tasks_with_too_few_graded_episodes_are_left_out_of_pass_at_k() -> None:
    found = pass_at({"a": [True, False], "b": [True]}, 2)
    assert found is not None
    assert (found.value, found.num_draws) == (1.0, 1)
    assert pass_at({"a": [True]}, 2) is None


def test_pass_at_k_counts_only_independent_draws() -> None:
    """Of eight episodes there is one draw of seven; more would make its interval hold the truth in 74 % of cases."""
    draw, held, num_tries, truth = random.Random(3), 0, 400, 1 - 0.7**7
    for _ in range(num_tries):
        runs = {str(task): [draw.random() < 0.3 for _ in range(8)] for task in range(20)}
        found = pass_at(runs, 7)
        assert found is not None
        held += found.low <= truth <= found.high
    assert held / num_tries >= 0.9


def row(name: str, resolved: bool | None, sample: int = 0) -> EpisodeResult:
    return EpisodeResult(
        instance_id=name,
        task_id=f"bench:{name}",
        sample=sample,
        resolved=resolved,
        reward=None if resolved is None else float(resolved),
        decided_by="",
        control="",
        exit_status="Submitted",
        patch_source="submission",
        n_steps=1,
        error="",
        elapsed=1.0,
        prompt_tokens=0,
        completion_tokens=0,
        run_dir=name,
        patch=digest_of(b""),
        task=fingerprint(task(f"bench:{name}")),
    )


def record(directory: Path, *rows: EpisodeResult) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "results.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(one) + b"\n" for one in rows)
    return directory


def test_a_line_that_a_kill_tore_is_cut_off_and_the_last_line_of_an_episode_counts(tmp_path: Path) -> None:
    record(tmp_path, row("a-1", None), row("a-1", True), row("b-2", False), row("b-2", True, sample=1))
    whole = (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").write_bytes(whole + msgspec.json.encode(row("c-3", True))[:40])
    directory = EvaluationDirectory(tmp_path, "m")
    directory.open()
    assert graded_runs(directory.known.values()) == {"bench:a-1": [True], "bench:b-2": [False, True]}
    assert (tmp_path / "results.jsonl").read_bytes() == whole
    assert directory.has(TASKS[1], 0)
    assert not directory.has(TASKS[2], 0)
    assert not directory.has(task("bench:a-1", problem="another"), 0), "the task has changed since"


def ended(name: str, reward: float | None, patch: bytes = b"", sample: int = 0) -> Trajectory:
    """A trajectory of the task; without a reward, one of an infrastructure failure."""
    asked = replace(request(), task=task(f"bench:{name}"), member=sample)
    one = played(Claim(request=asked, attempt=1, worker="w", claimed_at=1.0), reward)
    return one if reward is None else replace(one, outcome=Submitted(patch=patch))


def predictions(path: Path) -> dict[str, str]:
    rows = json.loads((path / "preds.json").read_text())
    return {name: row["model_patch"] for name, row in rows.items()}


def gone_on(path: Path) -> EvaluationDirectory:
    directory = EvaluationDirectory(path, "m")
    directory.open()
    directory.go_on()
    return directory


def test_predictions_are_written_with_each_result_and_made_again_of_what_is_on_the_disk(
    tmp_path: Path,
) -> None:
    first = gone_on(tmp_path)
    first.record(ended("a-1", 1.0, b"+a\n"))
    assert predictions(tmp_path) == {"a-1": "+a\n"}
    first.record(ended("a-1", 0.0, b"+other\n", sample=1))
    first.record(ended("b-2", None))
    (tmp_path / "preds.json").unlink()
    second = gone_on(tmp_path)
    assert predictions(tmp_path) == {"a-1": "+a\n"}
    second.record(ended("b-2", 0.0))
    assert predictions(tmp_path) == {"a-1": "+a\n", "b-2": ""}
    second.record_loss(task("bench:a-1"), 0, "no worker")
    assert predictions(tmp_path) == {"b-2": ""}, "what counts is the last line of an episode"


@pytest.mark.parametrize("left", [b"+of a later episode\n", None], ids=["another patch", "no patch"])
def test_a_result_whose_patch_is_not_the_one_on_the_disk_is_played_again(
    tmp_path: Path, left: bytes | None
) -> None:
    first = gone_on(tmp_path)
    first.record(ended("a-1", 1.0, b"+a\n"))
    first.record(ended("b-2", 1.0, b"+b\n"))
    file = tmp_path / "a-1/patch.diff"
    file.unlink() if left is None else file.write_bytes(left)
    second = gone_on(tmp_path)
    assert not second.has(TASKS[1], 0)
    assert second.has(TASKS[0], 0)
    assert predictions(tmp_path) == {"b-2": "+b\n"}


def test_exit_statuses_name_each_task_once(tmp_path: Path) -> None:
    directory = gone_on(tmp_path)
    rows = [directory.record(ended("a-1", 1.0, b"+a\n", sample=sample)) for sample in range(3)]
    directory.write_overviews({}, rows)
    [file] = tmp_path.glob("exit_statuses_*.yaml")
    assert msgspec.yaml.decode(file.read_bytes()) == {"instances_by_exit_status": {"Submitted": ["a-1"]}}


def test_a_summary_divides_by_episodes_that_have_a_verdict() -> None:
    rows = [row("a-1", True), row("b-2", False), replace(row("c-3", None), n_steps=100)]
    summary = summary_of(rows, model="m", data="d", samples=1, arguments={})
    assert (summary["total"], summary["graded"], summary["resolved"], summary["errors"]) == (3, 2, 1, 1)
    assert (summary["resolve_rate"], summary["success"]["value"], summary["avg_steps"]) == (0.5, 0.5, 1.0)
    assert "1 of 2 tasks resolved by their first episode; 1 more without a verdict" in table(summary)
    nothing = summary_of(rows[2:], model="m", data="d", samples=1, arguments={})
    assert (nothing["resolve_rate"], nothing["avg_steps"]) == (None, None)
    assert "0 of 0 tasks" in table(nothing)


def test_comparing_names_what_was_won_and_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = record(tmp_path / "A", row("a-1", True), row("b-2", False), row("c-3", False), row("a-10", None))
    second = record(tmp_path / "B", row("a-1", False), row("b-2", True), row("c-3", True), row("a-10", True))
    assert compare([str(first), str(second), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["won"], found["lost"]) == (["bench:b-2", "bench:c-3"], ["bench:a-1"])
    assert found["difference"]["value"] == pytest.approx(1 / 3)
    assert (found["num_equal"], found["num_left_out"]) == (0, 1)
    assert compare([str(first), str(second)]) == 0
    assert "won 2: bench:b-2, bench:c-3" in capsys.readouterr().out
    assert compare([str(first), str(tmp_path)]) == 2


def test_evaluating_a_model_behind_a_server_needs_a_worker_s_packages_alone() -> None:
    heavy = "{'torch', 'megatron', 'numpy', 'transformers', 'tensorboard', 'workers'}"
    code = f"import sys, trainer.evaluate.__main__; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_is_said_of_running_episodes_leaves_finished_ones_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.evaluate.endpoint.SILENT_S", -1.0)
    said = io.StringIO()
    lines = ProgressLines(said, num_all=2, num_ended=0)
    lines.progress(EpisodeReport(request_id="a", phase="agent", turn=9))
    lines.progress(
        EpisodeReport(
            request_id="a",
            trajectory=played(Claim(request=request(), attempt=1, worker="w", claimed_at=1.0), 1.0),
        )
    )
    lines.progress(EpisodeReport(request_id="b", phase="agent", turn=2))
    assert said.getvalue().splitlines()[-1] == "... under way; the furthest is at turn 2, agent"
